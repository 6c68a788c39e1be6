"""Answers that must call tools, asked for by OpenAI's and by Anthropic's own clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.model import LoadedModel
from tests.server.conftest import PATIENCE_S

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
# A model of a few megabytes writes texts without an end: here are none.
UNITS = {"type": "object", "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"enum": [1, 2]}}}
UNITS |= {"required": ["unit"], "additionalProperties": False}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("weather", UNITS), tool("clock", NOTHING)]


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 160, "tools": TOOLS, **options}
    return client.chat.completions.create(model="demo", messages=options.pop("messages", HELLO), **options)


def arguments_of(call: Any) -> dict[str, Any]:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["unit"] in ("celsius", "kelvin")
        assert set(arguments) <= {"unit", "days"}
        assert arguments.get("days", 1) in (1, 2)
    else:
        assert (call.function.name, arguments) == ("clock", {})
    return arguments


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_is_required(temperature: float, client: openai.OpenAI) -> None:
    one = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": temperature}
    choice = ask(client, **one).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    arguments_of(call)
    chunks = [chunk.choices[0] for chunk in ask(client, **one, stream=True) if chunk.choices]
    begun, *rest = [made for chunk in chunks for made in chunk.delta.tool_calls or []]
    assert begun.function.name == call.function.name
    arguments = [begun.function.arguments, *(made.function.arguments for made in rest)]
    assert "".join(arguments) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)
    named = ask(client, tool_choice={"type": "function", "function": {"name": "clock"}}, temperature=temperature)
    assert [made.function.name for made in named.choices[0].message.tool_calls] == ["clock"]


@pytest.mark.parametrize("is_flat", [False, True])
def test_only_allowed_tools_are_called(is_flat: bool, client: openai.OpenAI) -> None:
    names = [{"type": "function", "name": "clock"} if is_flat else tool("clock", NOTHING), {"type": "custom"}]
    allowed = {"mode": "required", "tools": names}
    choice = {"type": "allowed_tools", **(allowed if is_flat else {"allowed_tools": allowed})}
    for seed in range(3):
        calls = ask(client, tool_choice=choice, seed=seed, parallel_tool_calls=False).choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["clock"]


@pytest.mark.parametrize("said", ["any", {"type": "any"}, {"type": "required"}, {"type": "tool", "name": "clock"}])
def test_a_choice_in_other_words_means_the_same(said: Any, client: openai.OpenAI) -> None:
    word: Any = {"type": "function", "function": {"name": "clock"}} if "name" in said else "required"
    same = {"parallel_tool_calls": False, "seed": 5}
    made, asked = (ask(client, tool_choice=choice, **same).choices[0].message for choice in (said, word))
    assert [call.function for call in made.tool_calls] == [call.function for call in asked.tool_calls]


def test_thinking_stays_free_before_calls(client: openai.OpenAI, demo: LoadedModel) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 6}
    closing = {str(demo.tokenizer.control_ids["</think>"]): -100}  # the budget closes the thoughts, not the model
    options: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": closing}
    choice = ask(client, **options, extra_body=body).choices[0]
    assert choice.message.reasoning
    assert len(choice.message.tool_calls) == 1


def test_a_strict_tool_is_called_as_it_says_or_not_at_all(client: openai.OpenAI) -> None:
    strict = [tool("weather", UNITS, strict=True)]
    for seed in range(3):
        choice = ask(client, tools=strict, seed=seed, max_tokens=60).choices[0]
        for call in choice.message.tool_calls or []:
            arguments_of(call)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    held = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = ask(client, response_format=held, temperature=0).choices[0].message
    assert message.tool_calls or json.loads(message.content)["n"] in (1, 2)
    assert ask(client, response_format=held, tool_choice="required", max_tokens=400).choices[0].message.tool_calls


def test_the_next_turn_finds_the_calls_in_the_cache(client: openai.OpenAI, backend: LocalBackend) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
    first = ask(client, **options)
    (call,) = first.choices[0].message.tool_calls
    assert backend.wait_idle(PATIENCE_S)
    made = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    told = {"role": "tool", "tool_call_id": call.id, "content": "Noon."}
    second = ask(client, messages=[*HELLO, made, told])
    used = first.usage
    assert second.usage.prompt_tokens_details.cached_tokens >= used.prompt_tokens + used.completion_tokens - 16


def test_responses_are_held_the_same_way(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", **each["function"], "strict": True} for each in TOOLS]
    named: Any = {"type": "function", "name": "clock"}
    choice: Any
    for choice in ("required", named):
        options: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "temperature": 0}
        answer = client.responses.create(model="demo", input="Hello", **options)
        assert [item.type for item in answer.output] == ["function_call"]
        assert answer.tool_choice == choice if choice == "required" else answer.tool_choice.name == "clock"  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tool_choice": "some"}, "tool_choice", 'must be "auto", "none", "required"'),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "'other'"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "no tools to call"),
        ({"tools": [tool("f", {"type": "string"})], "tool_choice": "required"}, "tools", "schema of an object"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_held_is_named(
    options: dict[str, Any], param: str, words: str, stream: bool, client: openai.OpenAI, refused: Callable[..., Any]
) -> None:
    error = refused(ask, client=client, stream=stream, **options)
    assert (error.status_code, error.body["param"]) == (400, param)
    assert words in error.body["message"]


def named_block(block: Any) -> tuple[str, str]:
    return block.type, block.name


def test_anthropics_choices(claude: anthropic.Anthropic) -> None:
    tools: list[Any] = [{"name": "weather", "input_schema": UNITS}, {"name": "clock", "input_schema": NOTHING}]

    def called(choice: Any) -> Any:
        options: Any = {"model": "demo", "messages": HELLO, "max_tokens": 200, "tools": tools, "tool_choice": choice}
        options |= {"extra_body": {"temperature": 0}}
        whole = claude.messages.create(**options)
        with claude.messages.stream(**options) as stream:
            assert [named_block(each) for each in stream.get_final_message().content] == (
                [named_block(each) for each in whole.content]
            )
        assert whole.stop_reason == "tool_use"
        return whole.content

    (any_,) = called({"type": "any", "disable_parallel_tool_use": True})
    assert (any_.type, any_.name in ("weather", "clock")) == ("tool_use", True)
    (named,) = called({"type": "tool", "name": "weather"})
    assert named.input["unit"] in ("celsius", "kelvin")
    with pytest.raises(anthropic.BadRequestError, match="'other'"):
        called({"type": "tool", "name": "other"})
