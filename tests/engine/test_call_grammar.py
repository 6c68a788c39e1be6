"""Replies that are held to calls: what is written by their grammar is read as calls, and follows the tools' schemas."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import deque
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35mm.contract import GenerationRequest, SamplingParams, ToolCall
from qwen35mm.engine import call_grammar
from qwen35mm.engine.grammar import Grammars, Matcher
from qwen35mm.engine.output import OutputProcessor
from qwen35mm.errors import RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.prompt.calls import OPEN, CallForm, read_calls
from qwen35mm.tokenizer import Tokenizer
from tests.engine.exact import DENSE, Chat, chat_model, serve, user
from tests.engine.schemas import engine_of

pytestmark = pytest.mark.usefixtures("checked_here")

FORMS: tuple[CallForm, ...] = ("xml", "json")
# What ends that of which there may be any amount.
CLOSERS = ("\n</parameter>", "</parameter>", '"', "]", "}")
VALUES: list[dict[str, Any]] = [
    {"type": "string"},
    {},
    {"type": "integer", "minimum": 0, "maximum": 120},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["celsius", 'fahr"enheit <b>', "a\nb", 7, None]},
    {"const": "always"},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    {"$ref": "#/$defs/box"},
]
BOX = {"type": "object", "properties": {"w": {"type": "boolean"}, "s": {"type": "string", "maxLength": 9}}}
BOX |= {"required": ["w"], "additionalProperties": False}


def grammar_of_calls(*given: Any, **options: Any) -> str:
    return call_grammar.grammar_of_calls(*given, **options).lark


def constrained_calls(tools: Any, choice: str, params: SamplingParams, loaded: LoadedModel) -> str | None:
    request = GenerationRequest(params=params, tools=tools or (), tool_choice=choice)
    found = asyncio.run(call_grammar.constrained_calls(request, params, loaded))
    return None if found is None else found.lark


def tool(name: str, properties: dict[str, Any], required: list[str], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters | {"$defs": {"box": BOX}}, **more}}


@st.composite
def tools_of(draw: st.DrawFn) -> list[dict[str, Any]]:
    known = st.sampled_from(["f", "weather", "weather_now", "a.b:c"])
    names = draw(st.lists(known, min_size=1, max_size=3, unique=True))
    found = []
    for name in names:
        keys = draw(st.lists(st.sampled_from(["a", "ab", "x-y", "Größe", 'q"\\'[:3]]), max_size=4, unique=True))
        properties = {key: draw(st.sampled_from(VALUES)) for key in keys}
        required = [key for key in keys if draw(st.booleans())]
        found.append(tool(name, properties, required, strict=draw(st.booleans())))
    return found


def grammars(loaded: LoadedModel) -> Grammars:
    return Grammars(loaded.vocabulary, vocab_size=loaded.config.text.vocab_size)


def written(
    matcher: Matcher, tokenizer: Tokenizer, eos_ids: frozenset[int] | set[int], rng: random.Random
) -> str | None:
    """A reply of a model without any sense; None where it comes to no end."""
    token_ids: list[int] = []
    closing: deque[int] = deque()
    while len(token_ids) < 400:
        allowed = matcher.allowed().nonzero().flatten().tolist()
        assert allowed, "something may always come"
        if eos_ids.issuperset(allowed) or (not eos_ids.isdisjoint(allowed) and rng.random() < 0.5):
            return tokenizer.decode(token_ids)
        allowed = [each for each in allowed if each not in eos_ids]
        if not closing and rng.random() < 0.4:
            closing.extend(tokenizer.encode_plain(rng.choice(CLOSERS)))
        token_id = closing.popleft() if closing else -1
        if token_id not in allowed:
            closing.clear()
            token_id = rng.choice(allowed)
        matcher.accept(token_id)
        token_ids.append(token_id)
    return None


@settings(max_examples=25, deadline=None)
@given(tools=tools_of(), form=st.sampled_from(FORMS), several=st.booleans(), seed=st.integers(0, 2**32))
def test_whatever_is_written_is_calls_of_these_tools(
    tools: list[dict[str, Any]], form: CallForm, several: bool, seed: int
) -> None:
    loaded = chat_model(DENSE)
    lark = grammar_of_calls(tools, form, loaded.tokenizer, several=several, only_calls=True)
    reply = written(grammars(loaded).matcher_of_calls(lark), loaded.tokenizer, loaded.eos_ids, random.Random(seed))
    if reply is None:
        return
    text, calls = read_calls(reply, tools)
    assert not text, reply
    assert len(calls) >= 1 if several else len(calls) == 1
    parameters = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for call in calls:
        jsonschema.Draft202012Validator(parameters[call.name]).validate(dict(call.arguments))


@settings(max_examples=25, deadline=None)
@given(tools=tools_of(), form=st.sampled_from(FORMS), several=st.booleans(), seed=st.integers(0, 2**32))
def test_calls_after_free_text_are_of_these_tools(
    tools: list[dict[str, Any]], form: CallForm, several: bool, seed: int
) -> None:
    """No other name is called, whatever the text before says."""
    loaded = chat_model(DENSE)
    lark = grammar_of_calls(tools, form, loaded.tokenizer, several=several, only_calls=False)
    matcher, rng, (mark,) = (
        grammars(loaded).matcher_of_calls(lark),
        random.Random(seed),
        [loaded.tokenizer.control_ids[OPEN]],
    )
    begun: list[int] = []
    while len(begun) < rng.randrange(8):
        allowed = [
            each for each in matcher.allowed().nonzero().flatten().tolist() if each not in {*loaded.eos_ids, mark}
        ]
        begun.append(rng.choice(allowed))
        matcher.accept(begun[-1])
    assert matcher.allowed()[mark]
    matcher.accept(mark)
    rest = written(matcher, loaded.tokenizer, loaded.eos_ids, rng)
    if rest is None:
        return
    _, calls = read_calls(loaded.tokenizer.decode([*begun, mark]) + rest, tools)
    assert calls
    parameters = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for call in calls:
        jsonschema.Draft202012Validator(parameters[call.name]).validate(dict(call.arguments))


@pytest.mark.parametrize("form", FORMS)
def test_a_walk_comes_to_its_end(form: CallForm, loaded: LoadedModel) -> None:
    """Or the test above would hold nothing."""
    tools = [tool("f", {"a": VALUES[0], "b": VALUES[2], "c": VALUES[-1]}, ["a", "b", "c"])]
    compiled = grammars(loaded)
    lark = grammar_of_calls(tools, form, loaded.tokenizer, several=True, only_calls=True)
    ended = [
        written(compiled.matcher_of_calls(lark), loaded.tokenizer, loaded.eos_ids, random.Random(seed))
        for seed in range(20)
    ]
    assert sum(reply is not None for reply in ended) >= 10


def accepts(loaded: LoadedModel, lark: str, text: str) -> bool:
    """Whether a text in the control tokens that there are may be a whole reply."""
    matcher = grammars(loaded).matcher_of_calls(lark)
    pieces = loaded.tokenizer.split_controls(text)
    for piece in pieces:
        for token_id in [piece] if isinstance(piece, int) else loaded.tokenizer.encode_plain(piece):
            if not matcher.allowed()[token_id]:
                return False
            matcher.accept(token_id)
    return bool(matcher.allowed()[sorted(loaded.eos_ids)].any())


WEATHER = tool("weather", {"place": {"type": "string"}, "days": {"type": "integer"}}, ["place"])
CALL = "<tool_call>\n<function=weather>\n<parameter=place>\n{}\n</parameter>\n</function>\n</tool_call>"
AS_JSON = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'


def test_what_a_template_writes_is_a_call(loaded: LoadedModel, chat: Chat) -> None:
    lark = grammar_of_calls([WEATHER], "xml", loaded.tokenizer, several=True, only_calls=True)
    calls = [{"name": "weather", "arguments": {"place": "Bonn\n <a>", "days": 3}}] * 2
    shown = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    rendered = loaded.template.render(shown, enable_thinking=False, add_generation_prompt=False)
    reply = rendered[rendered.index("<tool_call>") : rendered.rindex("</tool_call>") + len("</tool_call>")]
    assert accepts(loaded, lark, reply)
    assert read_calls(reply, [WEATHER])[1] == (ToolCall("weather", {"place": "Bonn\n <a>", "days": 3}),) * 2
    as_json = grammar_of_calls([WEATHER], "json", loaded.tokenizer, several=True, only_calls=True)
    assert accepts(loaded, as_json, AS_JSON)
    for held, other in ((lark, AS_JSON), (as_json, CALL), (lark, ""), (lark, "Hello."), (lark, CALL.format("a") + "!")):
        assert not accepts(loaded, held, other)
    one = grammar_of_calls([WEATHER], "xml", loaded.tokenizer, several=False, only_calls=True)
    assert accepts(loaded, one, CALL.format("a"))
    assert not accepts(loaded, one, f"{CALL.format('a')}\n{CALL.format('b')}")


def test_text_before_calls_is_free_but_for_what_looks_like_one(loaded: LoadedModel) -> None:
    strict = tool("weather", {"place": {"type": "string"}}, ["place"], strict=True)
    lark = constrained_calls([strict], "auto", SamplingParams(), loaded)
    assert lark is not None
    for text in ("", "Hello.", f"I look.\n\n{CALL.format('Bonn')}", f"{CALL.format('a')}\n{CALL.format('b')}"):
        assert accepts(loaded, lark, text)
    for text in ("<tool_call>\n<function=other>", f"{CALL.format('a')}\nSo."):
        assert not accepts(loaded, lark, text)
    matcher = grammars(loaded).matcher_of_calls(lark)
    spelt = loaded.tokenizer.encode_plain("See <tool_call>")
    for token_id in spelt[:-1]:
        matcher.accept(token_id)
    assert not matcher.allowed()[spelt[-1]]


def test_marks_that_are_no_tokens_are_text(loaded: LoadedModel) -> None:
    plain: Any = SimpleNamespace(control_ids={})
    lark = grammar_of_calls([WEATHER], "xml", plain, several=True, only_calls=False)
    compiled = grammars(loaded)
    for text in ("Hello.", f"I look.\n{CALL.format('a')}\n{CALL.format('b')}", CALL.format("a")):
        compiled.matcher_of_calls(lark, text)
    for text in ("a <tool_call>b", f"{CALL.format('a')}\nSo."):
        with pytest.raises(RequestError, match="doesn't fit the calls"):
            compiled.matcher_of_calls(lark, text)


def test_an_answer_follows_its_schema_or_calls(loaded: LoadedModel) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = SamplingParams(json_schema=json.dumps(schema))
    lark = constrained_calls([WEATHER], "auto", params, loaded)
    assert lark is not None
    assert accepts(loaded, lark, '{"a": 5}')
    assert accepts(loaded, lark, CALL.format("Bonn"))
    for text in ("Hello.", '{"a": 5}\n' + CALL.format("Bonn"), '{"b": 5}'):
        assert not accepts(loaded, lark, text)
    forced = constrained_calls([WEATHER], "required", params, loaded)
    assert forced is not None
    assert not accepts(loaded, forced, '{"a": 5}')


def test_by_default_nothing_is_held(loaded: LoadedModel) -> None:
    assert constrained_calls([WEATHER], "auto", SamplingParams(), loaded) is None
    assert constrained_calls([WEATHER], "none", SamplingParams(), loaded) is None
    assert constrained_calls(None, "auto", SamplingParams(json_schema='{"type": "null"}'), loaded) is None


def strict(**schema: Any) -> list[dict[str, Any]]:
    return [tool("f", {"a": schema}, ["a"], strict=True)]


ENDLESS = {"type": "object", "properties": {"b": {"$ref": "#"}}, "required": ["b"]}
REFUSED: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "no such tool": ([WEATHER], "other", "tool_choice must be auto, none, required or a tool's name; got 'other'"),
    "no tools": ([], "required", "no tools to call"),
    "a name": ([tool("a>b", {}, [])], "required", "'a>b' can't be called"),
    "a parameter's name": ([tool("f", {"a\nb": {}}, [])], "required", r"parameter 'a\\nb' of the tool 'f' can't be"),
    "no object": ([{"function": {"name": "f", "parameters": {"type": "string"}}}], "required", "schema of an object"),
    "no properties": ([{"function": {"name": "f", "parameters": {"properties": [1]}}}], "required", "of an object"),
    "a value with the mark": (strict(enum=["</parameter>"]), "auto", "no call can hold the value"),
    "no choices": (strict(anyOf=5), "auto", "parameter 'a' of the tool 'f': .*anyOf"),
    "nothing": ([tool("f", {"a": False}, ["a"])], "required", "no value satisfies its schema"),
    "no schema": (strict(type="text"), "auto", "parameter 'a' of the tool 'f': .*text"),
    "no end": ([tool("f", {"a": ENDLESS}, ["a"])], "required", "without end"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_in_words(name: str, loaded: LoadedModel) -> None:
    tools, choice, words = REFUSED[name]
    with pytest.raises(RequestError, match=words):
        constrained_calls(tools, choice, SamplingParams(), loaded)


def test_what_is_not_strict_is_held_as_far_as_it_can_be(loaded: LoadedModel) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    loose = tool("f", {"a": numbers, "b": {"pattern": "x"}}, ["a"])
    lark = constrained_calls([loose], "required", SamplingParams(), loaded)
    assert lark is not None
    call = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert accepts(loaded, lark, call.format("[1, 1]"))
    assert not accepts(loaded, lark, call.format('["a"]'))


UNENFORCED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a text's pattern": (strict(type="string", pattern="^a"), "The parameter 'a' of the tool 'f': pattern"),
    "a choice's length": (strict(anyOf=[{"type": "null"}, {"type": "string", "maxLength": 3}]), "'f': maxLength"),
    "unique items": (strict(type="array", items={"type": "integer"}, uniqueItems=True), "'f': .*uniqueItems"),
    "a choice of objects": (
        [{"function": {"name": "f", "strict": True, "parameters": {"type": "object", "anyOf": [{"required": ["a"]}]}}}],
        "The tool 'f': anyOf of its parameters",
    ),
}


@pytest.mark.parametrize("name", UNENFORCED)
def test_what_of_a_strict_tool_cannot_be_enforced_is_said(name: str, loaded: LoadedModel) -> None:
    tools, words = UNENFORCED[name]
    found = asyncio.run(
        call_grammar.constrained_calls(GenerationRequest(tools=tools), SamplingParams(), loaded)  # pyright: ignore
    )
    assert found is not None
    (said,) = found.unenforced
    assert re.search(words, said)
    if name == "unique items":  # and the rest is enforced
        call = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
        assert accepts(loaded, found.lark, call.format("[1, 1]"))
        assert not accepts(loaded, found.lark, call.format('["a"]'))


MOVED: list[dict[str, Any]] = [{"stop": "e"}, {"min_tokens": 140}, {"ignore_eos": True}, {"stop_token_ids": [101]}]


@pytest.mark.parametrize("moved", MOVED)
def test_calls_end_the_reply_and_nothing_else_does(moved: dict[str, Any], loaded: LoadedModel, chat: Chat) -> None:
    tools = [tool("f", {"unit": {"enum": ["celsius", "fahrenheit"]}}, ["unit"])]
    params = SamplingParams(temperature=1.5, max_tokens=150, seed=1)
    lark = constrained_calls(tools, "required", params, loaded)

    def text(params: SamplingParams) -> str:
        request = chat.request([user("hi")], tools=tools, enable_thinking=False, calls=lark, params=params)
        (answer,) = serve(engine_of(loaded), request)
        assert answer.result.finish_reason == "stop"
        return answer.result.text

    assert text(params.with_overrides(**moved)) == text(params)


def test_a_random_model_calls_after_its_thinking(loaded: LoadedModel, chat: Chat) -> None:
    """And ends there; beside others, it does the same."""
    tools = [tool("f", {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "boolean"}}, ["unit"])]
    params = SamplingParams(temperature=1.5, max_tokens=150, thinking_budget=5)
    lark = constrained_calls(tools, "required", params, loaded)
    requests = [
        chat.request(
            [user(f"hi {seed}")],
            tools=tools,
            enable_thinking=seed % 2 == 0,
            calls=lark,
            params=params.with_overrides(seed=seed),
        )
        for seed in range(4)
    ]
    together = [each.result for each in serve(engine_of(loaded), *requests)]
    for seed, result in enumerate(together):
        text, calls = read_calls(result.text, tools)
        assert bool(result.reasoning) == (seed % 2 == 0)
        if result.finish_reason == "stop":
            assert not text
            assert calls
            for call in calls:
                jsonschema.validate(json.loads(json.dumps(dict(call.arguments))), tools[0]["function"]["parameters"])
    assert sum(result.finish_reason == "stop" for result in together) >= 3


def test_large_schemas_are_refused_before_they_are_looked_at(loaded: LoadedModel) -> None:
    large = [tool(f"f{at}", {"a": {"enum": ["x" * 40_000]}}, ["a"]) for at in range(20)]
    with pytest.raises(RequestError, match="tools of this length"):
        constrained_calls(large, "required", SamplingParams(), loaded)


def test_stop_strings_end_free_text_but_no_call(loaded: LoadedModel) -> None:
    def read(text: str, *, until: str | None, **options: Any) -> tuple[str, Any]:
        output = OutputProcessor(
            loaded.tokenizer,
            SamplingParams(**options),
            eos_ids=loaded.eos_ids,
            thinking=None,
            num_thought=None,
            is_constrained=True,
            text_until=until,
        )
        for piece in loaded.tokenizer.split_controls(text):
            for token_id in [piece] if isinstance(piece, int) else loaded.tokenizer.encode_plain(piece):
                if output.finish_reason is None:
                    output.push(token_id)
        output.close("length")
        return output.text, output.stopped_by

    call, (dot,) = CALL.format("Bonn."), loaded.tokenizer.encode_plain(".")
    assert read(f"I look. {call}", until=OPEN, stop="look") == ("I ", "look")
    assert read(f"I look. {call}", until=OPEN, stop_token_ids=[dot]) == ("I look", dot)
    # Within a call, and the mark itself.
    for stop in ("Bonn", ".", "</parameter>", "<", "<tool_call>"):
        assert read(call, until=OPEN, stop=stop) == (call, None)
    assert read(call, until=OPEN, stop_token_ids=[dot, loaded.tokenizer.control_ids[OPEN]]) == (call, None)
    assert read("a < b", until=OPEN, stop="<") == ("a ", "<")
    # An answer by a schema has no free text.
    assert read('{"a": "look."}', until=None, stop="look", stop_token_ids=[dot]) == ('{"a": "look."}', None)


def test_thousands_of_listed_texts_are_a_value(loaded: LoadedModel) -> None:
    labels = [f"label {number}" for number in range(5000)] + ["label 1\nmore"]
    lark = grammar_of_calls(
        [tool("f", {"a": {"enum": labels}}, ["a"])], "xml", loaded.tokenizer, several=True, only_calls=True
    )
    call = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    for text in ("label 1", "label 4999", "label 1\nmore"):
        assert accepts(loaded, lark, call.format(text))
    assert not accepts(loaded, lark, call.format("label 5000"))
