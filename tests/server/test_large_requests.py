"""Requests of very many small things: none of them holds the event loop, and so everybody's answers, for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import pytest

from qwen35mm.contract import Message
from qwen35mm.model import LoadedModel
from qwen35mm.server import body
from qwen35mm.server.anthropic.blocks import Blocks
from qwen35mm.server.anthropic.tools import Tool, Toolbox
from qwen35mm.server.app import create_app
from qwen35mm.server.notes import Notes
from qwen35mm.server.openai.chat_messages import read_messages
from qwen35mm.server.openai.responses.item_reader import read_turn
from qwen35mm.server.parts import Parts, Sources
from qwen35mm.server.results import in_order_of_calls
from qwen35mm_preprocess import MediaProcessor
from tests.server.instant import Instant, ask

NUM = 2000
TEXTS = [{"type": "text", "text": "a"}] * NUM
SAID = {"role": "assistant", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


@pytest.fixture
def parts(demo: LoadedModel) -> Parts:
    media = MediaProcessor(demo.image_processing, demo.video_processing)
    return Parts(Sources(), media, None, Notes())


def chat(given: list[Any], parts: Parts) -> Coroutine[Any, Any, Any]:
    return read_messages(given, parts, Notes())


def messages(given: list[Any], parts: Parts) -> Coroutine[Any, Any, Any]:
    return Blocks(parts, Toolbox((), Notes()), Notes()).messages(given)


def responses(given: list[Any], parts: Parts) -> Coroutine[Any, Any, Any]:
    return read_turn(given, "0" * 32, parts, None, Notes())  # type: ignore[arg-type] - nothing is looked up


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (chat, [{"role": "user", "content": TEXTS}]),
        (chat, [{**SAID, "tool_calls": [CALL] * NUM}]),
        (messages, [{"role": "user", "content": TEXTS}]),
        (messages, [{"role": "assistant", "content": [USE] * NUM}]),
        (messages, [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": TEXTS}]}]),
        (responses, [{"role": "user", "content": TEXTS}]),
        (responses, [{"type": "function_call_output", "call_id": "c", "output": TEXTS}]),
        (responses, [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * NUM),
        (responses, [{**SAID, "tool_calls": [CALL] * NUM}]),
    ],
)
def test_a_reader_lets_others_have_the_loop(
    read: Callable[[list[Any], Parts], Coroutine[Any, Any, Any]], given: list[Any], parts: Parts
) -> None:
    assert len(list(read(given, parts).__await__())) >= 7


def test_a_request_of_too_many_objects_is_refused(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_OBJECTS", 10)
    app = create_app(Instant(demo))
    for text, num, status in (("a", 8, 200), ("a", 10, 413), ("{" * 20, 8, 200)):
        asked = [{"role": "user", "content": [{"type": "text", "text": text}] * num}]
        answer = asyncio.run(ask(app, "/v1/chat/completions", json.dumps({"messages": asked}).encode()))
        assert answer.status == status


class Id(str):
    """Counts how often ids are compared."""

    num_compared: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        Id.num_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_results_find_their_calls_at_once() -> None:
    ids = [Id(f"call_{at}") for at in range(200)]
    calls = [{"name": "f", "arguments": {}, "id": each} for each in ids]
    results = [Message("tool", "r", tool_call_id=Id(each)) for each in reversed(ids)]
    found = in_order_of_calls([Message("assistant", tool_calls=calls), *results])
    assert [each.tool_call_id for each in found[1:]] == ids
    assert Id.num_compared < 20 * len(ids)


def test_deferred_tools_are_compared_with_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(*_: object) -> bool:
        raise AssertionError("two tools are compared")

    monkeypatch.setattr(Tool, "__eq__", compared)
    tools = [Tool(name=f"f{at}", input_schema={}, defer_loading=at > 0) for at in range(5)]
    toolbox = Toolbox(tools, Notes())
    assert [tool["function"]["name"] for tool in toolbox.shown] == ["f0"]
    # However often it is named, its schema is told once.
    assert "parameters" in toolbox.introduce("f1")
    assert "parameters" not in toolbox.introduce("f1")
