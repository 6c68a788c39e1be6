"""Whole and streamed answers are what the clients of OpenAI and Anthropic know, event by event."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import ErrorResponse, RawMessageStreamEvent
from anthropic.types import Message as ClaudeMessage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from qwen35mm.contract import CacheReport, Event, Finished, Prefilled, Result, TextDelta, TokenLogprob
from qwen35mm.engine import Request
from qwen35mm.errors import EngineError
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from tests.server.conftest import PATIENCE_S, serving
from tests.server.instant import Instant
from tests.server.sdk import check, events_in

# What the server adds to OpenAI's types; to Anthropic's it adds nothing.
ADDED = {"reasoning", "reasoning_content", "stop_reason", "timings"}
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["path", "lines"],
    "additionalProperties": False,
}
CONTENT = 'a "long"\n\\path' * 5
CALL = (
    f"<tool_call>\n<function=write>\n<parameter=path>\n{CONTENT}\n</parameter>\n<parameter=lines>\n{{}}\n</parameter>\n"
    "</function>\n</tool_call>"
)
HELLO: Any = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Says:
    """What the model writes."""

    text: str = ""
    thinking: str = ""
    finish_reason: Any = "stop"
    stopped_by: str | None = None
    fails: bool = False
    logprobs: bool = False
    tools: bool = field(default=False)


CASES = {
    "text": Says("A red circle."),
    "nothing": Says(""),
    "thinking": Says("A red circle.", thinking="Hm.\n\nA circle?"),
    "only thinking": Says("", thinking="Hm.", finish_reason="length"),
    "call": Says(CALL.format(3), tools=True),
    "calls": Says(f"I write.\n\n{CALL.format(3)}\n{CALL.format('4.0')}", thinking="Hm.", tools=True),
    "call in thinking": Says("", thinking=f"Hm.\n{CALL.format(3)}", tools=True),
    "call of another name": Says(CALL.format(3).replace("=write", "=delete"), tools=True),
    "cut call": Says(f"I write.\n{CALL.format(3)[:80]}", finish_reason="length", tools=True),
    "text and cut call": Says(f"{CALL.format(3)}\n{CALL.format(3)[:30]}", finish_reason="length", tools=True),
    "length": Says("A red", finish_reason="length"),
    "stop": Says("A red ", stopped_by="circle"),
    "logprobs": Says("A red circle.", thinking="Hm.", logprobs=True),
    "logprobs of calls": Says(f"So: {CALL.format(3)}", logprobs=True, tools=True),
    "error": Says("A red", fails=True),
}
WHOLE = {name: says for name, says in CASES.items() if not says.fails}


class Saying(Instant):
    """Says what it is told to, three characters at a time."""

    says = Says()

    async def _answer(self, work: Request, request: Any, *, commits: bool = False) -> AsyncGenerator[Event, None]:
        says, num_prompt, cache = self.says, len(work.prompt.token_ids), CacheReport(num_cached_tokens=2)
        yield Prefilled(num_prompt, 0.001, 1, cache)
        number, told = 0, []
        channels: Any = (("reasoning", says.thinking), ("answer", says.text))
        for channel, text in channels:
            for at in range(0, len(text), 3):
                number += 1
                piece = text[at : at + 3]
                logprob = TokenLogprob(piece, -0.5, tuple(piece.encode()), 1, (TokenLogprob("x", -1.0, (120,), 2),))
                logprobs = (logprob,) if says.logprobs else ()
                told += logprobs
                yield TextDelta(piece, channel, number, 0.0, logprobs)
        if says.fails:
            raise EngineError("the engine failed")
        result = Result(
            says.text, says.thinking or None, says.finish_reason, (1,) * number, (), num_prompt, number, 0.1, 9.0
        )
        logprobs = tuple(told) if says.logprobs else None
        yield Finished(
            Result(**{**vars(result), "stopped_by": says.stopped_by, "cache": cache, "logprobs": logprobs, "seed": 1})
        )


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Saying:
    return Saying(demo)


@pytest.fixture
async def http(backend: Saying) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture(scope="module")
def address(backend: Saying) -> Iterator[str]:
    with serving(create_app(backend)) as address:
        yield address


@pytest.fixture(scope="module")
def claude(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def chat_body(says: Says) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "write", "parameters": SCHEMA, "strict": True}}
    body: dict[str, Any] = {"model": "demo", "messages": HELLO}
    body |= {"tools": [tool]} if says.tools else {}
    return body | ({"logprobs": True, "top_logprobs": 1} if says.logprobs else {})


def claude_body(says: Says) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 100}
    return body | ({"tools": [{"name": "write", "input_schema": SCHEMA}]} if says.tools else {})


def response_body(says: Says) -> dict[str, Any]:
    tool = {"type": "function", "name": "write", "parameters": SCHEMA, "strict": True}
    body: dict[str, Any] = {"model": "demo", "input": "Hello"} | ({"tools": [tool]} if says.tools else {})
    return body | ({"include": ["message.output_text.logprobs"], "top_logprobs": 1} if says.logprobs else {})


def without(value: Any, *names: str) -> Any:
    """Without the fields that differ between two answers."""
    if isinstance(value, dict):
        return {
            name: without(each, *names) for name, each in value.items() if name not in names and each not in (None, "")
        }
    return [without(each, *names) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", WHOLE)
async def test_whole_answers_are_what_clients_know(name: str, backend: Saying, http: httpx.AsyncClient) -> None:
    backend.says = says = WHOLE[name]
    answer = await http.post("/v1/chat/completions", json=chat_body(says))
    check(ChatCompletion, answer.json(), ADDED)
    assert answer.json()["system_fingerprint"].startswith("fp_")
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.json()["created"] > 1_700_000_000
    check(Response, (await http.post("/v1/responses", json=response_body(says))).json(), {"store"})
    answer = await http.post("/v1/messages", json=claude_body(says))
    check(ClaudeMessage, answer.json())
    assert answer.headers["request-id"].startswith("req_")


@pytest.mark.parametrize("name", CASES)
async def test_chunks_are_what_openais_client_knows(name: str, backend: Saying, http: httpx.AsyncClient) -> None:
    backend.says = says = CASES[name]
    body = {**chat_body(says), "stream": True, "stream_options": {"include_usage": True}}
    events = events_in((await http.post("/v1/chat/completions", json=body)).text)
    assert all(event is None for event, _ in events)
    chunks = [data for _, data in events]
    if says.fails:
        error = chunks.pop()
        assert error["error"] == {
            "message": "the engine failed",
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }
    else:
        assert chunks.pop() == "[DONE]"
    for chunk in chunks:
        check(ChatCompletionChunk, chunk, ADDED)
    assert len({(chunk["id"], chunk["created"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    ends = [each["finish_reason"] for chunk in chunks for each in chunk["choices"] if each["finish_reason"]]
    is_called = says.tools and says.finish_reason == "stop" and "another" not in name
    assert ends == ([] if says.fails else ["tool_calls" if is_called else says.finish_reason])


@pytest.mark.parametrize("name", CASES)
async def test_events_are_what_openais_client_knows(name: str, backend: Saying, http: httpx.AsyncClient) -> None:
    backend.says = says = CASES[name]
    events = events_in((await http.post("/v1/responses", json={**response_body(says), "stream": True})).text)
    for at, (event, data) in enumerate(events):
        assert (event, at) == (data["type"], data["sequence_number"])
        check(ResponseStreamEvent, data, {"store"})
    last = "failed" if says.fails else "completed" if says.finish_reason == "stop" else "incomplete"
    assert events[-1][0] == f"response.{last}"
    items = [data["item"] for event, data in events if event == "response.output_item.done"]
    assert items == events[-1][1]["response"]["output"]


@pytest.mark.parametrize("name", CASES)
async def test_events_are_what_anthropics_client_knows(name: str, backend: Saying, http: httpx.AsyncClient) -> None:
    backend.says = says = CASES[name]
    events = events_in((await http.post("/v1/messages", json={**claude_body(says), "stream": True})).text)
    assert all(event == data["type"] for event, data in events)
    if says.fails:
        check(ErrorResponse, events.pop()[1])
    open_at, index = None, -1
    for event, data in events:
        check(RawMessageStreamEvent, data)
        if event == "content_block_start":
            assert open_at is None
            index += 1
            assert data["index"] == index
            open_at = index
        elif event in ("content_block_delta", "content_block_stop"):
            assert data["index"] == open_at
            open_at = None if event == "content_block_stop" else open_at
    kinds = [event for event, _ in events if not (event or "").startswith("content_block")]
    assert kinds == ["message_start", *([] if says.fails else ["message_delta", "message_stop"])]
    if not says.fails:
        assert open_at is None
        first, last = events[0][1]["message"]["usage"], events[-2][1]["usage"]
        assert {**first, "output_tokens": last["output_tokens"]} == {**last, "service_tier": "standard"}


@pytest.mark.parametrize("name", WHOLE)
def test_openais_stream_of_chunks_adds_up_to_the_whole(name: str, backend: Saying, client: openai.OpenAI) -> None:
    backend.says = says = WHOLE[name]
    body = chat_body(says)
    if says.finish_reason == "length":
        with client.chat.completions.stream(**body) as stream, pytest.raises(openai.LengthFinishReasonError):
            stream.get_final_completion()
        return
    with client.chat.completions.stream(**body) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**body)
    ours = ("id", "created", "timings", "usage", "parsed", "parsed_arguments", "index", "stop_reason")
    assert without(final.to_dict(), *ours) == without(whole.to_dict(), *ours)
    for call in final.choices[0].message.tool_calls or ():
        assert json.loads(call.function.arguments)["path"] == CONTENT


@pytest.mark.parametrize("name", WHOLE)
def test_openais_stream_of_events_adds_up_to_the_whole(name: str, backend: Saying, client: openai.OpenAI) -> None:
    backend.says = says = WHOLE[name]
    body = response_body(says)
    deltas = ""
    with client.responses.stream(**body) as stream:
        for event in stream:
            deltas += event.delta if event.type == "response.function_call_arguments.delta" else ""
        final = stream.get_final_response() if says.finish_reason == "stop" else None
    whole = client.responses.create(**body)
    told = "".join(item.arguments for item in whole.output if item.type == "function_call")
    assert deltas == told
    if final is not None:
        ours = ("id", "call_id", "created_at", "completed_at", "parsed", "parsed_arguments", "store")
        assert without(final.to_dict(), *ours) == without(whole.to_dict(), *ours)


@pytest.mark.parametrize("name", WHOLE)
def test_anthropics_stream_adds_up_to_the_whole(name: str, backend: Saying, claude: anthropic.Anthropic) -> None:
    backend.says = says = WHOLE[name]
    body = claude_body(says)
    with claude.messages.stream(**body) as stream:
        final = stream.get_final_message()
    whole = claude.messages.create(**body)
    if name != "cut call":  # Only a stream has its beginning.
        assert without(final.to_dict(), "id", "parsed_output") == without(whole.to_dict(), "id")
    assert final.stop_reason == whole.stop_reason
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert all(call.input["path"] == CONTENT for call in calls)
    if name == "cut call":
        assert not calls
        assert final.stop_reason == "max_tokens"


async def test_arguments_stream_as_they_are_written(backend: Saying, http: httpx.AsyncClient) -> None:
    backend.says = CASES["call"]
    body = {**chat_body(CASES["call"]), "stream": True}
    events = events_in((await http.post("/v1/chat/completions", json=body)).text)
    deltas = [data["choices"][0]["delta"].get("tool_calls") for _, data in events[:-1]]
    calls = [call for delta in deltas if delta for call in delta]
    assert [call["function"].get("name") for call in calls] == ["write", *[None] * (len(calls) - 1)]
    pieces = [call["function"]["arguments"] for call in calls]
    assert len(pieces) > len(CONTENT) / 3
    assert max(map(len, pieces)) < 30
    assert "".join(pieces) == json.dumps({"path": CONTENT, "lines": 3})
