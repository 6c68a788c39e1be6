"""Parses tool calls in a streaming reply, in the forms of Qwen's templates.

    <tool_call>                          <tool_call>
    <function=weather>                   {"name": "weather", "arguments": {"place": "Bonn"}}
    <parameter=place>                    </tool_call>
    Bonn
    </parameter>
    </function>
    </tool_call>

Text that looks like a call but can't be parsed stays text: nothing is lost.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import unquote

from qwen35mm.contract import ToolCall
from qwen35mm.errors import PromptError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CallForm = Literal["xml", "json"]
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
# A value may hold the closing mark: the real one stands before another parameter, or at the end.
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_BEGINNING = re.compile(r"\s*<parameter=([^>\n]+)>\s*")
_CLOSING = re.compile(r"\s*</parameter>(?=\s*(?:<parameter=|\Z))")
_JSON = json.JSONDecoder()
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
# Schemas may refer to themselves.
_MAX_REFERENCES = 16


class CallParser:
    """Takes a reply's text in deltas; returns its text and its calls.

    Args:
        tools: definitions in OpenAI's form, whose schemas tell numbers from strings.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._schemas = dict(_schema(tool) for tool in tools)
        self._rest = ""

    def push(self, text: str) -> list[str | ToolCall]:
        """Takes the next delta. Returns non-empty texts and calls, in order."""
        self._rest += text
        return self._take(is_last=False)

    def flush(self) -> list[str | ToolCall]:
        """Returns the rest at the end; an incomplete call is text."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        start = self._rest.find(OPEN)
        while start >= 0:
            call, stop = self._call(start + len(OPEN))
            if call is None and _may_be_call(self._rest[start + len(OPEN) : start + len(OPEN) + 100]):
                break
            if call is None:
                start = self._rest.find(OPEN, start + 1)
                continue
            # White space around calls belongs to their form.
            found += [text] if (text := self._rest[:start].rstrip()) else []
            found.append(call)
            self._rest = self._rest[stop:].lstrip()
            start = self._rest.find(OPEN)
        if is_last:
            known, self._rest = self._rest, ""
        else:
            at = self._held_from() if start < 0 else len(self._rest[:start].rstrip())
            known, self._rest = self._rest[:at], self._rest[at:]
        return [*found, known] if known else found

    def _call(self, start: int) -> tuple[ToolCall | None, int]:
        """The call whose content begins at `start`, and where it ends; None if it is incomplete or no call."""
        stop = self._rest.find(CLOSE, start)
        while stop >= 0:
            # An argument may hold the closing mark.
            call = _read(self._rest[start:stop], self._schemas)
            if call is not None:
                return call, stop + len(CLOSE)
            stop = self._rest.find(CLOSE, stop + 1)
        return None, 0

    def _held_from(self) -> int:
        """Where a possible call begins, including white space before it."""
        for length in range(min(len(OPEN) - 1, len(self._rest)), 0, -1):
            if self._rest.endswith(OPEN[:length]):
                return len(self._rest[:-length].rstrip())
        return len(self._rest.rstrip())


def read_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
    """A whole reply's text without its calls, and the calls."""
    parser = CallParser(tools)
    found = [*parser.push(text), *parser.flush()]
    calls = tuple(each for each in found if isinstance(each, ToolCall))
    return "".join(each for each in found if isinstance(each, str)), calls


def form_of(template: str) -> CallForm | None:
    """The form of a template's calls; None if it has no calls."""
    return None if OPEN not in template else "xml" if "<function=" in template else "json"


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema, or its reference's target in `root`; None if there is no such target."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        schema = root
        for name in reference.removeprefix("#").split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return None


def kinds_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty if it doesn't restrict them."""
    return _kinds_of(schema, root, {}, 0)


def _kinds_of(schema: Any, root: Mapping[str, Any], found: dict[int, set[str]], depth: int) -> set[str]:
    """`found` has the kinds of visited schemas by identity, since choices may share schemas."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return set()
    if id(schema) not in found:
        # A reference to itself adds nothing.
        found[id(schema)] = set()
        found[id(schema)] = _own_kinds(schema, root, found, depth)
    return found[id(schema)]


def _own_kinds(schema: Mapping[str, Any], root: Mapping[str, Any], found: dict[int, set[str]], depth: int) -> set[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        return {kinds} if isinstance(kinds, str) else {each for each in kinds if isinstance(each, str)}
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {_kind(each) for each in ([schema["const"]] if "const" in schema else schema["enum"])}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            choices = [_kinds_of(each, root, found, depth + 1) for each in schema[name]]
            return set().union(*choices) if all(choices) else set()
    parts = schema.get("allOf")
    parts = [_kinds_of(each, root, found, depth + 1) for each in parts] if isinstance(parts, list) else []
    known = [kinds for kinds in parts if kinds]
    return set.intersection(*known) if known else set()


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "object")


def _schema(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """A tool's name and its parameters' schema."""
    function = tool.get("function", tool)
    parameters = function.get("parameters")
    return str(function.get("name")), parameters if isinstance(parameters, Mapping) else {}


def _may_be_call(beginning: str) -> bool:
    """Whether the text after an opening mark may still become a call."""
    beginning = beginning.lstrip()
    return beginning.startswith("{") or beginning.startswith("<function=") or "<function=".startswith(beginning)


def _read(inside: str, schemas: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    function = _FUNCTION.fullmatch(inside)
    try:
        if function is None:
            values = json.loads(inside)
            arguments = values.get("arguments", {})
            return ToolCall(values["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)
        name, body = function[1].strip(), function[2].rstrip()
        arguments, end, root = {}, 0, schemas.get(name, {})
        properties = root.get("properties") or {}
        while begun := _BEGINNING.match(body, end):
            key = begun[1].strip()
            found = _json_value(body, begun.end(), properties.get(key), root)
            if found is None:
                whole = _PARAMETER.match(body, end)
                if whole is None:
                    return None
                found = _value(whole[2], properties.get(key), root), whole.end()
            arguments[key], end = found
        return ToolCall(name, arguments) if not body[end:].strip() else None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, PromptError):
        return None


def _json_value(body: str, start: int, schema: Any, root: Mapping[str, Any]) -> tuple[Any, int] | None:
    """A JSON value that is no string, and where its parameter ends; None if there is none.

    JSON has its own end, so the value may hold the closing mark.
    """
    kinds = kinds_of(schema, root)
    if not kinds or "string" in kinds:
        return None
    try:
        value, stop = _JSON.raw_decode(body, start)
    except ValueError:
        return None
    closing = _CLOSING.match(body, stop)
    return None if closing is None else (value, closing.end())


def _value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A parameter's value; a string if its schema allows one or doesn't restrict types."""
    kinds, schema = kinds_of(schema, root), resolved(schema, root)
    if "string" in kinds or not kinds:
        listed = schema.get("enum") if isinstance(schema, Mapping) else None
        others = [each for each in listed if not isinstance(each, str)] if isinstance(listed, list) else []
        if text not in (listed or ()) and (kinds > {"null"} or others):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(text)
                return value if (value is None and "null" in kinds) or value in others else text
        return text
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
