"""What happens before a request's turn: nobody's requests hold up another's, and hanging up ends them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from qwen35mm.contract import Event
from qwen35mm.engine import Request
from qwen35mm.errors import RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.server import service
from qwen35mm.server.app import create_app
from qwen35mm.server.keys import Keys
from qwen35mm.server.parts import Sources
from qwen35mm.tokenizer import Tokenizer
from tests.server.conftest import PATIENCE_S
from tests.server.instant import TEXT, Answer, Instant, ask

ANN, BOB = "first-key-of-sixteen", "second-key-of-sixteen"
PICTURE = "https://a.example/picture.png"
CHAT = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]}
BLOCKS = [{"type": "image", "source": {"type": "url", "url": PICTURE}}]
MESSAGES = {"max_tokens": 5, "messages": [{"role": "user", "content": BLOCKS}]}
RESPONSES = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", MESSAGES),
        ("/v1/messages/count_tokens", MESSAGES),
        ("/v1/responses", RESPONSES),
        ("/v1/responses/input_tokens", RESPONSES),
        ("/tokenize", CHAT),
        ("/apply-template", CHAT),
    ],
)
async def test_hanging_up_ends_what_is_fetched(path: str, body: dict[str, Any], demo: LoadedModel) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def fetch(*_: Any) -> bytes:
        begun.set()
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value] - it never ends
        finally:
            ended.set()

    app = create_app(Instant(demo), sources=Sources(fetch=fetch))
    answer = await asyncio.wait_for(ask(app, path, json.dumps(body).encode(), hangs_up=begun), PATIENCE_S)
    assert (answer.status, ended.is_set()) == (499, True)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/chat/completions"])
async def test_one_keys_long_texts_hold_up_no_other_key(
    path: str, demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, encode = threading.Event(), Tokenizer.encode_plain

    def slow(tokenizer: Tokenizer, text: str, *args: Any) -> Any:
        if "long" in text:
            assert go_on.wait(PATIENCE_S)
        return encode(tokenizer, text, *args)

    monkeypatch.setattr(Tokenizer, "encode_plain", slow)
    app = create_app(Instant(demo), keys=Keys([ANN, BOB]))

    async def post(path: str, text: str, key: str) -> Answer:
        said = {"prompt": text} if path == "/tokenize" else {"messages": [{"role": "user", "content": text}]}
        body = json.dumps(said | ({"max_tokens": 5} if path == "/v1/messages" else {})).encode()
        return await ask(app, path, body, headers=[("authorization", f"Bearer {key}")])

    asked = [asyncio.create_task(post(path, "long", ANN)) for _ in range(6)]
    try:
        await asyncio.sleep(0)
        assert (await asyncio.wait_for(post("/v1/chat/completions", "short", BOB), PATIENCE_S)).status == 200
    finally:
        go_on.set()
    assert {answer.status for answer in await asyncio.gather(*asked)} == {200}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_stream_that_waits_begins_before_its_turn(
    is_refused: bool, path: str, demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "KEEP_ALIVE_S", 0.001)
    has_begun = asyncio.Event()

    class Waiting(Instant):
        async def _answer(self, work: Request, request: Any, *, commits: bool = False) -> AsyncGenerator[Event, None]:
            await has_begun.wait()
            if is_refused:
                raise RequestError("It can't be answered.")
            async for event in super()._answer(work, request, commits=commits):
                yield event

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            await send(message)
            has_begun.set()

        await create_app(Waiting(demo))(scope, receive, sent)

    said: dict[str, Any] = {"input": "Hi", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    name = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path, "messages")
    body = json.dumps({name: said[name], "max_tokens": 5, "stream": True}).encode()
    answer = await asyncio.wait_for(ask(app, path, body), PATIENCE_S)  # type: ignore[arg-type] - as an application
    text = answer.content.decode()
    assert (answer.status, answer.is_whole, "It can't be answered." in text) == (200, True, is_refused)
    assert is_refused or TEXT in text


async def test_hanging_up_ends_a_stream_that_waits(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KEEP_ALIVE_S", 0.001)
    begun, has_begun, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Waiting(Instant):
        async def _answer(self, work: Request, request: Any, *, commits: bool = False) -> AsyncGenerator[Event, None]:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            yield  # type: ignore[misc] - never

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            await send(message)
            await begun.wait()
            has_begun.set()

        await create_app(Waiting(demo))(scope, receive, sent)

    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    await asyncio.wait_for(ask(app, "/v1/chat/completions", body, hangs_up=has_begun), PATIENCE_S)  # type: ignore
    await asyncio.wait_for(ended.wait(), PATIENCE_S)
