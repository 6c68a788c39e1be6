"""The OpenAPI document is true: what it allows and what it forbids is sent, and what comes back is as it says."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import requests
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import TypeAdapter
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
)

from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.server.shapes import ChatMessage
from tests.server.instant import Instant, ask

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    positive_data_acceptance,
]
# A conversation of random words and calls is seldom one that can be answered, and takes longest to make up.
CONVERSATIONS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens")
# The document says what clients should send here; the server takes more. test_tolerance.py tries what.
TOLERANT = (*CONVERSATIONS, "/v1/responses", "/v1/responses/input_tokens", "/v1/completions", "/apply-template")

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "model": "default", "max_tokens": 3}
MODES: tuple[Any, ...] = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def app(demo: LoadedModel) -> FastAPI:
    return create_app(Instant(demo))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def send(app: FastAPI, loop: asyncio.AbstractEventLoop, case: Case) -> schemathesis.Response:
    """What the application answers to a case."""
    how = case.as_transport_kwargs("http://127.0.0.1")
    request = requests.Request(**how).prepare()
    place = urlsplit(str(request.url))
    body: Any = request.body or b""
    body = body.encode() if isinstance(body, str) else body
    answer = loop.run_until_complete(ask(app, place.path, body, method=str(request.method), query=place.query))
    return schemathesis.Response(answer.status, answer.headers, answer.content, request, 0.0, False)


def try_cases(app: FastAPI, loop: asyncio.AbstractEventLoop, operation: Any, mode: Any, most: int) -> Counter[int]:
    """Answers by their status; the same cases each time."""
    statuses: Counter[int] = Counter()
    chance = random.Random(17)

    @settings(
        max_examples=most,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        if operation.path in CONVERSATIONS and mode == GenerationMode.POSITIVE and chance.random() < 0.5:
            # Half of them can be answered as far as their conversation goes.
            body: Any = case.body
            body |= {name: value for name, value in HELLO.items() if name in body}
        response = send(app, loop, case)
        statuses[response.status_code] += 1
        # What is well formed may still be another model's name, or a picture that is none: those are 4xx, and said so.
        excluded = [positive_data_acceptance] if response.status_code in (400, 404) else []
        excluded += [negative_data_rejection] if operation.path in TOLERANT else []
        case.validate_response(response, checks=CHECKS, excluded_checks=excluded)

    run()
    return statuses


@pytest.mark.parametrize(
    ("most", "most_conversations", "at_least"),
    [(5, 2, 80), pytest.param(100, 40, 1000, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_every_route_answers_as_the_document_says(
    most: int, most_conversations: int, at_least: int, app: FastAPI, loop: asyncio.AbstractEventLoop
) -> None:
    document = schemathesis.openapi.from_dict(app.openapi())
    num_cases = 0
    answered: dict[str, Counter[int]] = {}
    found: Any
    for found in document.get_all_operations():
        operation = found.ok()
        number = most_conversations if operation.path in CONVERSATIONS else most
        told = answered[operation.label] = Counter()
        # Where nothing is asked for, nothing could be wrong; nor could a part of the path that may be any text.
        strict = [each for each in operation.path_parameters if each.definition["schema"] != {"type": "string"}]
        for mode in MODES if list(operation.body) or list(operation.query) or strict else MODES[:1]:
            told += try_cases(app, loop, operation, mode, number)
        num_cases += told.total()
    assert num_cases >= at_least
    # Each is answered now and then, where nothing must be there before.
    for label, told in answered.items():
        assert told[200] or "{" in label or most < 100, (label, told)


def test_the_document_tells_what_is_refused(app: FastAPI) -> None:
    document: dict[str, Any] = app.openapi()
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            assert "application/json" in told["responses"]["200"]["content"] or path == "/metrics"
            assert {"401", "403", "421", "500"} <= set(told["responses"]), path
            if "requestBody" in told:
                assert {"400", "408", "413", "415", "429"} <= set(told["responses"]), (path, method)


def test_a_route_that_is_added_later_leaves_the_schemas_in_the_document() -> None:
    app = create_app(cast(Any, SimpleNamespace(loaded=SimpleNamespace(name="none"))))
    schemas = app.openapi()["components"]["schemas"]
    app.add_api_route("/mine", lambda: None)
    document = app.openapi()
    assert "/mine" in document["paths"]
    assert document["components"]["schemas"] == schemas != {}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "human", "content": ["Hello"]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Why?"}, {"type": "text", "text": "So."}]},
        {"role": "assistant", "tool_calls": {"id": "1", "name": "look", "arguments": {}}},
        {"role": "tool", "tool_call_id": "1", "content": {"found": [1, 2]}},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "json", "json": {"found": 1}}]},
    ],
    ids=lambda message: message["role"],
)
async def test_the_document_allows_the_messages_that_are_taken(message: dict[str, Any], app: FastAPI) -> None:
    TypeAdapter(ChatMessage).validate_python(message, strict=True)
    body = {"messages": [message, {"role": "user", "content": "Hello"}], "max_tokens": 3}
    answer = await ask(app, CONVERSATIONS[0], json.dumps(body).encode())
    assert answer.status == 200, answer.content
