"""What clients send beside the protocols, in one table: each request is answered, and a note says what had no effect.

A name here was sent by a real client or is documented by another server; some are invented, as tomorrow's will be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.server.notes import HEADER
from tests.server.instant import Answer, Instant, ask

CHAT, CLAUDE, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "Hello"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLAUDE_TOOL = {"name": "weather", "input_schema": PARAMETERS}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODIES = {
    CHAT: {"messages": [USER], "max_tokens": 4},
    CLAUDE: {"model": "demo", "messages": [USER], "max_tokens": 4},
    RESPONSES: {"input": "Hello", "max_output_tokens": 4, "store": False},
}

# Ignored, and told by name.
IGNORED: dict[str, dict[str, Any]] = {
    CHAT: {
        "x_invented": {"a": [1]},
        "prediction": {"type": "content", "content": "x"},
        "web_search_options": {},
        "store": True,
        # vLLM
        "priority": 0,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "skip_special_tokens": True,
        "kv_transfer_params": {"x": 1},
        "guided_decoding_backend": "xgrammar",
        # SGLang
        "rid": "abc",
        "separate_reasoning": True,
        # llama.cpp
        "cache_prompt": True,
        "id_slot": -1,
        "samplers": ["top_k", "temperature"],
        "timings_per_token": True,
        # OpenRouter
        "provider": {"order": ["a"]},
        "transforms": ["middle-out"],
        "usage": {"include": True},
        # LiteLLM
        "litellm_metadata": {"a": 1},
        "guardrails": ["g"],
        # LM Studio, Ollama
        "ttl": 300,
        "keep_alive": "5m",
        # DashScope
        "incremental_output": True,
        "result_format": "message",
    },
    CLAUDE: {"x_invented": 1, "inference_geo": "us", "diagnostics": {"a": 1}, "mcp_servers": [{"type": "url"}]},
    RESPONSES: {"x_invented": 1, "truncation": "auto", "max_tool_calls": 3, "request_id": "r"},
}
# Taken, translated or without an effect on any model: nothing to tell.
TAKEN: dict[str, dict[str, Any]] = {
    CHAT: {
        "enable_thinking": False,
        "think": True,
        "reasoning": {"effort": "low"},
        "thinking": {"type": "disabled"},
        "service_tier": "flex",
        "user": "u",
        "metadata": {"a": {"b": 1}},
        "n_predict": 4,
        "repeat_penalty": 1.1,
        "guided_json": SCHEMA,
        "guided_choice": ["yes", "no"],
        "structured_outputs": {"regex": "[ab]+"},
        "format": "json",
        "grammar": 'root ::= "yes" | "no"',
        "tools": [{"function": TOOL["function"]}],
        "tool_choice": "none",
    },
    CLAUDE: {
        "output_config": {"effort": "high"},
        "output_format": {"type": "json_schema", "schema": SCHEMA},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "cache_control": {"type": "ephemeral"},
        "metadata": {"user_id": "u"},
        "tools": [{**CLAUDE_TOOL, "eager_input_streaming": True, "defer_loading": True, "type": None}],
        "system": [{"type": "text", "text": ""}],
    },
    RESPONSES: {
        "client_metadata": {"x": "1"},
        "prompt_cache_key": "k",
        "service_tier": "priority",
        "metadata": {"a": 1},
        "text": {"format": {"type": "json_object", "schema": SCHEMA}},
        "tools": [{"type": "custom", "name": "apply_patch", "format": {"type": "text"}}],
    },
}


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "Sunny."}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


def used(*blocks: dict[str, Any], result: Any = "Sunny.") -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "t1", "content": result}
    return [USER, {"role": "assistant", "content": [*blocks, use]}, {"role": "user", "content": [found]}]


def items(*between: dict[str, Any]) -> list[dict[str, Any]]:
    return [USER, *between, {"role": "assistant", "content": "Hi"}, USER]


# Histories: what must be in the note, or None where all of it is read.
HISTORIES: list[tuple[str, Any, str | None]] = [
    (CHAT, called('{"city": "Ro'), "arguments"),
    (CHAT, called("[1]"), "arguments"),
    (CHAT, called(None), None),
    (CHAT, called({"city": "Rome"}), None),
    (CHAT, called(json.dumps('{"city": "Rome"}')), None),
    (CHAT, called("{}")[:2], None),
    (CHAT, [USER, called("{}")[2]], None),
    (CHAT, [{"role": "user", "content": [None, {"type": "text", "text": ""}, "Hi"]}], None),
    (CHAT, [USER, {"role": "assistant"}, USER], None),
    (
        CHAT,
        [USER, {"role": "assistant", "content": "Hi", "refusal": None, "annotations": []}, USER],
        None,
    ),
    (CHAT, [USER, {"role": "assistant", "content": "Hi", "provider_specific_fields": {"a": 1}}, USER], None),
    (CHAT, [{**USER, "x_invented": 1}], "messages.0.x_invented"),
    (CHAT, [{"role": "user", "content": "a\ud800b\ufeff"}], "damaged characters"),
    (CLAUDE, used({"type": "thinking", "thinking": "Hm.", "signature": "s"}), None),
    (CLAUDE, used({"type": "redacted_thinking", "data": "x"}), None),
    (CLAUDE, used({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}), "server_tool_use"),
    (CLAUDE, used({"type": "hologram", "x": 1}), "hologram"),
    (CLAUDE, used(result=None), None),
    (CLAUDE, used(result=[{"type": "tool_reference", "tool_name": "weather"}]), None),
    (CLAUDE, [*used()[:2], USER], None),
    (CLAUDE, [USER, {"role": "assistant", "content": []}, USER], None),
    (CLAUDE, [{"role": "user", "content": [{"type": "text", "text": ""}]}], None),
    (RESPONSES, [{"type": "input_text", "text": "Hi"}], "input.0"),
    (RESPONSES, items({"type": "reasoning", "summary": [], "content": None, "encrypted_content": "abc"}), None),
    (RESPONSES, items({"type": "web_search_call", "id": "w", "status": "completed"}), "web_search_call"),
    (RESPONSES, items({"type": "ghost_snapshot", "ghost_commit": {}}), "ghost_snapshot"),
    (RESPONSES, items({"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a'}), "arguments"),
    (RESPONSES, items({"type": "function_call_output", "call_id": "c", "output": "x"}), None),
    (RESPONSES, items({"type": "function_call_output", "call_id": "c", "output": None}), None),
]
# These stay errors: the answer would mean something else, or there is none.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"guided_regex": "("}),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    (CHAT, {"response_format": {"type": "yaml"}}),
    (CHAT, {"custom_logit_processor": "x"}),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"temperature": "hot"}),
    (CHAT, {"messages": ["Hi"]}),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hosts"}}]}]},
    ),
    (CLAUDE, {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "tool", "name": "other"}}),
    (CLAUDE, {"messages": []}),
    (RESPONSES, {"conversation": "conv_1"}),
    (RESPONSES, {"prompt": {"id": "p"}}),
]


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Instant:
    return Instant(demo)


def answers(backend: Instant, asked: list[tuple[str, dict[str, Any]]], *, strict: bool = False) -> list[Answer]:
    """What the server answers to changes of the bodies."""

    async def all_of_them() -> list[Answer]:
        app = create_app(backend, strict_fields=strict)
        return [await ask(app, path, json.dumps(BODIES[path] | change).encode()) for path, change in asked]

    return asyncio.run(all_of_them())


def note_of(answer: Answer) -> str:
    return answer.headers.get(HEADER, [""])[0]


def wrong(asked: list[tuple[str, dict[str, Any]]], found: list[Answer], *, status: int) -> list[str]:
    return [
        f"{path} {json.dumps(change)[:200]}: {answer.status} {answer.content[:200]!r}"
        for (path, change), answer in zip(asked, found, strict=True)
        if answer.status != status
    ]


def test_fields_that_only_describe_are_ignored_and_told(backend: Instant) -> None:
    asked = [(path, {name: value}) for path, fields in IGNORED.items() for name, value in fields.items()]
    found = answers(backend, asked)
    assert wrong(asked, found, status=200) == []
    untold = [asked[at] for at, answer in enumerate(found) if next(iter(asked[at][1])) not in note_of(answer)]
    assert untold == []
    assert wrong(asked, answers(backend, asked, strict=True), status=400) == []


def test_fields_with_a_meaning_here_are_taken(backend: Instant) -> None:
    asked = [(path, {name: value}) for path, fields in TAKEN.items() for name, value in fields.items()]
    found = answers(backend, asked)
    assert wrong(asked, found, status=200) == []
    assert [(asked[at], note_of(answer)) for at, answer in enumerate(found) if note_of(answer)] == []


def test_no_message_ends_a_conversation(backend: Instant) -> None:
    asked = [(path, {"input" if path == RESPONSES else "messages": history}) for path, history, _ in HISTORIES]
    found = answers(backend, asked)
    assert wrong(asked, found, status=200) == []
    for (path, history, told), answer in zip(HISTORIES, found, strict=True):
        note = note_of(answer)
        assert (told in note) if told else note == "", (path, history, note)


def test_what_would_mean_something_else_is_refused(backend: Instant) -> None:
    assert wrong(REFUSED, answers(backend, REFUSED), status=400) == []


# A value of each kind.
VALUES = (None, True, 1.5, "x", [], [1.5], [{}], {}, {"type": "x"})


def replaced(value: Any, values: Sequence[Any] = VALUES) -> Iterator[Any]:
    """The value with one part of it after the other, itself first, replaced by each of some values."""
    yield from values
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        for other in replaced(part, values):
            copy = value.copy()
            copy[key] = other
            yield copy


# Places have 2 or 9 values each: every fifth request is another value at the next place.
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_value_of_any_kind_in_any_place_is_answered_or_refused(backend: Instant, stride: int) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
    fields: dict[str, dict[str, Any]] = {
        CHAT: {"tools": [TOOL], "tool_choice": allowed, "stop": ["a"], "logit_bias": {"1": 2}, "logprobs": True},
        CLAUDE: {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}, "stop_sequences": ["a"], "thinking": {}},
        RESPONSES: {"tool_choice": allowed, "reasoning": {"effort": "low"}, "include": [], "instructions": "x"},
    }
    asked = [
        (path, {**fields[path], **given, name: other})
        for path, given in [*TAKEN.items(), *fields.items()]
        for name, value in given.items()
        for other in replaced(value)
    ]
    for path, history, _ in HISTORIES:
        asked += [
            (path, {"input" if path == RESPONSES else "messages": other}) for other in replaced(history, (1.5, {}))
        ]
    asked = asked[::stride]
    found = answers(backend, asked)
    broken = [(each, answer.content) for each, answer in zip(asked, found, strict=True) if answer.status >= 500]
    assert broken == []
