"""Several models behind one address. What they would compute is a stand-in's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import anyio
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from qwen35mm.backends.shelf import Offer, Shelf
from qwen35mm.errors import CheckpointError
from qwen35mm.model import LoadedModel
from qwen35mm.server.keys import Keys
from qwen35mm.server.notes import HEADER
from qwen35mm.server.several import _Front, create_app_of_models
from tests.server.conftest import HTTP, PATIENCE_S, sent, serving
from tests.server.instant import TEXT, Instant

ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


class Loadable(Instant):
    def close(self) -> None:
        pass

    def without_weights(self) -> Loadable:
        return self


class Models:
    """Two models: `demo` and `bee`, which also has an adapter's name; `bee` is loaded when it may be."""

    def __init__(self, demo: LoadedModel, *, memory_bytes: int = 2, **options: Any) -> None:
        self.may_load = threading.Event()
        self.may_load.set()
        self.is_damaged = False
        self._demo = demo
        names = ("demo", "bee")
        offers = [Offer(name, 1, self._loader(name), context_length=4096, num_slots=2) for name in names]
        offers[1] = replace(offers[1], names=("wasp",), adapters=("poet",))
        self.shelf = Shelf(offers, memory_bytes)
        self.app: Starlette = create_app_of_models(self.shelf, **options)

    def _loader(self, name: str) -> Any:
        def load(progress: Any) -> Instant:
            assert self.may_load.wait(PATIENCE_S)
            if self.is_damaged:
                raise CheckpointError("model.safetensors is cut off.")
            adapters: Any = {"poet": SimpleNamespace(digest="1")} if name == "bee" else {}
            return Loadable(replace(self._demo, name=name, path=Path(name), named_adapters=adapters))

        return load


@pytest.fixture(scope="module")
def here(demo: LoadedModel) -> Models:
    return Models(demo, names=["alias"])


@pytest.fixture(scope="module")
def address(here: Models) -> Iterator[str]:
    with serving(here.app) as address:
        yield address


@contextlib.contextmanager
def asking(models: Models) -> Iterator[TestClient]:
    with TestClient(models.app, "http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def post(client: TestClient, model: str | None = None, path: str = "chat/completions", **fields: Any) -> Any:
    return client.post(f"/v1/{path}", json=ASKED | fields | ({} if model is None else {"model": model}))


def until(condition: Callable[[], object]) -> None:
    for _ in range(int(PATIENCE_S * 1000)):
        if condition():
            return
        time.sleep(0.001)
    pytest.fail("it didn't happen")


def test_openai_s_client_names_either(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    for model in ("demo", "bee", "poet"):
        reply = client.chat.completions.create(model=model, **ASKED)  # type: ignore
        assert (reply.model, reply.choices[0].message.content) == (model, TEXT)
        pieces = [*client.chat.completions.create(model=model, stream=True, **ASKED)]  # type: ignore
        assert {each.model for each in pieces} == {model}
        response = client.responses.create(model=model, input="Hello")
        assert (response.model, response.output_text) == (model, TEXT)
        # The next turn may be another model's: responses are kept for all together.
        other = client.responses.create(model="demo", input="And now?", previous_response_id=response.id)
        assert other.model == "demo"
    assert [each.id for each in client.models.list()] == ["demo", "alias", "bee", "wasp", "poet"]
    with pytest.raises(openai.NotFoundError, match="There is no model 'other' here; 'demo', 'alias', 'bee', 'wasp', "):
        client.chat.completions.create(model="other", **ASKED)  # type: ignore


def test_anthropic_s_client_names_either(address: str) -> None:
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=PATIENCE_S)
    for model in ("demo", "bee"):
        reply = client.messages.create(model=model, **ASKED)  # type: ignore
        assert (reply.model, reply.content[0].text) == (model, TEXT)  # type: ignore
        assert client.messages.count_tokens(model=model, messages=ASKED["messages"]).input_tokens > 0  # type: ignore
    assert [each.id for each in client.models.list()][:3] == ["demo", "alias", "bee"]
    with pytest.raises(anthropic.NotFoundError, match="There is no model 'other' here"):
        client.messages.create(model="other", **ASKED)  # type: ignore


@pytest.mark.parametrize(
    ("asked", "answers"),
    [(None, "demo"), ("", "demo"), ("default", "demo"), ("alias", "demo"), ("wasp", "bee"), ("poet", "poet")],
)
def test_names_and_placeholders_mean_what_they_did(here: Models, asked: str | None, answers: str) -> None:
    with asking(here) as client:
        assert post(client, asked).json()["model"] == answers


def test_any_name_may_be_the_first_model_s(demo: LoadedModel) -> None:
    with asking(Models(demo, names=["*"])) as client:
        assert post(client, "gpt-4o").json()["model"] == "gpt-4o"
        assert post(client, "bee").json()["model"] == "bee"
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["demo", "bee", "wasp", "poet"]
        assert client.get("/v1/models/gpt-4o").json()["id"] == "gpt-4o"


def test_what_is_told_of_each(demo: LoadedModel) -> None:
    models = Models(demo, memory_bytes=1)
    with asking(models) as client:

        def told() -> dict[str, Any]:
            return {each["id"]: each["status"]["value"] for each in client.get("/v1/models").json()["data"]}

        assert told() == dict.fromkeys(("demo", "bee", "wasp", "poet"), "unloaded")
        post(client, "demo")
        assert told() == {"demo": "loaded", **dict.fromkeys(("bee", "wasp", "poet"), "unloaded")}
        post(client, "bee")
        assert told() == {"demo": "unloaded", **dict.fromkeys(("bee", "wasp", "poet"), "loaded")}
        one = client.get("/v1/models/poet").json()
        assert (one["parent"], one["context_length"]) == ("bee", 4096)
        assert client.get("/v1/models/other").status_code == 404
        counted = client.get("/metrics").text
        assert 'qwen35mm_model_loaded{model="demo"} 0.0' in counted
        assert 'qwen35mm_model_loaded{model="bee"} 1.0' in counted
        assert 'qwen35mm_requests_total{end="stop",model="demo"} 1.0' in counted
        assert client.get("/ready").json() == {"status": "ready", "waiting": 0}
        for path in ("/health", "/version", "/openapi.json", "/docs"):
            assert client.get(path).status_code == 200


def test_a_damaged_one_is_refused_while_the_other_answers(demo: LoadedModel) -> None:
    models = Models(demo, keep_alive_s=0.01)
    with asking(models) as client:
        assert post(client, "demo").status_code == 200
        models.is_damaged = True
        refused = post(client, "bee")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
        assert "'bee' can't be loaded: model.safetensors is cut off." in refused.json()["error"]["message"]
        assert post(client, "demo").status_code == 200
        status = client.get("/v1/models/bee").json()["status"]
        assert status == {"value": "failed", "error": "model.safetensors is cut off."}
        models.is_damaged = False
        assert post(client, "bee").status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "last"),
    [
        ("chat/completions", {}, 'data: {"error":{"message":"The model \'bee\''),
        ("messages", {}, 'event: error\ndata: {"type":"error","error":{"type":"'),
        (
            "responses",
            {"input": "Hello"},
            'event: error\ndata: {"type":"error","code":"model_not_loaded","message":"The m',
        ),
    ],
)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_stream_says_that_it_loads(
    demo: LoadedModel, path: str, fields: dict[str, Any], last: str, is_damaged: bool
) -> None:
    """As a client sees it that would leave a silent connection."""
    models = Models(demo, keep_alive_s=0.01)
    body = {key: value for key, value in (ASKED | fields).items() if path != "responses" or key == "input"}
    models.may_load.clear()
    models.is_damaged = is_damaged
    with (
        serving(models.app) as address,
        HTTP.stream("POST", f"{address}/v1/{path}", json=body | {"model": "bee", "stream": True}) as answer,
    ):
        lines = answer.iter_text()
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert next(lines).startswith(": loading the model\n\n")
        models.may_load.set()
        rest = "".join(lines)
    assert (last in rest) == is_damaged
    assert (TEXT in rest) == (not is_damaged)


def test_what_is_no_stream_has_no_comments(demo: LoadedModel) -> None:
    """Some clients ask every address for one."""
    with asking(Models(demo, keep_alive_s=0.0)) as client:
        answer = post(client, "bee", "messages/count_tokens", stream=True)
        assert (answer.headers["content-type"], answer.json()["input_tokens"] > 0) == ("application/json", True)


def test_an_error_of_a_late_stream_is_its_last_event(demo: LoadedModel) -> None:
    models = Models(demo, keep_alive_s=0.01)
    models.may_load.clear()
    with serving(models.app) as address:
        body = ASKED | {"model": "bee", "stream": True, "temperature": -1}
        with HTTP.stream("POST", f"{address}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_text()
            next(lines)
            models.may_load.set()
            assert '"param":"temperature"' in "".join(lines)


def test_who_hangs_up_while_it_loads_leaves_nothing_behind(demo: LoadedModel) -> None:
    models = Models(demo, memory_bytes=1)
    models.may_load.clear()
    with serving(models.app) as address:
        with sent(address, "/v1/chat/completions", ASKED | {"model": "bee"}):
            until(lambda: models.shelf.num_waiting)
        until(lambda: not models.shelf.num_waiting)
        models.may_load.set()
        asked = HTTP.post(f"{address}/v1/chat/completions", json=ASKED | {"model": "demo"})
        assert asked.json()["model"] == "demo"


def test_who_hangs_up_behind_a_late_start_is_no_bug_of_ours(
    demo: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    # No place: it stays in the model's own queue.
    models = Models(demo, keep_alive_s=0.01, num_places=lambda name: 0)
    models.may_load.clear()
    with serving(models.app) as address:

        def num_waiting() -> int:
            return HTTP.get(f"{address}/ready").json()["waiting"]

        body = ASKED | {"model": "bee", "stream": True}
        with HTTP.stream("POST", f"{address}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_text()
            next(lines)
            models.may_load.set()
            until(lambda: num_waiting() == 1 and not models.shelf.num_waiting)
        until(lambda: not num_waiting())
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_keys_come_first(demo: LoadedModel) -> None:
    models = Models(demo, keys=Keys(["a-key-of-sixteen-signs"]))
    with asking(models) as client:
        for method, path in (("POST", "chat/completions"), ("GET", "models"), ("GET", "models/bee")):
            assert client.request(method, f"/v1/{path}", json={"model": "bee"}).status_code == 401
        assert client.get("/metrics").status_code == 401
    assert models.shelf.state("bee") == "unloaded"


@pytest.mark.parametrize("body", ["", "[", "[1]", "\ufeff["])
def test_what_is_no_request_loads_nothing(demo: LoadedModel, body: str) -> None:
    models = Models(demo)
    with asking(models) as client:
        assert client.post("/v1/chat/completions", content=body).status_code == 400
    assert models.shelf.state("demo") == "unloaded"


def test_an_address_that_does_not_exist_loads_nothing(demo: LoadedModel) -> None:
    models = Models(demo)
    with asking(models) as client:
        assert post(client, "bee", "nope").status_code == 404
        assert client.post("/health", json={"model": "bee"}).status_code == 405
        assert models.shelf.state("bee") == "unloaded"
        # A slash too many is forgiven.
        assert post(client, "bee", "chat/completions/").json()["model"] == "bee"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_model_that_is_no_name_is_refused(demo: LoadedModel, path: str) -> None:
    with asking(Models(demo)) as client:
        refused = client.post(path, json=ASKED | {"model": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("whole", "damaged"),
    [(b"Hello", rb"Hello \ud800"), (b"Hello", b"Hello \xff"), (b"{", b"\xef\xbb\xbf{")],
    ids=["half a pair", "a foreign byte", "a mark"],
)
@pytest.mark.parametrize("model", ["demo", "bee"])
def test_damaged_characters_reach_their_model(demo: LoadedModel, model: str, whole: bytes, damaged: bytes) -> None:
    models = Models(demo, memory_bytes=1)
    body = json.dumps(ASKED | {"model": model}).encode().replace(whole, damaged, 1)
    with asking(models) as client:
        answer = client.post("/v1/chat/completions", content=body)
    assert (answer.status_code, answer.json()["model"]) == (200, model)
    assert "damaged characters" in answer.headers[HEADER]
    other = "bee" if model == "demo" else "demo"
    assert (models.shelf.state(model), models.shelf.state(other)) == ("loaded", "unloaded")


async def test_a_body_is_held_by_its_model_s_application_alone() -> None:
    num_bytes = 1 << 22
    messages = [{"type": "http.request", "body": b'{"x": "%s"}' % bytes(num_bytes).replace(b"\0", b"x")}]

    async def received() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def answered(request: Request) -> Response:
        assert len((await request.receive())["body"]) > num_bytes
        # The thread that read it keeps it a moment longer.
        with anyio.fail_after(PATIENCE_S):
            while tracemalloc.get_traced_memory()[0] > num_bytes / 2:
                await asyncio.sleep(0)
        return JSONResponse({})

    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    model: Any = Loadable.__new__(Loadable)
    shelf = Shelf([Offer("demo", 1, lambda progress: model)], 1)
    inner: Any = Starlette(routes=[Route("/ask", answered, methods=["POST"])])
    front = _Front(shelf, lambda name: inner, Keys([]), (), lambda: "demo", 10)
    scope = {"type": "http", "method": "POST", "path": "/ask", "headers": [], "query_string": b""}
    tracemalloc.start()
    try:
        await front(scope, received, send)
    finally:
        tracemalloc.stop()
    assert told[0]["status"] == 200
