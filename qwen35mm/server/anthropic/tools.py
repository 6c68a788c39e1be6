"""Anthropic's tools: those that the prompt lists, and those that the model learns of in the conversation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from qwen35mm.server.errors import ApiError
from qwen35mm.server.fields import STRICT
from qwen35mm.server.notes import Notes
from qwen35mm.server.tools import MAX_TOOLS, Names, as_function, flat, inner_of, name_of, typed

_TEXT = {"type": "string"}
_LINES = {"type": "array", "items": {"type": "integer"}}
_PATHS = {"path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT}
_INSERT = {"insert_line": {"type": "integer"}, "insert_text": _TEXT, "view_range": _LINES}


def _commands(*names: str, **more: Any) -> dict[str, Any]:
    properties = {"command": {"enum": list(names)}, **_PATHS, **_INSERT, **more}
    return {"type": "object", "properties": properties, "required": ["command"]}


# The client runs these; Anthropic documents what they take. By the beginning of the type.
_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Runs a command in a bash session that stays open between calls.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor_20250429": (
        "Views, creates and edits text files.",
        _commands("view", "create", "str_replace", "insert"),
    ),
    "memory_": (
        "Views, creates and edits files below /memories, which later conversations can read.",
        _commands("view", "create", "str_replace", "insert", "delete", "rename", old_path=_TEXT, new_path=_TEXT),
    ),
}
_KNOWN["text_editor_20250728"] = _KNOWN["text_editor_20250429"]
_SEARCH = "tool_search"


class Tool(BaseModel):
    """A function that the client runs, or a tool of a type that Anthropic defines."""

    model_config = STRICT

    name: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    # Change nothing here.
    cache_control: Any = None
    eager_input_streaming: Any = None
    allowed_callers: Any = None
    input_examples: Any = None


def plain_tools(tools: Any, notes: Notes) -> Any:
    """Translates tools in OpenAI's forms. Leaves nothing of a tool without its meaning but name and type."""
    return [_plain(tool, f"tools.{at}", notes) for at, tool in enumerate(tools)] if isinstance(tools, list) else tools


def _plain(tool: Any, place: str, notes: Notes) -> Any:
    if not isinstance(tool, dict):
        return tool
    if _is_typed(tool.get("type")):
        return {name: value for name, value in tool.items() if name in ("name", "type", "defer_loading")}
    read = flat(tool)
    if read["type"] != "function" or (inner_of(tool) is None and isinstance(tool.get("input_schema"), dict)):
        return tool
    if inner_of(tool) or "parameters" in tool:
        notes.change(place, "is read as in OpenAI's form")
    schema = read.pop("parameters", None)
    return {**read, "type": None, "input_schema": schema}


def _is_typed(kind: Any) -> bool:
    return isinstance(kind, str) and kind not in ("custom", "function")


class Toolbox:
    """The tools of one request, in OpenAI's form.

    Attributes:
        shown: those that the prompt lists.
        names: of those that can be called, and of those that have no meaning here.

    Raises:
        ApiError: 400, there are too many.
    """

    def __init__(self, tools: Sequence[Tool], notes: Notes) -> None:
        self._notes = notes
        self.names = Names(notes)
        # Nobody else could tell the model about them.
        shows_all = any((tool.type or "").startswith(_SEARCH) for tool in tools)
        placed = [(tool, f"tools.{at}") for at, tool in enumerate(tools)]
        later = [each for each in placed if each[0].defer_loading and not shows_all]
        # Of two with one name, the model had better know one.
        self.shown = tuple(self._all_of([each for each in placed if shows_all or not each[0].defer_loading]))
        if len(self.shown) > MAX_TOOLS:
            message = f"tools may be {MAX_TOOLS} at most, besides deferred ones; got {len(self.shown):,}."
            raise ApiError(400, message, "tools")
        self._later = {name_of(each): each for each in self._all_of(later)}
        self._told: dict[str | None, dict[str, Any]] = {}

    @property
    def callable(self) -> tuple[dict[str, Any], ...]:
        """Those that the model knows: the shown ones, and those that the conversation introduced."""
        return (*self.shown, *self._told.values())

    def show(self, name: str) -> None:
        """Shows a deferred tool in the prompt."""
        if name in self._later:
            self.shown = (*self.shown, self._later.pop(name))

    def introduce(self, name: Any) -> str:
        """What tells the model at a place in the conversation that it may call a tool."""
        tool = self._later.get(name) if isinstance(name, str) else None
        if tool is None or self._told.get(name) is tool:
            return f"The tool {name!s:.256} can be called."
        self._told[name_of(tool)] = tool
        return f"This tool can be called now:\n<tools>\n{json.dumps(tool, ensure_ascii=False)}\n</tools>"

    def define(self, values: Any, place: str) -> str | None:
        """Like `introduce`, for a tool that is defined in the conversation; None if it can't be called here."""
        (plain,) = plain_tools([values], self._notes)
        # A later definition replaces an earlier one of its name.
        tool = self._read(_lenient(plain), place, Names(self._notes)) if isinstance(plain, dict) else None
        if tool is None:
            return None
        self._later[name_of(tool)] = tool
        return self.introduce(name_of(tool))

    def _all_of(self, placed: Iterable[tuple[Tool, str]]) -> list[dict[str, Any]]:
        read = [self._read(tool, place, self.names) for tool, place in placed]
        return [each for each in read if each is not None]

    def _read(self, tool: Tool, place: str, names: Names) -> dict[str, Any] | None:
        """The tool in OpenAI's form; None if it must be left out."""
        schema, description = tool.input_schema, tool.description
        if _is_typed(tool.type):
            kind = tool.type or ""
            known = next((each for start, each in _KNOWN.items() if kind.startswith(start)), None)
            if known is None or tool.name is None:
                names.leave_out(tool.name, f"{place} of type {kind[:60]!r}")
                return None
            self._notes.change(f"{place} of type {kind[:60]!r}", "is described by its documented parameters")
            description, schema = known
        if not names.take(tool.name, place):
            return None
        return as_function(tool.name, description, schema or {"type": "object", "properties": {}}, tool.strict)


def _lenient(values: Mapping[str, Any]) -> Tool:
    return Tool(**typed(values, name=str, description=str, type=str, input_schema=dict))
