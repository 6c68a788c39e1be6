"""Media whose heads are whole and whose contents are damaged end no conversation, in any protocol."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image as PILImage

from qwen35mm.contract import Event, Image, Message, Text, iter_media
from qwen35mm.engine import Request
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.server.notes import HEADER
from qwen35mm.server.parts import Sources
from tests.server.conftest import sample
from tests.server.instant import Answer, Recording, ask

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PATHS = (CHAT, MESSAGES, RESPONSES)
LEFT_OUT = "[image left out: it can't be read here]"
NOTE = "1 of the media in past turns and tools' results can't be read; a text says so to the model"


def _png() -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    PILImage.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


WHOLE = _png()
# Its head is whole.
CUT = WHOLE[: len(WHOLE) // 2]
# Only its first bytes are a picture's.
HEADLESS = WHOLE[:8] + b"x" * 100
OTHER = base64.b64decode(sample("two-shapes.jpg").partition(",")[2])


class Seeing(Recording):
    """Keeps the prompt, too."""

    prompt = ""
    num_media = 0

    async def _answer(self, work: Request, request: Any, *, commits: bool = False) -> AsyncGenerator[Event, None]:
        text = self.loaded.tokenizer.decode(work.prompt.token_ids.tolist(), skip_special=False)
        # The template leaves out an answer's thinking, empty here, once another question follows.
        self.prompt = text.replace("<think>\n\n</think>\n\n", "")
        self.num_media = len(work.media)
        # What the history and a GPU's process read.
        assert len(list(iter_media(request.messages))) == len(work.media)
        async for event in super()._answer(work, request, commits=commits):
            yield event


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Seeing:
    return Seeing(demo)


@pytest.fixture
def app(backend: Seeing) -> FastAPI:
    return create_app(backend)


def picture(path: str, data: bytes) -> dict[str, Any]:
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    encoded = base64.b64encode(data).decode()
    uri = f"data:image/{kind};base64,{encoded}"
    if path == MESSAGES:
        return {"type": "image", "source": {"type": "base64", "media_type": f"image/{kind}", "data": encoded}}
    return (
        {"type": "image_url", "image_url": {"url": uri}} if path == CHAT else {"type": "input_image", "image_url": uri}
    )


def result(path: str, *data: bytes) -> list[dict[str, Any]]:
    """A call, and its result with pictures."""
    content = [picture(path, each) for each in data]
    if path == CHAT:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        told = {"role": "tool", "tool_call_id": "c", "content": content}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}, told]
    if path == MESSAGES:
        call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        told = {"type": "tool_result", "tool_use_id": "c", "content": content}
        return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [told]}]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": "c", "output": content}]


def seen(path: str, *data: bytes) -> dict[str, Any]:
    return {"role": "user", "content": [picture(path, each) for each in data]}


U = {"role": "user", "content": "Hello"}
SAID = {"role": "assistant", "content": "A red circle."}


def post(app: FastAPI, path: str, turns: list[dict[str, Any]], **more: Any) -> Answer:
    forms = {CHAT: {"messages": turns}, MESSAGES: {"messages": turns, "max_tokens": 5}, RESPONSES: {"input": turns}}
    return asyncio.run(ask(app, path, json.dumps({**forms[path], **more}).encode()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("data", [CUT, HEADLESS], ids=["cut", "headless"])
@pytest.mark.parametrize("path", PATHS)
def test_a_damaged_picture_of_a_past_turn_is_left_out(
    path: str, data: bytes, stream: bool, app: FastAPI, backend: Seeing
) -> None:
    for turns in ([seen(path, data, OTHER), SAID, U], [U, *result(path, data, OTHER)]):
        answer = post(app, path, turns, stream=stream)
        assert (answer.status, answer.is_whole) == (200, True), answer.content
        assert answer.headers[HEADER] == [NOTE]
        assert backend.prompt.count(LEFT_OUT) == 1
        assert backend.num_media == 1
        # The next turn goes on from the same tokens.
        kept = backend.prompt.rpartition("<|im_start|>assistant")[0]
        assert post(app, path, [*turns, SAID, U], stream=stream).status == 200
        assert backend.prompt.startswith(kept)


@pytest.mark.parametrize("path", PATHS)
def test_a_damaged_picture_of_the_question_is_refused(path: str, app: FastAPI) -> None:
    for data in (CUT, HEADLESS):
        for stream in (False, True):
            assert post(app, path, [U, SAID, seen(path, data)], stream=stream).status == 400


@pytest.mark.parametrize("path", PATHS)
def test_strict_servers_refuse_it(path: str, backend: Seeing) -> None:
    app = create_app(backend, strict_fields=True)
    for stream in (False, True):
        assert post(app, path, [seen(path, CUT), SAID, U], stream=stream).status == 400
        assert post(app, path, [seen(path, WHOLE), SAID, U], stream=stream).status == 200


def test_every_choice_reads_the_same(app: FastAPI, backend: Seeing) -> None:
    answer = post(app, CHAT, [seen(CHAT, CUT, OTHER), SAID, U], n=2)
    assert (answer.status, len(answer.json()["choices"])) == (200, 2)
    # The second's media were read once.
    assert [medium.plan is not None for medium in iter_media(backend.asked.messages)] == [False, True]
    assert backend.prompt.count(LEFT_OUT) == 1


def test_a_kept_response_is_gone_on_from(app: FastAPI, backend: Seeing) -> None:
    first = post(app, RESPONSES, [U, *result(RESPONSES, CUT, OTHER)])
    assert first.json()["store"] is True
    kept = backend.prompt.rpartition("<|im_start|>assistant")[0]
    second = post(app, RESPONSES, [U], previous_response_id=first.json()["id"])
    assert (second.status, second.headers[HEADER]) == (200, [NOTE])
    assert backend.prompt.startswith(kept)
    assert [medium.plan is not None for medium in iter_media(backend.asked.messages)] == [False, True]
    third = post(app, RESPONSES, [U], previous_response_id=second.json()["id"])
    assert third.status == 200
    assert backend.prompt.startswith(kept)


def test_tokens_are_counted_as_they_are_read(app: FastAPI, backend: Seeing) -> None:
    turns = [seen(MESSAGES, HEADLESS, OTHER), SAID, U]
    used = post(app, MESSAGES, turns).json()["usage"]["input_tokens"]
    body = json.dumps({"messages": turns}).encode()
    assert asyncio.run(ask(app, f"{MESSAGES}/count_tokens", body)).json() == {"input_tokens": used}


def test_files_of_past_turns_may_be_damaged(backend: Seeing, tmp_path: Path) -> None:
    app = create_app(backend, sources=Sources(tmp_path))
    for name, data in (("text.png", b"Hello"), ("cut.png", CUT)):
        path = tmp_path / name
        path.write_bytes(data)
        asked = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": path.as_uri()}}]}
        assert post(app, CHAT, [asked]).status == 400
        assert post(app, CHAT, [asked, SAID, U]).status == 200
        assert LEFT_OUT in backend.prompt


async def test_a_conversation_without_a_question_reads_it_too(backend: Seeing) -> None:
    given = [Message("user", [Image(CUT, stand_in="[gone]"), Image(OTHER, stand_in="[gone]"), Text("Hello")])]
    async for _ in backend.stream_embedding(given):
        pass
    assert (backend.prompt.count("[gone]"), backend.num_media) == (1, 1)
