"""What constrains an answer, by every name in which clients say it."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from qwen35mm.contract import GenerationRequest, SamplingParams
from qwen35mm.server.constraints import MAX_SCHEMA_CHARS, NAMES, Constraint, constraint_of, without_effect
from qwen35mm.server.errors import ApiError
from qwen35mm.server.notes import HEADER
from tests.server.conftest import PATIENCE_S

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
AS_JSON = r'\{"n": [12]\}'
GBNF, LARK, REGEX, CHOICE = 'root ::= [xy]+ "."', "start: /[xy]+\\./", r"[xy]{2,4}\.", ["red", "dark blue"]
DOTTED, CHOSEN = r"[xy]+\.", "red|dark blue"
NAMED = {"name": "n", "schema": SCHEMA}
# A request's fields, and what the answer matches.
SAID: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, AS_JSON),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, AS_JSON),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_JSON),
    ({"response_format": {"type": "json_object", "schema": json.dumps(SCHEMA)}}, AS_JSON),
    ({"response_format": {"type": "regex", "pattern": REGEX}}, DOTTED),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, DOTTED),
    ({"response_format": {"type": "ebnf", "grammar": LARK}}, DOTTED),
    ({"response_format": {"type": "choice", "choices": CHOICE}}, CHOSEN),
    ({"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}}, AS_JSON),
    ({"structured_outputs": {"regex": REGEX}}, DOTTED),
    ({"structured_outputs": {"choice": CHOICE, "whitespace_pattern": None}}, CHOSEN),
    ({"structured_outputs": {"grammar": LARK}}, DOTTED),
    ({"guided_json": SCHEMA}, AS_JSON),
    ({"guided_json": json.dumps(SCHEMA)}, AS_JSON),
    ({"guided_regex": REGEX}, DOTTED),
    ({"guided_choice": CHOICE}, CHOSEN),
    ({"guided_grammar": GBNF}, DOTTED),
    ({"json_schema": json.dumps(SCHEMA)}, AS_JSON),
    ({"regex": REGEX}, DOTTED),
    ({"ebnf": GBNF}, DOTTED),
    ({"grammar": GBNF}, DOTTED),
    ({"grammar": LARK}, DOTTED),
    ({"format": SCHEMA}, AS_JSON),
    # The same one said twice, and "some JSON" beside a schema.
    ({"guided_regex": REGEX, "regex": REGEX}, DOTTED),
    ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, AS_JSON),
    ({"response_format": {"type": "text"}, "guided_choice": CHOICE}, CHOSEN),
]


@pytest.mark.parametrize(("said", "pattern"), SAID, ids=lambda value: json.dumps(value)[:60])
def test_the_answer_follows_what_was_said(said: dict[str, Any], pattern: str, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 200, "extra_body": said}
    for seed in range(2):
        choice = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hello"}], seed=seed, **options
        ).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.content is not None
        assert re.fullmatch(pattern, choice.message.content), choice.message.content


def test_every_name_is_tried() -> None:
    assert {name for said, _ in SAID for name in said} == set(NAMES) - {"text.format"}


def test_completions_and_responses_know_them_too(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="demo", prompt="A", max_tokens=200, seed=1, extra_body={"guided_choice": CHOICE}
    )
    assert re.fullmatch(CHOSEN, done.choices[0].text)
    response = client.responses.create(model="demo", input="Hello", max_output_tokens=200, extra_body={"regex": REGEX})
    assert re.fullmatch(DOTTED, response.output_text)


def test_what_asks_for_nothing_constrains_nothing() -> None:
    for said in ({}, {"response_format": {"type": "text"}}, {"format": ""}, {"structured_outputs": {"json": None}}):
        assert constraint_of(said) is None
    for said in ({"format": "json"}, {"structured_outputs": {"json_object": True}}):
        assert constraint_of(said) == Constraint('{"type": "object"}')


@pytest.mark.parametrize(
    ("said", "param", "words"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag can't be enforced"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag can't be enforced"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"response_format": {"type": "xml"}}, "response_format", "of the type text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema comes with a schema"),
        ({"guided_json": "{"}, "guided_json", "isn't JSON"),
        ({"guided_json": "[" * 200 + "]" * 200}, "guided_json", "nested more than 100 deep"),
        (
            {"json_schema": json.dumps({"enum": ["x" * MAX_SCHEMA_CHARS]})},
            "json_schema",
            "may have 1,048,576 characters",
        ),
        ({"guided_json": [1]}, "guided_json", "got list"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_regex": "a\\"}, "guided_regex", "backslash"),
        ({"grammar": "root ::= other"}, "grammar", "'other' is used but not defined"),
        ({"guided_regex": "a", "grammar": "start: /b/"}, "grammar", "guided_regex and grammar ask for different"),
        ({"guided_json": {"type": "null"}, "json_schema": SCHEMA}, "json_schema", "ask for different answers"),
    ],
)
def test_what_cannot_be_followed_is_named(said: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        constraint_of(said)
    assert (caught.value.status, caught.value.param) == (400, param)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {**SCHEMA, "properties": {"n": {"enum": [1, 2]}}}}}


def strict(**schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}


def test_what_ends_no_constrained_answer_is_noted(address: str) -> None:
    moved = {"stop": ["x", "1"], "stop_token_ids": [3], "min_tokens": 1, "ignore_eos": True}
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200, "seed": 1, "temperature": 1}
    with httpx.Client(base_url=address, verify=False, timeout=PATIENCE_S) as client:

        def note(**said: Any) -> tuple[str, Any]:
            answer = client.post("/v1/chat/completions", json={**body, **said})
            assert answer.status_code == 200, answer.text
            return answer.headers.get(HEADER, ""), answer.json()["choices"][0]["message"]

        for said in ({"guided_json": SCHEMA}, {"guided_regex": REGEX}, {"tools": [TOOL], "tool_choice": "required"}):
            told, message = note(**said, **moved)
            assert all(f"{name} doesn't end a constrained answer" in told for name in moved)
            assert (told, message) != note(**said)
            assert message["content"] == note(**said)[1]["content"]
        told, _ = note(tools=[strict(type="string", pattern="^a")])
        assert "tools are strict, and this can't be enforced: The parameter 'a' of the tool 'f': pattern" in told
        told, message = note(tools=[TOOL], guided_choice=CHOICE)
        assert "tools can't be called by an answer that follows a grammar" in told
        assert message["content"] in CHOICE


def test_stop_strings_have_an_effect_before_calls_of_strict_tools() -> None:
    params = SamplingParams(stop=("x",), stop_token_ids=(3,), min_tokens=1, ignore_eos=True)
    tools = (strict(type="integer"),)
    assert without_effect(params, GenerationRequest(tools=tools)) == ("min_tokens", "ignore_eos")
    assert without_effect(params, GenerationRequest(tools=tools, tool_choice="none")) == ()
    assert without_effect(params, GenerationRequest(tools=(TOOL,))) == ()
    assert without_effect(params, GenerationRequest(tools=(TOOL,), tool_choice="f")) == params.moves_end
