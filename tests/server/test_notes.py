"""Requests say more than the server knows: it answers and tells what it ignored, or refuses if it is told to."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from qwen35mm.model import LoadedModel
from qwen35mm.server import notes as notes_module
from qwen35mm.server.app import create_app
from qwen35mm.server.errors import ApiError
from qwen35mm.server.notes import HEADER, Notes
from tests.server.instant import Answer, Instant, ask

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HELLO,
    "/v1/messages": {**HELLO, "model": "default", "max_tokens": 5},
    "/v1/messages/count_tokens": {**HELLO, "model": "default"},
    "/v1/responses": {"input": "Hello"},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
}


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Instant:
    return Instant(demo)


@pytest.fixture
def unlogged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "_logged", set())


def post(backend: Instant, path: str, body: dict[str, Any], *, strict: bool = False) -> Answer:
    app = create_app(backend, strict_fields=strict)
    return asyncio.run(ask(app, path, json.dumps(body).encode(), headers=[("content-type", "application/json")]))


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_ignored_and_told(path: str, backend: Instant, unlogged: None, caplog: Any) -> None:
    body = {**BODIES[path], "mood": "good", "nothing": None}
    with caplog.at_level(logging.INFO, "qwen35mm.server.notes"):
        answers = [post(backend, path, body) for _ in range(2)]
    for answer in answers:
        assert answer.status == 200, answer.content
        assert answer.headers[HEADER] == ["mood isn't a known field; ignored"]
    assert len([each for each in caplog.messages if "mood" in each]) == 1
    assert HEADER not in post(backend, path, BODIES[path]).headers


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/responses", "/v1/responses"),
    ],
)
def test_an_address_with_v1_twice_or_not_at_all(given: str, path: str, backend: Instant) -> None:
    assert post(backend, given, BODIES[path]).status == 200
    told = post(backend, given, {}).json()
    assert ("type" in told) == ("messages" in path)
    assert post(backend, f"/v1/v1{path}", BODIES[path]).status == 404


@pytest.mark.parametrize("path", BODIES)
def test_strict_servers_refuse_it(path: str, backend: Instant) -> None:
    answer = post(backend, path, {**BODIES[path], "mood": "good"}, strict=True)
    told = answer.json()["error"]
    assert (answer.status, told["message"]) == (400, "mood isn't a known field. Leave it out.")
    assert path.startswith("/v1/messages") or (told["param"], told["code"]) == ("mood", "unknown_field")
    assert post(backend, path, BODIES[path], strict=True).status == 200


def test_a_stream_tells_it_too(backend: Instant) -> None:
    answer = post(backend, "/v1/chat/completions", {**HELLO, "stream": True, "mood": "good"})
    assert answer.content.endswith(b"[DONE]\n\n")
    assert answer.headers[HEADER] == ["mood isn't a known field; ignored"]


def test_nested_fields_are_told_by_their_place(backend: Instant) -> None:
    tool = {"type": "function", "mood": 1, "function": {"name": "f", "mood": 2}}
    answer = post(backend, "/v1/chat/completions", {**HELLO, "tools": [tool], "store": True})
    assert answer.headers[HEADER][0].split(" | ") == [
        "store isn't supported here; ignored",
        "tools.0.mood isn't a known field; ignored",
        "tools.0.function.mood isn't a known field; ignored",
    ]


def test_the_header_stays_short_and_plain() -> None:
    notes = Notes()
    for at in range(10_000):
        notes.ignore(f"{at}\r\nset-cookie: é{'x' * 1000}")
    assert len(notes.header) < 4000
    assert notes.header.isascii()
    assert notes.header.isprintable()
    assert notes.header.endswith(" | and more")


def test_a_name_of_spaces_is_told_in_a_legal_header() -> None:
    notes = Notes()
    notes.ignore("  ")
    assert notes.header == "isn't a known field; ignored"


@pytest.mark.parametrize("more", [{"k" * 100_000: 1}, {f"k{at}": 1 for at in range(10_000)}])
def test_many_and_long_names_are_told_shortly(more: dict[str, int], backend: Instant) -> None:
    answer = post(backend, "/v1/chat/completions", {**HELLO, **more})
    assert answer.status == 200
    assert len(answer.headers[HEADER][0]) < 4000


def test_the_log_is_bounded(unlogged: None, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "qwen35mm.server.notes"):
        for at in range(2000):
            notes = Notes()
            notes.ignore(f"x{at}")
            notes.log("/v1/chat/completions")
    assert len(caplog.messages) == 500


def test_strict_notes_refuse_changes() -> None:
    with pytest.raises(ApiError, match=r"messages\.1 was carried"):
        Notes(strict=True).change("messages.1", "was carried as a user's")


def test_a_model_may_answer_to_every_name(backend: Instant) -> None:
    app = create_app(backend, names=["mine", "*"])
    for path, body in BODIES.items():
        answer = asyncio.run(ask(app, path, json.dumps({**body, "model": "claude-haiku-9"}).encode()))
        assert answer.status == 200, answer.content
        assert answer.json().get("model", "claude-haiku-9") == "claude-haiku-9"
    answer = asyncio.run(ask(app, "/v1/messages", json.dumps({**BODIES["/v1/messages"], "model": "x" * 300}).encode()))
    assert answer.status == 404
    listed = asyncio.run(ask(app, "/v1/models", method="GET")).json()["data"]
    assert [each["id"] for each in listed] == [backend.loaded.name, "mine"]
    assert asyncio.run(ask(app, "/v1/models/claude-haiku-9", method="GET")).json()["id"] == "claude-haiku-9"
    # Without it, only its own names.
    assert post(backend, "/v1/messages", {**BODIES["/v1/messages"], "model": "claude-haiku-9"}).status == 404
