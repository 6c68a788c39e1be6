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
# What a function says, in any protocol.
KNOWN = ("type", *_NESTED, "name", "description", "parameters", "input_schema", "strict", *_HINTS)


def inner_of(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The kind and the inner object of a tool in the form of chat completions; None in another form."""
    return next(((kind, tool[kind]) for kind in _NESTED if isinstance(tool.get(kind), dict) and tool[kind]), None)


def flat(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of any protocol in the form of the responses API: name and `parameters` stand beside `type`.

    Nulls and hints are dropped. `type` is "function" for whatever has a schema: in Anthropic's form, "custom" is a
    function, too; without a schema, it is a tool that takes a text. It is "" for what says neither name nor type.
    """
    inner = inner_of(tool)
    said = {**{name: value for name, value in tool.items() if name not in _NESTED}, **(inner[1] if inner else {})}
    said = {name: value for name, value in said.items() if value is not None and name not in _HINTS}
    schemas = [said.pop(name) for name in ("parameters", "input_schema") if name in said]
    if schemas:
        # One of another type is left for the protocol to refuse.
        said["parameters"] = next((each for each in schemas if isinstance(each, dict)), schemas[0])
    return {**said, "type": _kind(tool.get("type"), inner and inner[0], said)}


def _kind(given: Any, outer: str | None, said: Mapping[str, Any]) -> str:
    if isinstance(given, str) and given not in _NESTED:
        return given
    if "parameters" in said:
        return "function"
    if outer is not None:
        return outer
    if isinstance(given, str):
        return given
    return "function" if "name" in said else ""


def as_function(
    name: str | None, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """A function in the form of chat completions, without nulls."""
    said = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in said.items() if value is not None}}


def name_of(tool: Any) -> str | None:
    """The name that a tool of any form has."""
    name = flat(tool).get("name") if isinstance(tool, dict) else None
    return name if isinstance(name, str) else None


def typed(values: Mapping[str, Any], **kinds: type) -> dict[str, Any]:
    """The values that are of these types; others are as if left out."""
    return {name: values[name] for name, kind in kinds.items() if isinstance(values.get(name), kind)}


class Names:
    """The names of one request's tools. Notes those that the model can't call."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._taken: set[str] = set()
        self._left_out: set[str] = set()

    def take(self, name: Any, place: str) -> bool:
        """Whether the model can call a tool by this name. Notes why not."""
        if not isinstance(name, str) or not _CALLABLE_NAME.fullmatch(name):
            why = f"can't be called by the name {name!r:.60}"
        elif name in self._taken:
            why = f"has the name of another tool, {name!r:.60}"
        else:
            self._taken.add(name)
            return True
        self.leave_out(name, place, why)
        return False

    def leave_out(self, name: Any, place: str, why: str = UNSUPPORTED) -> None:
        """Notes that a tool has no effect."""
        self._notes.ignore(place, why)
        self._left_out.add(name if isinstance(name, str) else "")

    @property
    def has_lost_all(self) -> bool:
        """Whether tools were left out, and none remains."""
        return bool(self._left_out) and not self._taken

    def has_lost(self, name: str | None) -> bool:
        """Whether a choice of this tool can't be met, since it was left out."""
        return name in self._left_out - self._taken


def chosen(choice: Any) -> Any:
    """Converts the forms of a tool choice to a word, or to the name of the tool to call.

    Raises:
        ValueError: it is of no known form.
    """
    match choice:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
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
