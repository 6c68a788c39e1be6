"""What happens before a request's turn: nobody's requests hold up another's, and hanging up ends them."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.server.keys import Keys
from qwen35mm.server.parts import Sources
from qwen35mm.tokenizer import Tokenizer
from tests.server.conftest import PATIENCE_S
from tests.server.instant import Answer, Instant, ask

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
