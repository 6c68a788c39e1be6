"""Tools of the responses API: functions, functions in namespaces and custom tools, which take a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from qwen35mm.server.errors import ApiError
from qwen35mm.server.fields import STRICT
from qwen35mm.server.notes import Notes
from qwen35mm.server.tools import (
    CHOICES,
    MAX_TOOLS,
    Names,
    as_function,
    flat,
    forced_tool,
    free_choice,
    name_of,
    typed,
)

# What a custom tool takes, as a function.
_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
# Fields that the other protocols' forms have.
_OF_OTHERS = ("function", "custom", "input_schema")


class Tool(BaseModel):
    """A function, a custom tool, or a namespace of these; `type` says which. Other types are left out."""

    model_config = STRICT

    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    # Change nothing here.
    defer_loading: Any = None
    allowed_callers: Any = None
    output_schema: Any = None


def plain_tools(tools: Any, notes: Notes) -> Any:
    """Translates tools of the other protocols. Leaves only the type of tools without a meaning here."""
    return [_plain(tool, f"tools.{at}", notes) for at, tool in enumerate(tools)] if isinstance(tools, list) else tools


def _plain(tool: Any, place: str, notes: Notes) -> Any:
    if not isinstance(tool, dict):
        return tool
    kind = flat(tool)["type"]
    if kind not in ("function", "custom"):
        return tool if kind == "namespace" else {"type": kind}
    if tool.get("type") in (kind, None) and all(tool.get(name) is None for name in _OF_OTHERS):
        return tool
    notes.change(place, "is read as in the form of another protocol")
    return flat(tool)


def shown_name(name: str, namespace: str | None) -> str:
    """The name that the model sees, the same in tools and in calls."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def input_of(arguments: Mapping[str, Any]) -> str:
    """The text that a call gives to a custom tool."""
    text = arguments.get("input")
    return text if isinstance(text, str) and len(arguments) == 1 else json.dumps(dict(arguments), ensure_ascii=False)


@dataclass(frozen=True)
class _Known:
    """A tool that may be called.

    Attributes:
        function: as the prompt shows it.
        head: what an item of a call says about its tool.
    """

    function: dict[str, Any]
    head: dict[str, Any]


class Toolbox:
    """The tools of one request.

    Attributes:
        choice: the tool choice in the form that the backend's `stream` takes.
        said: the tools that have an effect, as the response repeats them.
        said_choice: the tool choice, as the response repeats it.

    Raises:
        ApiError: 400, there are too many, or the choice can't be used.
    """

    def __init__(self, tools: Sequence[Tool], choice: Any, notes: Notes) -> None:
        self._notes = notes
        self._known: dict[str, _Known] = {}
        self._names = Names(notes)
        self.said: list[dict[str, Any]] = []
        for at, tool in enumerate(tools):
            self._add(tool, f"tools.{at}", None)
        if len(self._known) > MAX_TOOLS:
            raise ApiError(400, f"tools may be {MAX_TOOLS} at most; got {len(self._known):,}.", "tools")
        self.said_choice = choice
        self.choice = self._chosen(choice)

    @property
    def shown(self) -> tuple[dict[str, Any], ...]:
        """The tools that the prompt lists, in the form of chat completions; empty if the model may call none."""
        if self.choice == "none":
            return ()
        return tuple(known.function for known in self._known.values())

    def head_of(self, name: str) -> dict[str, Any]:
        """What an item of a call says about its tool, by the name that the model called: the item's type, too."""
        known = self._known.get(name)
        return {"type": "function_call", "name": name} if known is None else known.head

    def _add(self, tool: Tool, place: str, namespace: Tool | None) -> None:
        kind = tool.type or "function"
        if kind == "namespace" and namespace is None:
            self._add_all(tool, place)
            return
        name = shown_name(tool.name or "", namespace and namespace.name)
        if kind not in ("function", "custom"):
            # A choice names such a tool by its type.
            self._names.leave_out(kind, f"{place} of type {kind[:60]!r}")
        elif self._names.take(name, place):
            self._known[name] = _Known(self._function(tool, name, place), _head(tool, kind, namespace))
            if namespace is None:
                self.said.append({**_defaults(kind), **_without_hints(tool)})

    def _add_all(self, namespace: Tool, place: str) -> None:
        before = len(self._known)
        for at, values in enumerate(namespace.tools or ()):
            tool = _lenient(values)
            if at == 0 and namespace.description:
                # It tells about them all, and is told once.
                about = f"{namespace.name}: {namespace.description}"
                tool.description = f"{tool.description}\n\n{about}" if tool.description else about
            self._add(tool, f"{place}.tools.{at}", namespace)
        if len(self._known) > before:
            self.said.append(_without_hints(namespace))

    def _function(self, tool: Tool, name: str, place: str) -> dict[str, Any]:
        description, parameters = tool.description, tool.parameters
        if tool.type == "custom":
            parameters = _TEXT
            definition = (tool.format or {}).get("definition")
            if isinstance(definition, str):
                self._notes.change(f"{place}.format", "is shown to the model, but doesn't constrain the call")
                about = f"The input follows this grammar:\n{definition}"
                description = f"{description}\n\n{about}" if description else about
        return as_function(name, description, parameters, tool.strict)

    def _chosen(self, choice: Any) -> str:
        word = choice.get("type") if isinstance(choice, dict) else choice
        word = "required" if word == "any" else word
        if isinstance(word, str) and word in CHOICES:
            if word == "required" and self._names.has_lost_all:
                return self._free()
            self.said_choice = word
            return word
        values = choice if isinstance(choice, dict) else {}
        kind = values.get("type")
        function = values.get(kind) if kind in ("function", "custom") else None
        named = function if isinstance(function, dict) else values
        if kind in ("function", "custom") and isinstance(named.get("name"), str):
            namespace = named.get("namespace")
            name = shown_name(named["name"], namespace if isinstance(namespace, str) else None)
            return self._free() if self._names.has_lost(name) else forced_tool(name)
        if kind == "allowed_tools":
            inner = values.get("allowed_tools")
            allowed = inner if isinstance(inner, dict) else values
            if isinstance(allowed.get("tools"), list):
                return self._allowed(allowed)
        if isinstance(kind, str) and kind not in ("function", "custom", "allowed_tools"):
            return self._free()
        words = ", ".join(f'"{word}"' for word in CHOICES)
        message = f"tool_choice must be {words}, allowed_tools, or of type function with the name of a tool."
        raise ApiError(400, message, "tool_choice")

    def _allowed(self, values: Mapping[str, Any]) -> str:
        """Leaves only the allowed tools."""
        listed = [tool for tool in values["tools"] if isinstance(tool, dict)]
        said = [name for tool in listed for name in (name_of(tool), tool.get("server_label"))]
        names = {name for name in said if isinstance(name, str)}
        kept = {
            name: known
            for name, known in self._known.items()
            if name in names or known.head["name"] in names or known.head.get("namespace") in names
        }
        self._known = kept
        if values.get("mode") != "required":
            return "auto"
        return "required" if kept else self._free()

    def _free(self) -> str:
        self.said_choice = free_choice(self._notes)
        return self.said_choice


def _head(tool: Tool, kind: str, namespace: Tool | None) -> dict[str, Any]:
    head = {"type": "function_call" if kind == "function" else "custom_tool_call", "name": tool.name}
    return head if namespace is None else {**head, "namespace": namespace.name}


def _defaults(kind: str) -> dict[str, Any]:
    return {"type": kind, **({"parameters": None, "strict": False} if kind == "function" else {})}


def _without_hints(tool: Tool) -> dict[str, Any]:
    hints = {"defer_loading", "allowed_callers", "output_schema"}
    return tool.model_dump(include=set(Tool.model_fields) - hints, exclude_none=True)


def _lenient(values: Mapping[str, Any]) -> Tool:
    """A tool in a namespace. Values of the wrong type are as if left out."""
    kinds = {"type": str, "name": str, "description": str, "parameters": dict, "format": dict, "strict": bool}
    return Tool(**typed(flat(values), **kinds))
