"""Damaged calls are repaired or stay text, however the stream is cut."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.assets import demo_model_path
from qwen35mm.prompt import ChatTemplate, call_parts
from qwen35mm.prompt.calls import CallArguments, CallBegun, CallLost, CallParser, Found, read_calls
from tests.prompt.damaged_calls import CASES, TOOLS, Case, xml


def parsed(pieces: Sequence[str], tools: Sequence[Any] = TOOLS, *, is_cut: bool = False) -> list[Found]:
    parser = CallParser(tools)
    return [*(each for piece in pieces for each in parser.push(piece)), *parser.flush(is_cut=is_cut)]


def checked(found: Sequence[Found]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """The text and the calls, once the parts of each call are known to be its JSON."""
    text, calls = "", []
    begun: CallBegun | None = None
    told, num_begun = "", 0
    for each in found:
        if isinstance(each, str):
            assert begun is None
            text += each
        elif isinstance(each, CallBegun):
            assert begun is None
            assert each.index == num_begun
            begun, told, num_begun = each, "", num_begun + 1
        elif isinstance(each, CallArguments):
            assert begun is not None
            assert each.index == begun.index
            told += each.json
        elif isinstance(each, CallLost):
            assert begun is not None
            text += each.text
            begun = None
        else:
            assert begun is not None
            assert each.name == begun.name
            assert told == json.dumps(dict(each.arguments), ensure_ascii=False, allow_nan=False)
            calls.append((each.name, dict(each.arguments)))
            begun = None
    return text, calls


def cuts(text: str) -> list[list[str]]:
    """The text cut at every third place, into single characters, and at random."""
    dice = random.Random(len(text))
    places = [sorted(dice.sample(range(len(text)), min(5, len(text)))) for _ in range(5)]
    at_random = [[text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)] for at in places]
    return [*([text[:at], text[at:]] for at in range(len(text) % 3, len(text) + 1, 3)), list(text), *at_random]


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case.reply)[-60:])
def test_a_damaged_call_is_repaired_or_stays_text(case: Case) -> None:
    for pieces in cuts(case.reply):
        assert checked(parsed(pieces, is_cut=case.is_cut)) == (case.text, case.calls), pieces
    text, calls = read_calls(case.reply, TOOLS, is_cut=case.is_cut)
    assert (text, [(call.name, dict(call.arguments)) for call in calls]) == (case.text, case.calls)


def test_types_are_those_that_the_schema_wants() -> None:
    """Since True == 1 == 1.0."""
    for case in CASES:
        _, calls = read_calls(case.reply, TOOLS, is_cut=case.is_cut)
        written = json.dumps([[call.name, dict(call.arguments)] for call in calls], allow_nan=False)
        assert written == json.dumps(case.calls, allow_nan=False)


QUOTED = xml("f", a="x", b="two\nlines")
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<parameter=x>",
    "</parameter>",
    "<",
    "</",
    QUOTED,
)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
# Words between the marks, since marks in a row may end the parameter.
_strings = st.lists(st.sampled_from([*MARKS, "null", "None", '{"a": 1}', "5"]) | _texts, max_size=5).map("\nword ".join)
_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _strings
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_strings, inner, max_size=3), max_leaves=6
)
_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
_arguments = st.dictionaries(_names, _values, max_size=4)
KINDS = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


def tool_for(arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {name: {"type": KINDS.get(type(value), "object")} for name, value in arguments.items()}
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}


def streamed(text: str, size: int, tool: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    found = checked(parsed([text[at : at + size] for at in range(0, len(text), size)], [tool]))
    return found[0], [(name, json.dumps(arguments)) for name, arguments in found[1]]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    """The bundled checkpoint's, which writes calls as Qwen3.5's own does."""
    return ChatTemplate.from_pretrained(demo_model_path())


@given(arguments=_arguments, size=st.integers(1, 40))
def test_what_the_template_writes_is_read_back(template: ChatTemplate, arguments: dict[str, Any], size: int) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "y"},
    ]
    rendered = template.render(messages, add_generation_prompt=False, enable_thinking=False)
    start = rendered.index("<tool_call>")
    inside = rendered[start : rendered.rindex("</tool_call>") + len("</tool_call>")]
    assert streamed(inside, size, tool_for(arguments)) == ("", [("f", json.dumps(arguments))])


@given(arguments=st.dictionaries(_strings, _values, max_size=4), size=st.integers(1, 40))
def test_what_json_templates_write_is_read_back(arguments: dict[str, Any], size: int) -> None:
    written = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    text = f"<tool_call>\n{written}\n</tool_call>"
    assert streamed(text, size, tool_for(arguments)) == ("", [("f", json.dumps(arguments))])


@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "<function=f>", "<function=g>", "</function>", "<parameter=a>"),
                *("<parameter=n>", "</parameter>", "\n", " ", "{", "}", '{"name": "f", "arguments": {}}', "5", "a"),
                *("```", "`", '"', "'"),
            ]
        ),
        max_size=14,
    ),
    is_cut=st.booleans(),
    data=st.data(),
)
def test_a_stream_is_read_as_the_whole(pieces: list[str], is_cut: bool, data: st.DataObject) -> None:
    """And what is no call is lost nowhere."""
    parameters = {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    reply = "".join(pieces)
    whole = checked(parsed([reply], tools, is_cut=is_cut))
    at = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=5)))
    cut = [reply[a:b] for a, b in zip([0, *at], [*at, len(reply)], strict=True)]
    assert checked(parsed(cut, tools, is_cut=is_cut)) == whole
    assert checked(parsed(list(reply), tools, is_cut=is_cut)) == whole
    if not whole[1]:
        assert whole[0] == reply


def test_an_argument_streams_as_it_is_written() -> None:
    parser = CallParser(TOOLS)
    head = "<tool_call>\n<function=write>\n<parameter=path>\n"
    assert parser.push(head) == [CallBegun(0, "write"), CallArguments(0, '{"path": ')]
    assert parser.push("a") == [CallArguments(0, '"a')]
    assert parser.push('"b\n') == [CallArguments(0, '\\"b')]
    assert parser.push("</para") == []
    assert parser.push("meter>\n<parameter=content>") == [CallArguments(0, '", "content": ')]
    assert parser.push("\nx\n\ny") == [CallArguments(0, '"x\\n\\ny')]
    lost = f'{head}a"b\n</parameter>\n<parameter=content>\nx\n\ny'
    assert parser.flush(is_cut=True) == [CallLost(0, lost)]


def test_a_call_is_told_once_nothing_can_make_it_text() -> None:
    for reply in (f"```\n{xml('read', path='a')}", "<function=read>\n<parameter=path>\na", xml("delete", path="a")):
        parser = CallParser(TOOLS)
        assert all(isinstance(each, str) for each in parser.push(reply))


@pytest.mark.parametrize("part", ["word < ", "<tool_call>\n", "</parameter>", "\n", "<function=f", "`a` "])
def test_a_long_value_is_not_held_back(part: str) -> None:
    """What isn't held back isn't looked at twice."""
    parser, told, waits = CallParser(TOOLS), 0, 0
    head = "<tool_call>\n<function=write>\n<parameter=content>\n"
    parser.push(head)
    for at, character in enumerate(part * 500):
        told += sum(len(each.json) for each in parser.push(character) if isinstance(each, CallArguments))
        waits = max(waits, at - told)
    assert waits < 500 if part != "\n" else told == 1 + 2 * 499


def test_a_value_of_100_kb_streams_token_by_token() -> None:
    """This would take minutes if each token cost the length of the value."""
    content = "def f(x):\n    return x < 1\n" * 4000
    for reply in (
        xml("write", path="a", content=content),
        xml("run", args=json.dumps([content])),
        f'<tool_call>\n{{"name": "read", "arguments": {{"path": {json.dumps(content)}}}}}\n</tool_call>',
        "\n" * 100_000 + xml("now"),
        xml("delete", content=content),
        f"```\n{xml('read', path=content)}",
    ):
        parsed([reply[at : at + 4] for at in range(0, len(reply), 4)])


@pytest.mark.parametrize("kind", ["string", "integer", "number", "boolean", "array", "object", "null"])
@pytest.mark.parametrize("written", ['"verbose"', "'q'", "verbose", '"[1"', '""'])
def test_a_text_for_any_type_can_be_written_as_json(kind: str, written: str) -> None:
    schema = {"type": "object", "properties": {"options": {"type": kind}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for reply in (
        xml("f", options=written),
        f'<tool_call>\n{{"name": "f", "arguments": {{"options": {written}}}}}\n</tool_call>',
    ):
        _, calls = read_calls(reply, [tool])
        for call in calls:
            assert isinstance(json.loads(json.dumps(dict(call.arguments)))["options"], str)


@pytest.mark.parametrize("end", ["</tool_call>", "</function>", "</parameter>", "y</tool_call>"])
def test_many_marks_inside_a_value_cost_no_more_each(end: str) -> None:
    def work(num_marks: int) -> int:
        steps = 0

        def count(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal steps
            if frame.f_code.co_filename != call_parts.__file__:
                return None
            steps += event == "line"
            return count

        text = "<tool_call>\n<function=f>\n<parameter=s>\n" + "<function=a><parameter=b>x" * num_marks + end * num_marks
        before = sys.gettrace()
        sys.settrace(count)
        try:
            parsed([text])
        finally:
            sys.settrace(before)
        return steps

    assert work(200) < 2.2 * work(100)
