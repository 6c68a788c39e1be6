"""Anthropic's messages, asked for by Anthropic's own client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.server.app import create_app
from tests.server.conftest import CALL, Scripted, sample, serving

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {"name": "weather", "input_schema": {"type": "object", "properties": {"days": {"type": "integer"}}}}
]


@pytest.fixture
def client(claude: anthropic.Anthropic) -> anthropic.Anthropic:
    return claude


def ask(client: anthropic.Anthropic, messages: list[Any] = HELLO, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 40, **options}
    body = {"top_k": 1, "temperature": options.pop("temperature")}
    return client.messages.create(model="demo", messages=messages, extra_body=body, **options)


def streamed(client: anthropic.Anthropic, messages: list[Any] = HELLO, **options: Any) -> Any:
    options = {"max_tokens": 40, **options}
    body = {"top_k": 1, "temperature": 0}
    with client.messages.stream(model="demo", messages=messages, extra_body=body, **options) as stream:
        return stream.get_final_message()


def test_a_stream_is_the_answer_in_pieces(client: anthropic.Anthropic) -> None:
    whole, pieces = ask(client), streamed(client)
    assert whole.content[0].text.startswith("Hello!")
    assert pieces.content[0].text == whole.content[0].text
    assert (whole.stop_reason, pieces.stop_reason) == ("end_turn", "end_turn")
    assert pieces.usage.output_tokens == whole.usage.output_tokens
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == (
        client.messages.count_tokens(model="demo", messages=HELLO).input_tokens
    )
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"
    stopped = ask(client, stop_sequences=["never", "describe"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "describe")
    begun = [*HELLO, {"role": "assistant", "content": whole.content[0].text[:12]}]
    assert whole.content[0].text[:12] + ask(client, begun).content[0].text == whole.content[0].text


def test_a_picture_is_seen_and_thinking_comes_apart(client: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/jpeg", "data": sample("two-shapes.jpg").partition(",")[2]}
    blocks = [
        {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "How many shapes are there?"},
    ]
    assert ask(client, [{"role": "user", "content": blocks}]).content[0].text == "There are two shapes."
    for answer in (ask, streamed):
        found = answer(client, thinking={"type": "enabled", "budget_tokens": 4}).content
        assert [block.type for block in found] == ["thinking", "text"]
        assert found[0].thinking
        assert found[1].text


def test_tools_are_called_and_their_results_taken(backend: LocalBackend, client: anthropic.Anthropic) -> None:
    scripted = Scripted(backend)
    scripted.text = f"I look.\n\n{CALL.format(3)}\n{CALL.format(4)}"
    with serving(create_app(scripted)) as address:  # pyright: ignore[reportArgumentType]
        client = client.with_options(base_url=address)
        for answer in (ask, streamed):
            reply = answer(client, tools=TOOLS, system=[{"type": "text", "text": "Be brief."}])
            assert [block.type for block in reply.content] == ["text", "tool_use", "tool_use"]
            assert [block.input for block in reply.content[1:]] == [{"days": 3}, {"days": 4}]
            assert reply.stop_reason == "tool_use"
        assert scripted.asked[-1]["tools"][0]["function"]["name"] == "weather"
        assert scripted.asked[-1]["messages"][0].text == "Be brief."
        one = ask(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert len(one.content) == 2
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "Rain"}]}
            for block in reply.content[1:]
        ]
        said = [block.model_dump(exclude_none=True, exclude={"caller"}) for block in reply.content]
        ask(client, [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": results}], tools=TOOLS)
        *_, before, first, second = scripted.asked[-1]["messages"]
        assert [dict(call.arguments) for call in before.tool_calls] == [{"days": 3}, {"days": 4}]
        assert (first.role, first.text, second.tool_call_id) == ("tool", "Rain", before.tool_calls[1].id)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 500}, "temperature must be a number from 0 to 100"),
        ({"max_tokens": "many"}, "max_tokens can't be used"),
        ({"tool_choice": {"type": "any"}}, "no tools to call"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "the document can't be read from None"),
        ({"messages": [{"role": "user", "content": "word " * 30_000}]}, "the context holds 8,192"),
    ],
)
def test_what_cannot_be_used_is_said_in_anthropics_form(
    options: dict[str, Any], words: str, client: anthropic.Anthropic
) -> None:
    for answer in (ask, streamed) if "temperature" not in options else (ask,):
        with pytest.raises(anthropic.BadRequestError) as caught:
            answer(client, **options)
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert words in body["error"]["message"]


def test_the_model_is_listed_in_the_protocols_form(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("demo", "demo", "model")
    assert client.models.retrieve("demo").created_at == model.created_at
