"""Tools of all protocols become functions in the form of chat completions, which chat templates take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from qwen35mm.server.errors import ApiError
from qwen35mm.server.notes import UNSUPPORTED, Notes

MAX_TOOLS = 256
# What a call in the form of the family's templates can hold.
_CALLABLE_NAME = re.compile(r"[^>\s]([^>\n]{0,254}[^>\s])?")
# What a tool choice says without naming a tool.
CHOICES = ("auto", "none", "required")
_NESTED = ("function", "custom")
_HINTS = ("cache_control", "eager_input_streaming", "id", "index")


def flat(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of any protocol in the form of the responses API: name and `parameters` stand beside `type`.

    With a schema, Anthropic's type "custom" is a function; without one, "custom" is a tool that takes a text.
    """
    kind = tool.get("type", "function")
    rest = without_hints(tool)
    inner = next((rest[name] for name in _NESTED if isinstance(rest.get(name), dict)), None)
    if inner is not None:
        return {**inner, "type": kind if kind in _NESTED else "function"}
    if "input_schema" in rest and kind in (*_NESTED, None):
        return {"parameters": rest.pop("input_schema"), **rest, "type": "function"}
    return {**rest, "type": kind}


def without_hints(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool without what says nothing about the function itself."""
    return {name: value for name, value in tool.items() if name not in _HINTS}


def function(
    name: str | None, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """A function in the form of chat completions, without nulls."""
    said = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in said.items() if value is not None}}


def name_of(tool: Any) -> str | None:
    """The name that a tool of any form has."""
    match tool:
        case {"function": {"name": str(name)}} | {"custom": {"name": str(name)}} | {"name": str(name)}:
            return name
    return None


def typed(values: Mapping[str, Any], **kinds: type) -> dict[str, Any]:
    """The values that are of these types; others are as if left out."""
    return {name: values[name] for name, kind in kinds.items() if isinstance(values.get(name), kind)}


class Names:
    """The names of one request's tools.

    Attributes:
        left_out: of those that can't be called here.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._taken: set[str] = set()
        self.left_out: set[str] = set()

    def take(self, name: str | None, place: str) -> bool:
        """Whether the model can call a tool by this name. Notes why not."""
        if not _CALLABLE_NAME.fullmatch(name or ""):
            why = f"can't be called by the name {name!r:.60}"
        elif name in self._taken:
            why = f"has the name of another tool, {name!r:.60}"
        else:
            self._taken.add(name or "")
            return True
        self.leave_out(name, place, why)
        return False

    def leave_out(self, name: str | None, place: str, why: str = UNSUPPORTED) -> None:
        """Notes that a tool has no effect."""
        self._notes.ignore(place, why)
        if name:
            self.left_out.add(name)

    def has_lost(self, name: str | None) -> bool:
        """Whether a choice of this tool can't be met, since it was left out."""
        return name in self.left_out - self._taken


def chosen(choice: Any) -> Any:
    """Converts the forms of a tool choice to a word, or to the name of the tool to call.

    Raises:
        ValueError: it is of no known form.
    """
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            pass
        case {"type": "function" | "tool", "name": str(name)}:
            pass
        case "auto" | "none" | "required" as word:
            return word
        case {"type": "auto" | "none" | "required" as word}:
            return word
        # Anthropic's and Mistral's word.
        case "any" | {"type": "any"}:
            return "required"
        case _:
            name = ""
    if name in ("", *CHOICES):
        raise ValueError('it must be "auto", "none", "required", or of type function with the name of a tool')
    return name


def forced_tool(name: str) -> str:
    """The choice that forces a tool, by its name. Raises ApiError: 400, the name is one of the other choices."""
    if name in CHOICES:
        raise ApiError(
            400, f"tool_choice can't force a tool of the name {name!r}. Give it another name.", "tool_choice"
        )
    return name


def free_choice(notes: Notes) -> str:
    """The tool choice if the one that was asked for can't be met."""
    notes.change("tool_choice", "asks for tools that were left out; the model chooses")
    return "auto"


_NAMED = {"type": "object", "properties": {"type": {"const": "function"}, "function": {"type": "object"}}}
# A word, or a tool's name.
ToolChoice = Annotated[
    str,
    BeforeValidator(chosen),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "none", "required"]}, _NAMED]}),
]
