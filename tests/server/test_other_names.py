"""Fields of other servers mean the same here."""

from __future__ import annotations

from typing import Any

import pytest

from qwen35mm.server.notes import Notes
from qwen35mm.server.openai.chat_completions import known_fields
from qwen35mm.server.other_names import thinking_in_our_names

ON, OFF = {"chat_template_kwargs": {"enable_thinking": True}}, {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = {"name": "weather", "parameters": {"type": "object"}}
FUNCTION = {"type": "function", "function": WEATHER}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"n_predict": 5, "max_tokens": 6}, {"max_tokens": 6}),
        ({"max_tokens": -1, "max_completion_tokens": 0}, {}),
        ({"max_tokens": 5.0, "top_k": 20.0, "temperature": "0.5", "seed": "7"}, None),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"seed": -1}, {}),
        ({"seed": 2**64 + 3}, {"seed": 3}),
        ({"reasoning_budget": -1}, {}),
        ({"reasoning_budget": 0}, {"thinking_budget": 0}),
        ({"stop": ""}, {"stop": []}),
        ({"stop": ["", "a", None]}, {"stop": ["a"]}),
        ({"logit_bias": []}, {"logit_bias": {}}),
        ({"logit_bias": [[5, -100], [6, 1.5]]}, {"logit_bias": {"5": -100, "6": 1.5}}),
        ({"logit_bias": [["word", 1]]}, {"logit_bias": [["word", 1]]}),
        ({"enable_thinking": False}, OFF),
        ({"think": True}, ON),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 99}}, ON | {"thinking_budget": 99}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"enabled": True, "max_tokens": 50}}, ON | {"thinking_budget": 50}),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"think": True, **OFF}, OFF),
    ],
)
def test_another_name(body: dict[str, Any], expected: dict[str, Any] | None) -> None:
    notes = Notes()
    found = thinking_in_our_names(dict(body), notes)
    if expected is None:
        expected = {"max_tokens": 5, "top_k": 20, "temperature": 0.5, "seed": 7}
    assert (found, notes.header) == (expected, "")
    assert all(type(found[name]) is type(expected[name]) for name in found)


@pytest.mark.parametrize(
    "tool",
    [
        FUNCTION,
        {"function": WEATHER},
        FUNCTION | {"cache_control": {"type": "ephemeral"}},
        {"type": "function", **WEATHER},
        {"name": "weather", "input_schema": {"type": "object"}},
        {"type": "custom", "name": "weather", "input_schema": {"type": "object"}},
    ],
)
def test_tools_in_the_forms_of_other_protocols(tool: dict[str, Any]) -> None:
    notes = Notes()
    assert known_fields({"tools": [tool]}, notes)["tools"] == [FUNCTION]
    assert notes.header == ""


def test_tools_of_servers_are_left_out() -> None:
    notes = Notes()
    # A custom tool takes a text, which no function does.
    custom = [{"type": "custom", "custom": {"name": "run"}}, {"type": "custom", "name": "run", "format": {}}]
    body = {"tools": [{"type": "web_search"}, FUNCTION, *custom]}
    assert known_fields(body, notes)["tools"] == [FUNCTION]
    assert "tools.0 of type 'web_search'" in notes.header
    assert "tools.2 of type 'custom'" in notes.header
    assert "tools.3 of type 'custom'" in notes.header


def test_what_has_no_meaning_here_is_told() -> None:
    notes = Notes()
    body = known_fields({"think": [], "reasoning": {"exclude": True, "x": 1}, "reasoning_effort": "huge"}, notes)
    assert body == {}
    told = ["think isn't supported here", "reasoning.x isn't a known field", "reasoning.exclude isn't supported here"]
    assert notes.header.split("; ignored | ")[:3] == told
    assert "reasoning_effort isn't supported here" in notes.header


def test_likeliest_tokens_by_number() -> None:
    assert known_fields({"logprobs": 5}, Notes()) == {"logprobs": True, "top_logprobs": 5}
    assert known_fields({"logprobs": True}, Notes()) == {"logprobs": True}
