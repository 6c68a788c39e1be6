"""Responses, asked for by OpenAI's own client, each event held to that client's types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from openai.types.responses import ParsedResponseFunctionToolCall, Response, ResponseStreamEvent
from pydantic import BaseModel, Field

from qwen35mm.backends.local import LocalBackend
from qwen35mm.prompt.calls import CallArguments, CallBegun
from qwen35mm.server.app import create_app
from qwen35mm.server.openai.responses.events import Output
from qwen35mm.server.reply import Piece
from tests.server.conftest import CALL, HTTP, PATIENCE_S, Scripted, sample, serving
from tests.server.sdk import check

# What servers add that the client's types don't have.
ADDED = {"store"}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 4}
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}},
    }
]


def ask(client: openai.OpenAI, given: Any = "Hello", **options: Any) -> Any:
    return client.responses.create(model="demo", input=given, **{"temperature": 0, **options})


def events_of(address: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked by itself and in its place."""
    body = {"input": "Hello", "temperature": 0, "stream": True, **body}
    answer = HTTP.post(f"{address}/v1/responses", json=body)
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    events = []
    for block in filter(None, answer.text.split("\n\n")):
        if not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
            check(ResponseStreamEvent, events[-1], ADDED)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def picture(text: str = "How many shapes are there?") -> list[Any]:
    content = [{"type": "input_image", "image_url": sample("two-shapes.jpg")}, {"type": "input_text", "text": text}]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("reasoning", [{"summary": "auto"}, {}])
def test_a_stream_says_the_response_in_events(reasoning: dict[str, str], address: str) -> None:
    events = events_of(address, reasoning=reasoning, max_output_tokens=60, **THINKING)
    types = [event["type"].removeprefix("response.") for event in events]
    kind = "reasoning_summary_text" if reasoning else "reasoning_text"
    part = "reasoning_summary_part" if reasoning else "content_part"
    assert list(dict.fromkeys(types)) == list(
        dict.fromkeys(
            [
                *("created", "in_progress", "output_item.added", f"{part}.added", f"{kind}.delta", f"{kind}.done"),
                *(f"{part}.done", "output_item.done", "content_part.added", "output_text.delta", "output_text.done"),
                *("content_part.done", "completed"),
            ]
        )
    )
    assert [types.count(name) for name in ("output_item.added", "output_item.done", f"{kind}.done")] == [2, 2, 1]
    response = events[-1]["response"]
    thought, said = response["output"]
    assert [event["item"] for event in events if event["type"].endswith("output_item.done")] == [thought, said]
    for item, delta in ((thought, f"{kind}.delta"), (said, "output_text.delta")):
        pieces = [event["delta"] for event in events if event["type"] == f"response.{delta}"]
        assert "".join(pieces) == (item.get("content") or item["summary"])[0]["text"]
        assert len(pieces) > 1
    assert events[0]["response"]["status"] == "in_progress"
    assert response["status"] == "completed"
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < response["usage"]["output_tokens"]
    # The same in one piece.
    body = {"input": "Hello", "temperature": 0, "reasoning": reasoning, "max_output_tokens": 60, **THINKING}
    whole = HTTP.post(f"{address}/v1/responses", json=body).json()
    check(Response, whole, ADDED)
    assert without_ids(whole["output"]) == without_ids(response["output"])
    assert whole.keys() == response.keys()


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_the_client_streams_parses_and_is_cut(client: openai.OpenAI) -> None:
    whole = ask(client, instructions="Answer.", metadata={"a": "b"}, user="me")
    assert (whole.status, whole.instructions, whole.metadata, whole.user) == ("completed", "Answer.", {"a": "b"}, "me")
    with client.responses.stream(model="demo", input="Hello", instructions="Answer.", temperature=0) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(texts) == whole.output_text

    class Count(BaseModel):
        number: Annotated[int, Field(ge=0, le=9)]

    parsed = client.responses.parse(model="demo", input=picture(), text_format=Count, temperature=0)
    assert isinstance(parsed.output_parsed, Count)
    held = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=8)
    assert held.output_text.startswith("{")
    cut = ask(client, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cut.output[0].status, cut.usage.output_tokens) == ("incomplete", 3)
    last = list(ask(client, max_output_tokens=3, stream=True))[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", cut.output_text)
    counted = client.responses.input_tokens.count(model="demo", input="Hello", instructions="Answer.")
    assert counted.input_tokens == whole.usage.input_tokens


def test_logprobs_are_told_streamed_or_not(client: openai.OpenAI, address: str) -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 5}
    (said,) = ask(client, **asked).output[0].content
    assert "".join(each.token for each in said.logprobs) == said.text
    assert [len(each.top_logprobs) for each in said.logprobs] == [2] * 5
    events = events_of(address, **asked)
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert part == said.to_dict()
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    done = next(event["logprobs"] for event in events if event["type"] == "response.output_text.done")
    assert [each for delta in deltas for each in delta] == done
    assert [(each["token"], each["logprob"]) for each in done] == [(each.token, each.logprob) for each in said.logprobs]
    assert ask(client, max_output_tokens=5).output[0].content[0].logprobs == []


def test_an_answer_is_gone_on_from_and_costs_its_new_message(
    client: openai.OpenAI, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(client, picture())
    assert first.output_text == "There are two shapes."
    assert backend.wait_idle(PATIENCE_S)
    read: list[Any] = []
    media_of = backend.media_of
    monkeypatch.setattr(backend, "media_of", lambda *given: read.append(given) or media_of(*given))
    second = ask(client, "And the colours?", previous_response_id=first.id)
    assert read == []
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 16
    # What a client says itself is the same conversation.
    said = [*picture(), *first.output, {"role": "user", "content": "And the colours?"}]
    itself = ask(client, said, store=False)
    assert (itself.output_text, itself.usage.input_tokens) == (second.output_text, second.usage.input_tokens)
    # Branches: the first can be gone on from again, with other instructions.
    other = ask(client, "And the forms?", previous_response_id=first.id, instructions="Be brief.")
    assert other.usage.input_tokens > second.usage.input_tokens
    third = ask(client, picture("And here?"), previous_response_id=second.id, stream=True)
    assert list(third)[-1].response.previous_response_id == second.id
    ask_way = {"type": "input_text", "text": "Which way does it move?"}
    clip: list[Any] = [{"type": "input_video", "video_url": sample("moves-right.mp4")}, ask_way]
    assert "right" in ask(client, [{"role": "user", "content": clip}]).output_text
    clip[0] = {"type": "input_video", "input_video": {"data": sample("moves-right.mp4").partition(",")[2]}}
    fewer = {"mm_processor_kwargs": {"num_frames": 4}}
    short = ask(client, [{"role": "user", "content": clip}], extra_body=fewer)
    again = ask(client, "Again?", previous_response_id=short.id)
    assert again.usage.input_tokens - short.usage.input_tokens < 60


def test_tools_are_called_streamed_or_not(backend: LocalBackend, client: openai.OpenAI) -> None:
    scripted = Scripted(backend)
    scripted.text = f"I look.\n\n{CALL.format(3)}\n{CALL.format(4)}"
    with serving(create_app(scripted)) as address:  # pyright: ignore[reportArgumentType]
        client = client.with_options(base_url=f"{address}/v1")
        whole = ask(client, tools=TOOLS)
        assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
        assert [json.loads(item.arguments) for item in whole.output[1:]] == [{"days": 3}, {"days": 4}]
        assert scripted.asked[0]["tools"][0]["function"] == {k: v for k, v in TOOLS[0].items() if k != "type"}
        events = events_of(address, tools=TOOLS)
        assert without_ids(events[-1]["response"]["output"]) == without_ids([item.to_dict() for item in whole.output])
        done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
        assert [json.loads(event["arguments"])["days"] for event in done] == [3, 4]
        with client.responses.stream(model="demo", input="Hello", tools=TOOLS) as stream:
            assert stream.get_final_response().output_text == "I look."
        assert len(ask(client, tools=TOOLS, parallel_tool_calls=False).output) == 2
        assert ask(client, tools=TOOLS, tool_choice="none").output_text == scripted.text
        assert scripted.asked[-1]["tools"] == ()
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"} for call in whole.output[1:]
        ]
        scripted.text = "It rains."
        kept = ask(client, results, tools=TOOLS, previous_response_id=whole.id)
        ask(client, [{"role": "user", "content": "Hello"}, *whole.output, *results], tools=TOOLS, store=False)
        references = [{"type": "item_reference", "id": item.id} for item in whole.output]
        ask(client, [{"role": "user", "content": "Hello"}, *references, *results], tools=TOOLS, store=False)
        by_id, by_items, by_reference = (each["messages"] for each in scripted.asked[-3:])
        assert by_id == by_items == by_reference
        # A turn takes the place of the one before in what is computed of its conversation; what isn't kept has none.
        kept_as, *others = (each["conversation"] for each in scripted.asked[-3:])
        assert (kept_as, others) == (scripted.asked[0]["conversation"], [None, None])
        assert kept_as
        asked, said, *given = by_id
        assert (asked.text, said.text, [dict(call.arguments) for call in said.tool_calls]) == (
            "Hello",
            "I look.",
            [{"days": 3}, {"days": 4}],
        )
        assert [(message.role, message.text) for message in given] == [("tool", "Rain")] * 2
        # Results need no call before them.
        ask(client, [{**results[0], "call_id": "call_x"}], previous_response_id=kept.id)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"background": True}, "background", "isn't supported here"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "of type function with the name of a tool"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "'other'"),
    ({"temperature": 200}, "temperature", "from 0 to 100; got 200"),
    ({"max_output_tokens": "many"}, "max_output_tokens", "valid integer"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
    ({"given": []}, "input", "at least 1 item"),
    ({"given": [{"type": "compaction_trigger"}]}, "input.0.type", "no compaction here"),
    ({"given": [3]}, "input.0", "must be a text, or an object"),
    ({"given": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0", "bring its data along"),
    ({"given": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "no item 'msg_1'"),
    (
        {"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a.example/"}]}]},
        "input.0.content.0.image_url",
        "--allow-urls",
    ),
    ({"given": "word " * 30_000}, "input", "the context holds 8,192"),
]


def test_what_cannot_be_used_is_named(client: openai.OpenAI, refused: Callable[..., Any]) -> None:
    for at, (options, param, words) in enumerate(REFUSED):
        error = refused(ask, client=client, stream=bool(at % 2), **options)
        expected = 404 if "msg_1" in words else 400
        assert (error.status_code, error.body["param"], error.body["type"]) == (
            expected,
            param,
            "invalid_request_error",
        )
        assert words in error.body["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"input": NaN}',
        b'{"input": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"input": [{"role": ["user"], "content": "hi"}]}',
        b'{"input": [{"type": ["message"], "role": "user", "content": "hi"}]}',
        b'{"input": [{"role": "user", "content": 5}]}',
        b'{"input": [{"role": "user", "content": [5]}]}',
        b'{"input": "hi", "tools": {"type": "function"}}',
        b'{"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}]}',
    ],
)
def test_a_damaged_body_is_told_so(body: bytes, address: str) -> None:
    answer = HTTP.post(f"{address}/v1/responses", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")


def test_the_document_says_what_bodies_hold(address: str) -> None:
    document = HTTP.get(f"{address}/openapi.json").json()

    def references(value: Any) -> Iterator[str]:
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            if name == "$ref":
                yield each
            elif isinstance(each, dict | list):
                yield from references(each)

    named = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) == named
    post = document["paths"]["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert post["additionalProperties"] is True
    text, items, one = post["properties"]["input"]["oneOf"]
    assert (text["type"], items["items"]["oneOf"]) == ("string", [{"type": "string"}, one])
    parameters = document["paths"]["/v1/responses/{id}/input_items"]["get"]["parameters"]
    assert [each["name"] for each in parameters] == ["id", "after", "include", "limit", "order"]


def test_a_class_says_what_a_tool_takes(client: openai.OpenAI) -> None:
    class Show(BaseModel):
        unit: Literal["celsius", "kelvin"]

    # In this protocol's form, without the object around it.
    tool: Any = {"type": "function", **openai.pydantic_function_tool(Show)["function"]}
    how: dict[str, Any] = {"model": "demo", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    parsed = client.responses.parse(input="Hello", temperature=0, **how)
    (call,) = parsed.output
    assert isinstance(call, ParsedResponseFunctionToolCall)
    assert call.name == "Show"
    assert json.loads(call.arguments)["unit"] in ("celsius", "kelvin")
    with client.responses.stream(input="Hello", temperature=0, **how) as stream:
        (done,) = [event for event in stream if event.type == "response.function_call_arguments.done"]
        assert done.arguments == call.arguments
    # What the client parsed can be sent back as it is.
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Shown."}
    # The demo model has never seen a result, and would go on to the end of the context.
    told = ask(
        client, [{"role": "user", "content": "Hello"}, *parsed.output, result], tools=[tool], max_output_tokens=3
    )
    assert parsed.usage is not None
    assert told.usage.input_tokens > parsed.usage.input_tokens


@pytest.mark.parametrize("kind", ["call", "text", "thinking"])
def test_long_texts_are_written_in_linear_time(kind: Literal["call", "text", "thinking"]) -> None:
    """Copying what is written at each delta takes minutes."""
    output = Output("0" * 32, lambda name: {"type": "function_call", "name": name})
    delta, number = "x" * 800, 40_000
    if kind == "call":
        assert len(list(output.take(CallBegun(0, "f")))) == 1
    found = CallArguments(0, delta) if kind == "call" else Piece(kind, delta)
    assert sum(event.get("delta") == delta for _ in range(number) for event in output.take(found)) == number
    *_, last = output.end()
    written = last["item"]["arguments"] if kind == "call" else last["item"]["content"][0]["text"]
    assert written == delta * number
