"""The same tool in the form of each protocol, sent to each of them: the model is shown the same function."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.server.notes import HEADER
from tests.server.instant import Answer, Recording, ask

P = {"type": "object", "properties": {"city": {"type": "string"}}}
PLAIN = {"name": "f", "description": "About."}
FUNCTION = {**PLAIN, "parameters": P}
SHOWN = {"type": "function", "function": FUNCTION}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "model": "demo"},
    "/v1/responses": {"input": "Hello", "store": False},
}
FORMS: dict[str, dict[str, Any]] = {
    "nested": SHOWN,
    "nested, nulls around": {**SHOWN, "parameters": None, "name": None, "id": None},
    "nested, no type": {"function": FUNCTION},
    "nested, type null": {"type": None, "function": FUNCTION},
    "nested, called custom": {"type": "custom", "function": FUNCTION},
    "nested, empty custom": {"type": "function", "function": FUNCTION, "custom": {}},
    "nested, Anthropic's schema": {"type": "function", "function": {**PLAIN, "input_schema": P}},
    "flat": {"type": "function", **FUNCTION},
    "flat, no type": FUNCTION,
    "flat, type null": {"type": None, **FUNCTION},
    "flat, called custom": {"type": "custom", **FUNCTION},
    "flat, empty function": {"type": "function", **FUNCTION, "function": {}},
    "Anthropic's": {**PLAIN, "input_schema": P},
    "Anthropic's, custom": {"type": "custom", **PLAIN, "input_schema": P},
    "Anthropic's, cached": {**PLAIN, "input_schema": P, "cache_control": {"type": "ephemeral"}},
    "Anthropic's, parameters null": {**PLAIN, "input_schema": P, "parameters": None},
}
# Those that no model can call: a note says so.
LOST: list[Any] = [
    {},
    {"type": "function"},
    {"type": "function", "function": None},
    {"type": "function", "function": {}},
    {"googleSearch": {}},
    {"functionDeclarations": [FUNCTION]},
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "builtin_function", "function": {"name": "$web_search"}},
    {"name": ""},
]


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Recording:
    return Recording(demo)


def post(backend: Recording, path: str, **fields: Any) -> Answer:
    return asyncio.run(ask(create_app(backend), path, json.dumps(BODIES[path] | fields).encode()))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("form", FORMS)
def test_a_function_is_the_same_in_any_form(form: str, path: str, backend: Recording) -> None:
    answer = post(backend, path, tools=[FORMS[form]])
    assert answer.status == 200, answer.content
    assert list(backend.asked.tools) == [SHOWN]
    assert "ignored" not in answer.headers.get(HEADER, [""])[0]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("tool", LOST)
def test_what_cannot_be_called_is_told_and_frees_the_choice(tool: Any, path: str, backend: Recording) -> None:
    answer = post(backend, path, tools=[tool], tool_choice="required")
    assert answer.status == 200, answer.content
    assert list(backend.asked.tools) == []
    assert backend.asked.tool_choice == "auto"
    notes = answer.headers[HEADER][0]
    assert "tools.0" in notes
    assert "tool_choice" in notes


@pytest.mark.parametrize("form", [{"type": "function", **FUNCTION}, SHOWN, {**PLAIN, "input_schema": P}])
def test_what_is_ignored_never_reaches_the_prompt(form: dict[str, Any], backend: Recording) -> None:
    inner = {"function": {**FUNCTION, "mood": 1}} if "function" in form else {"mood": 1}
    answer = post(backend, "/v1/chat/completions", tools=[{**form, **inner, "defer_loading": True}])
    assert list(backend.asked.tools) == [SHOWN]
    notes = answer.headers[HEADER][0]
    assert "tools.0.defer_loading" in notes
    assert ".mood" in notes


@pytest.mark.parametrize("path", list(BODIES)[::2])
def test_custom_tools_take_a_text(path: str, backend: Recording) -> None:
    answers = [post(backend, path, tools=[tool]) for tool in ({"custom": PLAIN}, {"type": "custom", "custom": PLAIN})]
    assert [answer.status for answer in answers] == [200, 200]
    is_custom = path == "/v1/responses"
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    shown = [{"type": "function", "function": {**PLAIN, "parameters": text}}]
    assert list(backend.asked.tools) == (shown if is_custom else [])


def test_a_listed_tool_goes_before_a_deferred_one_of_its_name(backend: Recording) -> None:
    tool = {**PLAIN, "input_schema": P}
    post(backend, "/v1/messages", tools=[{**tool, "defer_loading": True}, tool], tool_choice="any")
    assert list(backend.asked.tools) == [SHOWN]
    assert backend.asked.tool_choice == "required"
