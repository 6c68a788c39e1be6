"""The endpoint of the Gradio application, with Gradio's own client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from qwen35mm.assets import asset_path
from qwen35mm.errors import ConfigError
from qwen35mm.web import Server, serve
from tests.chat.fake_backend import FakeBackend

SAMPLES = asset_path("samples")
PATIENCE_S = 60


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeBackend, Server]]:
    backend = FakeBackend()
    server = serve(backend, port=0)
    yield backend, server
    server.close()


@pytest.fixture(scope="module")
def client(served: tuple[FakeBackend, Server]) -> Client:
    return Client(served[1].address, verbose=False)


@pytest.fixture
def backend(served: tuple[FakeBackend, Server]) -> FakeBackend:
    served[0].calls.clear()
    return served[0]


def until(condition: Callable[[], bool]) -> None:
    for _ in range(PATIENCE_S * 100):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def test_an_answer_comes_as_it_grows(client: Client, backend: FakeBackend) -> None:
    texts: list[Any] = list(client.submit("echo one two three", api_name="/chat"))
    assert texts[-1] == "one two three "
    assert all(texts[-1].startswith(text) for text in texts)


def test_what_was_said_before_and_how_it_is_answered_go_along(client: Client, backend: FakeBackend) -> None:
    history = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello!"}]
    settings = {"temperature": 0, "max_tokens": 7, "thinking": True}
    answer = client.predict("think That is so.", None, "Be brief.", history, settings, api_name="/chat")
    assert answer == "That is so. "
    (call,) = backend.calls
    assert [(each.role, each.text) for each in call.messages] == [
        ("system", "Be brief."),
        ("user", "Hi."),
        ("assistant", "Hello!"),
        ("user", "think That is so."),
    ]
    assert (call.params.temperature, call.params.max_tokens, call.enable_thinking) == (0, 7, True)
    # What isn't said is as the model's.
    assert call.params.top_k == 20


def test_pictures_and_videos_go_along_and_nothing_stays(
    client: Client, backend: FakeBackend, served: tuple[FakeBackend, Server]
) -> None:
    files = [handle_file(str(SAMPLES / name)) for name in ("three-shapes.png", "changes-color.mp4")]
    assert client.predict("What is this?", files, api_name="/chat") == "1 image, 1 video "
    sources = [part.source for part in backend.calls[0].messages[-1].media]
    media = served[1].store.media
    assert all(Path(source).name in media for source in sources)
    media.collect_garbage(min_age_s=0)
    assert not any(Path(source).exists() for source in sources)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((" ",), "Type a question"),
        (("Hi.", None, "", [{"role": "root", "content": "x"}]), "role"),
        (("Hi.", None, "", None, {"temperature": 9}), "Temperature"),
        (("Hi.", None, "", None, {"heat": 1}), "heat"),
        (("refuse That can't be.",), "That can't be."),
        (("Hi.", [{"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}]), "passwd|upload"),
        (("Hi.", [{"path": "/etc/passwd"}]), "passwd"),
    ],
)
def test_what_cannot_be_is_said(client: Client, backend: FakeBackend, asked: Any, said: str) -> None:
    with pytest.raises((AppError, ValueError), match=said):
        client.submit(*asked, api_name="/chat").result(PATIENCE_S)


def test_a_bug_is_told_by_its_number_alone(client: Client, backend: FakeBackend) -> None:
    with pytest.raises(AppError) as caught:
        client.predict("break", api_name="/chat")
    assert "secret" not in str(caught.value)


def test_a_call_that_is_called_off_ends_its_work(client: Client, backend: FakeBackend) -> None:
    job = client.submit("slow", api_name="/chat")
    until(lambda: bool(job.outputs()))
    assert backend.active == 1
    job.cancel()
    until(lambda: backend.active == 0)


def test_no_more_answers_at_one_time_than_a_person_may_have(client: Client, backend: FakeBackend) -> None:
    jobs = [client.submit("slow", api_name="/chat") for _ in range(4)]
    until(lambda: backend.active == 4)
    with pytest.raises(AppError, match="4 answers in progress"):
        client.predict("echo 5", api_name="/chat")
    for job in jobs:
        job.cancel()
    until(lambda: backend.active == 0)


def test_it_says_what_it_takes(client: Client) -> None:
    told: Any = client.view_api(return_format="dict", print_info=False)
    (endpoint,) = told["named_endpoints"].values()
    parameters = {each["parameter_name"]: each for each in endpoint["parameters"]}
    assert list(parameters) == ["message", "files", "system_prompt", "history", "settings"]
    assert parameters["message"]["type"] == {"type": "string"}
    assert [name for name, each in parameters.items() if not each["parameter_has_default"]] == ["message"]
    assert [each["type"] for each in endpoint["returns"]] == [{"type": "string"}]
    whole = httpx.get(f"{client.src}gradio_api/info", headers=client.headers).json()
    assert whole["named_endpoints"]["/chat"]["description"].startswith("Answers a question")


def test_without_the_token_nobody_calls(served: tuple[FakeBackend, Server]) -> None:
    with pytest.raises(ValueError, match="Could not"):
        Client(served[1].url, verbose=False)
    assert httpx.post(f"{served[1].url}gradio_api/upload", files={"files": b"x"}).status_code == 403


def test_where_people_log_in_a_program_does() -> None:
    backend = FakeBackend()
    server = serve(backend, port=0, auth=[("ann", "secret")])
    try:
        client = Client(server.url, auth=("ann", "secret"), verbose=False)
        assert client.predict("echo hello", api_name="/chat") == "hello "
        with pytest.raises(ValueError, match="Could not login"):
            Client(server.url, auth=("ann", "wrong"), verbose=False)
    finally:
        server.close()


def test_strangers_have_the_pages_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_ID", "someone/something")
    backend = FakeBackend()
    server = serve(backend, port=0)
    try:
        client = Client(server.url, verbose=False)
        job = client.submit("slow", api_name="/chat")
        until(lambda: backend.active == 1)
        with pytest.raises(AppError, match="already have an answer in progress"):
            client.predict("echo again", api_name="/chat")
        job.cancel()
        until(lambda: backend.active == 0)
        call = backend.calls[0]
        assert (call.retain, call.tenant.startswith("call ")) == ("nothing", True)
    finally:
        server.close()


async def test_it_is_a_tool_of_an_mcp_server() -> None:
    backend = FakeBackend()
    server = serve(backend, port=0, token="my-long-token", mcp=True)
    try:
        async with (
            httpx.AsyncClient(timeout=PATIENCE_S) as http,
            streamable_http_client(f"{server.address}gradio_api/mcp/", http_client=http) as (reading, writing, _),
            ClientSession(reading, writing) as session,
        ):
            await session.initialize()
            (tool,) = (await session.list_tools()).tools
            assert (tool.description or "").startswith("Answers a question")
            assert tool.inputSchema["required"] == ["message"]
            answer = await session.call_tool(tool.name, {"message": "echo hello", "settings": {"max_tokens": 5}})
            assert [each.text for each in answer.content if each.type == "text"] == ["hello "]
        assert backend.calls[0].params.max_tokens == 5
        assert httpx.post(f"{server.url}gradio_api/mcp/", json={}).status_code == 403
    finally:
        server.close()


@pytest.mark.parametrize("page", [{"calls": False}, {"auth": [("ann", "secret")]}])
def test_there_is_no_tool_where_it_could_not_be_used(page: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--mcp"):
        serve(FakeBackend(), port=0, mcp=True, **page)


def test_it_can_be_left_out() -> None:
    server = serve(FakeBackend(), port=0, token="", calls=False)
    try:
        for method, path in (("GET", "info"), ("GET", "config"), ("POST", "upload"), ("POST", "call/chat")):
            assert httpx.request(method, f"{server.url}gradio_api/{path}").status_code == 404
    finally:
        server.close()
