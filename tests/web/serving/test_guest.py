"""The page where Gradio starts the server and has its stream: as on ZeroGPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from gradio.context import LocalContext
from gradio_client import Client

from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeBackend, Server]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPACE_ID", "someone/something")
        backend = FakeBackend()
        with contextlib.closing(serve(backend, port=0, through_gradio=True)) as server:
            yield backend, server


@pytest.fixture
def visitor(served: tuple[FakeBackend, Server]) -> Iterator[httpx.Client]:
    headers = {"x-qwen35mm": "1", "user-agent": "a browser"}
    with httpx.Client(base_url=served[1].url, headers=headers, timeout=60) as client:
        client.headers["x-qwen35mm"] = client.post("qwen35mm/session", json={}).json()["key"]
        yield client


def test_an_answer_comes_through_its_queue_and_knows_the_request(
    served: tuple[FakeBackend, Server], visitor: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroGPU's `spaces` looks there for whose quota pays."""
    seen: list[Any] = []
    stream = served[0].stream

    async def noting(*args: Any, **options: Any) -> AsyncIterator[Any]:
        seen.append(LocalContext.request.get(None))
        async for event in stream(*args, **options):
            yield event

    monkeypatch.setattr(served[0], "stream", noting)
    assert visitor.get("").status_code == 200
    app = visitor.post("qwen35mm/api/start", json={}).json()["app"]
    assert (app["through_gradio"], app["client"]) == (True, "")
    sent = visitor.post("qwen35mm/api/send", json={"text": "echo one two"}).json()
    event = visitor.post("gradio_api/call/watch", json={"data": [[sent["reply"]]]}).json()["event_id"]
    told = visitor.get(f"gradio_api/call/watch/{event}").text
    events = [each.partition("data: ")[2] for each in told.split("\n\n") if each.startswith("event: generating")]
    ((last,),) = [json.loads(events[-1])]
    assert "one two" in json.dumps(last["answers"][sent["reply"]])
    assert [request.headers["user-agent"] for request in seen] == ["a browser"]


def test_another_persons_answers_are_not_seen(visitor: httpx.Client) -> None:
    sent = visitor.post("qwen35mm/api/send", json={"text": "echo secret"}).json()
    other = {"x-qwen35mm": "0" * 32}
    event = visitor.post("gradio_api/call/watch", json={"data": [[sent["reply"]]]}, headers=other).json()["event_id"]
    assert "secret" not in visitor.get(f"gradio_api/call/watch/{event}", headers=other).text


@pytest.mark.parametrize("name", ["file=http://127.0.0.1:9/x", "process_recording", "theme.css", "mcp/", "run/chat"])
def test_nothing_else_of_gradio_is_answered(visitor: httpx.Client, name: str) -> None:
    assert visitor.get("config").status_code == 200
    for method in ("GET", "POST", "HEAD"):
        assert visitor.request(method, f"gradio_api/{name}").status_code == 404


def test_its_clients_are_answered(served: tuple[FakeBackend, Server]) -> None:
    assert Client(served[1].url, verbose=False).predict("echo hello", api_name="/chat") == "hello "
