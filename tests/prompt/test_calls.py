"""Tool calls are found in replies, however they are cut into pieces, and nothing of a reply is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.contract import ToolCall
from qwen35mm.prompt.call_values import kinds_of
from qwen35mm.prompt.calls import CallParser, read_calls

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "at": {"type": ["object", "null"]},
                    "either": {"type": ["integer", "string"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "f"}},
    {"type": "function", "function": {"name": "stop"}},
]


def written(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


WEATHER = written("weather", place="Bonn", days="3", exact="True", at='{"a": [1]}', either="5")
CALL = ToolCall("weather", {"place": "Bonn", "days": 3, "exact": True, "at": {"a": [1]}, "either": "5"})


@pytest.mark.parametrize(
    ("reply", "text", "calls"),
    [
        ("Hello.\n", "Hello.\n", ()),
        (WEATHER, "", (CALL,)),
        (f"I look.\n\n{WEATHER}\n{written('stop')}", "I look.", (CALL, ToolCall("stop"))),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", (ToolCall("f", {"a": 1}),)),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", (ToolCall("f", {"a": 1}),)),
        (written("f", a="two\nlines"), "", (ToolCall("f", {"a": "two\nlines"}),)),
        (
            written("f", a="x</parameter>y", b="</tool_call>"),
            "",
            (ToolCall("f", {"a": "x</parameter>y", "b": "</tool_call>"}),),
        ),
        ("a <tool_call> is a mark", "a <tool_call> is a mark", ()),
        ("<tool_call>\n<function=f>\n<para", "<tool_call>\n<function=f>\n<para", ()),
        ("<tool_call>no</tool_call> x", "<tool_call>no</tool_call> x", ()),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", ()),
        (written("weather", days="many"), "", (ToolCall("weather", {"days": "many"}),)),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_calls_and_text_come_apart(reply: str, text: str, calls: tuple[ToolCall, ...], size: int) -> None:
    parser = CallParser(TOOLS)
    found = [each for at in range(0, len(reply), size) for each in parser.push(reply[at : at + size])] + parser.flush()
    assert "".join(each for each in found if isinstance(each, str)) == text
    assert tuple(each for each in found if isinstance(each, ToolCall)) == calls
    assert read_calls(reply, TOOLS) == (text, calls)


def test_one_text_may_hold_any_number_of_calls() -> None:
    said = '{"name": "weather", "arguments": {"days": 2}}\n' * 1000
    text, calls = read_calls(f"<tool_call>\n{said}</tool_call>", TOOLS)
    assert (text, calls) == ("", (ToolCall("weather", {"days": 2}),) * 1000)


def test_text_is_not_held_back_without_need() -> None:
    parser = CallParser()
    assert parser.push("One < two") == ["One < two"]
    assert parser.push(" <tool") == []
    assert parser.push("s>") == [" <tools>"]
    assert parser.push("<tool_call> in words") == ["<tool_call> in words"]


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "<function=f>", "</function>", " ", "{", "a"]), max_size=12
    )
)
def test_what_is_no_call_is_lost_nowhere(pieces: list[str]) -> None:
    parser = CallParser()
    found = [each for piece in pieces for each in parser.push(piece)] + parser.flush()
    assert "".join(each if isinstance(each, str) else "" for each in found) == read_calls("".join(pieces), ())[0]
    if not any(isinstance(each, ToolCall) for each in found):
        assert found == [] or "".join(map(str, found)) == "".join(pieces)


NESTED: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "order",
            "parameters": {
                "type": "object",
                "$defs": {"Item": {"type": "object"}, "Unit": {"enum": ["kg", "lb"]}, "Self": {"$ref": "#/$defs/Self"}},
                "properties": {
                    "item": {"$ref": "#/$defs/Item"},
                    "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
                    "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "unit": {"$ref": "#/$defs/Unit"},
                    "size": {"enum": ["small", 7, None]},
                    "self": {"$ref": "#/$defs/Self"},
                },
            },
        },
    }
]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("item", '{"name": "tea"}', {"name": "tea"}),
        ("items", '[{"name": "tea"}]', [{"name": "tea"}]),
        ("count", "5", 5),
        ("count", "null", None),
        ("note", "5", "5"),
        ("note", "null", None),
        ("unit", "kg", "kg"),
        ("size", "small", "small"),
        ("size", "7", 7),
        ("size", "null", None),
        ("size", "8", "8"),
        ("self", "{}", "{}"),
        ("item", "{broken", "{broken"),
    ],
)
def test_a_value_has_the_type_that_its_schema_leads_to(key: str, value: str, expected: Any) -> None:
    assert read_calls(written("order", **{key: value}), NESTED) == ("", (ToolCall("order", {key: expected}),))


def test_json_says_itself_where_it_ends() -> None:
    """Whatever its texts hold."""
    inside = {"name": "a </parameter> <parameter=count> 7 </parameter> </tool_call>"}
    call = written("order", item=json.dumps(inside), count="3")
    ((read,),) = (read_calls(call, NESTED)[1],)
    assert read.arguments == {"item": inside, "count": 3}


def test_choices_that_share_theirs_are_looked_at_once() -> None:
    """Else the second would take 3**16 steps, in the server's own thread when a reply calls."""
    three = [{"$ref": "#/$defs/1"}] * 3
    itself: dict[str, Any] = {"$defs": {"1": {"anyOf": three}}, "$ref": "#/$defs/1"}
    assert kinds_of(itself, itself) == set()
    shared: dict[str, Any] = {f"{at}": {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 3} for at in range(15)}
    for last, kinds in ({"type": ["string", "null"]}, {"string", "null"}), ({}, set()):
        root = {"$defs": {**shared, "15": last}, "$ref": "#/$defs/0"}
        assert kinds_of(root, root) == kinds
    parts = {"allOf": [{"anyOf": [{"const": 1}, {"const": "a"}]}, {"enum": ["b", None]}, {}]}
    assert kinds_of(parts, parts) == {"string"}
