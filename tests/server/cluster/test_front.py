"""What is in front of several engines: what it passes on, what it does itself, and engines that die."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import httpx
import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.server.app import create_app
from qwen35mm.server.cluster.calls import App, AsgiMessage, Call, EngineLostError, run_app
from qwen35mm.server.cluster.conversations import addresses_of
from qwen35mm.server.cluster.front import create_front
from qwen35mm.server.keys import Keys
from qwen35mm.server.metrics import labelled
from tests.server.conftest import HTTP, PATIENCE_S, sent, serving

KEY = "first-key-of-sixteen"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 4}


class OneEngine:
    """A cluster of one engine in this process, which dies at the first requests: each time after so many messages."""

    def __init__(self, app: App, *dies_after: int) -> None:
        self._app = app
        self._dies_after = list(dies_after)
        self.calls: list[Call] = []

    async def answer(self, call: Call) -> AsyncGenerator[list[AsgiMessage], None]:
        self.calls.append(call)
        num_left = self._dies_after.pop(0) if self._dies_after else None
        async with contextlib.aclosing(run_app(self._app, call)) as batches:
            async for batch in batches:
                if num_left is not None:
                    yield batch[:num_left]
                    num_left -= len(batch)
                    if num_left <= 0:
                        raise EngineLostError
                else:
                    yield batch

    async def everywhere(self, call: Call) -> Mapping[str, tuple[int, bytes]]:
        found = [message async for batch in run_app(self._app, call) for message in batch]
        return {"a": (found[0]["status"], b"".join(each.get("body", b"") for each in found)), "b": (500, b"trouble")}


@contextlib.contextmanager
def in_front(app: App, *dies_after: int, **options: Any) -> Iterator[tuple[OneEngine, httpx.Client]]:
    engine = OneEngine(app, *dies_after)
    with (
        serving(create_front(engine, **options)) as address,
        httpx.Client(base_url=address, verify=False, timeout=PATIENCE_S) as client,
    ):
        yield engine, client


def lines(answer: httpx.Response) -> list[Any]:
    """The data of a stream's events, without what every answer has of its own."""
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(each).get("choices", each) if each != "[DONE]" else each for each in data]


def test_an_engine_answers_through_it_as_it_would_alone(backend: LocalBackend, address: str) -> None:
    with in_front(create_app(backend, num_places=2)) as (engine, client):
        for path, body in (
            ("/v1/chat/completions", ASKED),
            ("/v1/chat/completions", {**ASKED, "nonsense": 1}),
            ("/v1/messages", {**ASKED, "model": "default", "temperature": 7}),
            ("/tokenize", {"prompt": "Hello"}),
            ("/nothing", {}),
        ):
            answer, alone = client.post(path, json=body), HTTP.post(address + path, json=body)
            assert answer.status_code == alone.status_code
            assert answer.headers["content-type"] == alone.headers["content-type"]
            assert set(answer.json()) == set(alone.json())
            assert answer.json().get("error") == alone.json().get("error")
        assert engine.calls[0].addresses == addresses_of(engine.calls[0].body, "") != ()
        streamed = {**ASKED, "stream": True}
        found = client.post("/v1/chat/completions", json=streamed)
        assert lines(found) == lines(HTTP.post(f"{address}/v1/chat/completions", json=streamed))
        for path in ("/openapi.json", "/docs"):
            assert client.get(path).content == HTTP.get(address + path).content
        listed, alone = (found.json()["data"] for found in (client.get("/v1/models"), HTTP.get(f"{address}/v1/models")))
        # Made when their servers were.
        assert [each | {"created": 0} for each in listed] == [each | {"created": 0} for each in alone]


def test_a_response_is_gone_on_from_where_it_was_made(backend: LocalBackend) -> None:
    keys = Keys([KEY, KEY + "-2"])
    with in_front(create_app(backend, keys=keys), keys=keys) as (engine, client):
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in (KEY, KEY + "-2"))

        def ask(headers: dict[str, str], **more: Any) -> tuple[bytes, ...]:
            body = {"input": "Hello", "max_output_tokens": 2, **more}
            found = client.post("/v1/responses", json=body, headers=headers)
            ids.append(found.text.partition('"id":"')[2][:37])
            return engine.calls[-1].addresses

        ids: list[str] = []
        first = ask(mine)
        second = ask(mine, previous_response_id=ids[0], stream=True)
        third = ask(mine, previous_response_id=ids[1])
        # Each message has an address, and each request one of its own: others may have said the same.
        assert [len(each) for each in (first, second, third)] == [2, 4, 6]
        assert ask(mine)[0] == first[0]
        assert [call.is_bound for call in engine.calls] == [False, True, True, False]
        assert third[:4] == second
        assert second[:2] == first
        assert client.get(f"/v1/responses/{ids[1]}", headers=mine).json()["id"] == ids[1]
        assert (engine.calls[-1].addresses, engine.calls[-1].is_bound) == (second, True)
        assert client.get(f"/v1/responses/{ids[1]}", headers=theirs).status_code == 404
        assert engine.calls[-1].addresses == ()
        assert not set(ask(theirs, previous_response_id=ids[1])) & set(third)
        assert client.delete(f"/v1/responses/{ids[2]}", headers=mine).json()["deleted"]
        assert client.post(f"/v1/responses/{ids[1]}/cancel", headers=mine).status_code == 400


def test_it_lets_in_whom_an_engine_would_and_reads_no_body_before(backend: LocalBackend) -> None:
    app = create_app(backend, keys=Keys([KEY]))
    with in_front(app, keys=Keys([KEY]), max_body_bytes=1000) as (engine, client):
        assert client.post("/v1/chat/completions", content=b"x" * 10_000).status_code == 401
        assert client.get("/metrics").status_code == 401
        assert client.get("/health").json() == {"status": "ok"}
        assert client.post("/tokenize", json={}, headers={"host": "rebound.example"}).status_code == 421
        assert client.post("/tokenize", json={}, headers={"origin": "https://evil.example"}).status_code == 403
        allowed = {"authorization": f"Bearer {KEY}"}
        large = client.post("/v1/chat/completions", content=b"x" * 10_000, headers=allowed)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")
        assert engine.calls == []
        # The engine's application judges for itself what was passed on.
        assert client.get("/v1/models").status_code == 401
        assert client.post("/v1/chat/completions", json=ASKED, headers=allowed).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_before_its_first_word_is_replaced(backend: LocalBackend, stream: bool) -> None:
    body = {**ASKED, "stream": stream}
    # Before anything, and after the status.
    with in_front(create_app(backend), 0, 1) as (engine, client):
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert len(engine.calls) == 3
        again = client.post("/v1/chat/completions", json=body)
        if stream:
            assert lines(answer) == lines(again)
        else:
            assert answer.json()["choices"] == again.json()["choices"]


def test_engines_that_die_again_and_again_are_told_of(backend: LocalBackend) -> None:
    with in_front(create_app(backend), 0, 0, 0) as (engine, client):
        answer = client.post("/v1/chat/completions", json=ASKED)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_lost")
        assert answer.headers["retry-after"] == "1"
        assert len(engine.calls) == 3
        assert client.post("/v1/chat/completions", json=ASKED).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_whose_engine_dies_ends_with_an_error_of_its_protocol(backend: LocalBackend, path: str) -> None:
    body = {"model": "default", "stream": True, "temperature": 0}
    body |= {"input": "Hello", "max_output_tokens": 4} if path == "/v1/responses" else ASKED
    with in_front(create_app(backend), 3) as (engine, client):
        answer = client.post(path, json=body)
        assert len(engine.calls) == 1, "what was said can't be taken back"
    *_, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if path == "/v1/responses":
        assert (last["type"], last["code"]) == ("error", "engine_lost")
        assert last["sequence_number"] > 0
    else:
        assert last["error"]["type"] == {"/v1/messages": "api_error"}.get(path, "server_error")
        last = last["error"]
    assert "Ask again" in last["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_ends_the_work(endless: Any, stream: bool) -> None:
    with in_front(create_app(endless, num_places=1)) as (_, client):
        body = {**ASKED, "stream": stream, "max_tokens": 64}
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                next(answer.iter_lines())
                assert endless.begun.acquire(timeout=PATIENCE_S)
        else:
            with sent(str(client.base_url), "/v1/chat/completions", body):
                assert endless.begun.acquire(timeout=PATIENCE_S)
        assert endless.ended.acquire(timeout=PATIENCE_S), "the engine's place is free"
        endless.go_on.set()
        assert client.post("/v1/chat/completions", json=ASKED).status_code == 200


def test_metrics_of_all_engines_stand_in_one_text(backend: LocalBackend) -> None:
    with in_front(create_app(backend)) as (_, client):
        client.post("/v1/chat/completions", json=ASKED)
        text = client.get("/metrics").text
    assert 'qwen35mm_requests_total{end="length",engine="a"} 1.0' in text
    assert 'qwen35mm_requests_running{engine="a"} 0.0' in text
    assert "trouble" not in text


def test_families_of_several_engines_stay_together() -> None:
    text = '# HELP n Many.\n# TYPE n counter\nn{end="a b"} 1.0\nn 2.0 17\n# HELP m Much.\n# TYPE m gauge\nm 1.0\n'
    assert labelled({"a": text, "b": text}, "engine").splitlines() == [
        "# HELP n Many.",
        "# TYPE n counter",
        'n{end="a b",engine="a"} 1.0',
        'n{engine="a"} 2.0 17',
        'n{end="a b",engine="b"} 1.0',
        'n{engine="b"} 2.0 17',
        "# HELP m Much.",
        "# TYPE m gauge",
        'm{engine="a"} 1.0',
        'm{engine="b"} 1.0',
    ]
