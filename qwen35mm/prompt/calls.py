"""Tool calls in a reply, as Qwen's templates have models write them, read while it streams.

    <tool_call>                          <tool_call>
    <function=weather>                   {"name": "weather", "arguments": {"place": "Bonn"}}
    <parameter=place>                    </tool_call>
    Bonn
    </parameter>
    </function>
    </tool_call>

What looks like a call and can't be read as one stays text: nothing of a reply is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qwen35mm.errors import PromptError
from qwen35mm.prompt.parts import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
# A value may hold the closing mark itself: the one that counts stands before another parameter, or at the end.
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)


class CallParser:
    """Takes a reply's text piece by piece, and gives its text and its calls.

    Args:
        tools: their definitions in OpenAI's form, which say what is a number and what a text.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._properties = dict(_properties(tool) for tool in tools)
        self._rest = ""

    def push(self, text: str) -> list[str | ToolCall]:
        """What is known with the next piece: texts, never empty, and calls, in order."""
        self._rest += text
        return self._take(is_last=False)

    def flush(self) -> list[str | ToolCall]:
        """What is left at the end; a call that was cut off is text."""
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
            # White space around calls belongs to how they are written.
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
        """The call whose inside begins at `start`, and where it ends; None where it isn't complete, or is none."""
        stop = self._rest.find(CLOSE, start)
        while stop >= 0:
            # An argument may hold the mark itself.
            call = _read(self._rest[start:stop], self._properties)
            if call is not None:
                return call, stop + len(CLOSE)
            stop = self._rest.find(CLOSE, stop + 1)
        return None, 0

    def _held_from(self) -> int:
        """Where what may still become a call begins, white space before it included."""
        for length in range(min(len(OPEN) - 1, len(self._rest)), 0, -1):
            if self._rest.endswith(OPEN[:length]):
                return len(self._rest[:-length].rstrip())
        return len(self._rest.rstrip())


def read_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
    """A whole reply's text without its calls, and these."""
    parser = CallParser(tools)
    found = [*parser.push(text), *parser.flush()]
    calls = tuple(each for each in found if isinstance(each, ToolCall))
    return "".join(each for each in found if isinstance(each, str)), calls


def _properties(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """A tool's name, and the schemas of its parameters."""
    function = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    return str(function.get("name")), parameters.get("properties") or {}


def _may_be_call(beginning: str) -> bool:
    """Whether what follows the opening mark may still become a call."""
    beginning = beginning.lstrip()
    return beginning.startswith("{") or beginning.startswith("<function=") or "<function=".startswith(beginning)


def _read(inside: str, properties: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    function = _FUNCTION.fullmatch(inside)
    try:
        if function is None:
            values = json.loads(inside)
            arguments = values.get("arguments", {})
            return ToolCall(values["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)
        name, body = function[1].strip(), function[2].rstrip()
        arguments, end = {}, 0
        for found in _PARAMETER.finditer(body):
            if found.start() != end:
                return None
            key, end = found[1].strip(), found.end()
            arguments[key] = _value(found[2], properties.get(name, {}).get(key))
        return ToolCall(name, arguments) if not body[end:].strip() else None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, PromptError):
        return None


def _value(text: str, schema: Any) -> Any:
    """A parameter's value; a text where its schema allows one, or says nothing."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    if "string" in kinds or not kinds:
        return text
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
