"""What other servers and tools put into a conversation, as text for the model: searches, JSON values, summaries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from qwen35mm.contract import Image, Text, Video
from qwen35mm.server.notes import Notes

# Of a block or item itself, these say nothing to the model. In what a tool gave, the same names may say much.
_SILENT = frozenset(
    {"type", "id", "tool_use_id", "call_id", "item_id", "caller", "citations", "index"}
    | {"signature", "container", "container_id", "created_by", "response_id", "fingerprint"}
)
# These say nothing at any depth; clients move the first with every turn.
_NEVER = frozenset(
    {"cache_control", "encrypted_content", "encrypted_index", "encrypted_stdout", "encrypted_function_output"}
)
# Files and sealed texts, as base64.
_SEALED = re.compile(r"(?:data:[^,\s]{0,200},)?[A-Za-z0-9+/=_%-]{1000,}")
_LEFT_OUT = "..."
# More than bodies may have.
_MAX_DEPTH = 128


def carried(values: Mapping[str, Any]) -> str | None:
    """A block or item of a kind that has no place in the prompt, as a line of text; None if it says nothing.

    The same values always give the same text, so that the cache keeps a conversation that holds them.
    """
    said = {name: value for name, value in values.items() if name not in _SILENT}
    if said.get("status") == "completed":
        del said["status"]
    told = {name: value for name, value in _told(said).items() if value not in ("", [], {}, _LEFT_OUT)}
    kind = values.get("type")
    return f"[{kind!s:.100}: {json.dumps(told, ensure_ascii=False)}]" if told else None


def loses(value: Any) -> bool:
    """Whether `carried` leaves out a file or a sealed text."""
    if isinstance(value, str):
        return _SEALED.fullmatch(value) is not None
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(loses, values))


def result_parts(value: Any, is_part: Callable[[Any], bool], place: str, notes: Notes) -> list[Any]:
    """What a tool gave, any JSON value, as a list of texts and content parts. What is neither becomes JSON text."""
    listed = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
    known = [isinstance(each, str) or is_part(each) for each in listed]
    if all(known):
        return listed
    notes.change(place, "isn't text or parts; it is read as JSON text")
    if not any(known):
        return [json_text(value)]
    return [each if is_known else json_text(each) for each, is_known in zip(listed, known, strict=True)]


def json_text(value: Any) -> str:
    """A value as JSON text, without files and sealed texts."""
    return json.dumps(_told(value), ensure_ascii=False)


def _told(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return _LEFT_OUT if _SEALED.fullmatch(value) else value
    if depth == _MAX_DEPTH or not isinstance(value, dict | list):
        return value if isinstance(value, int | float | None) else _LEFT_OUT
    if isinstance(value, list):
        return [_told(each, depth + 1) for each in value]
    found = {name: _told(each, depth + 1) for name, each in value.items() if name not in _NEVER}
    return {name: each for name, each in found.items() if each is not None}


def add_line(content: list[Text | Image | Video], line: str) -> None:
    """Adds a text on lines of its own."""
    before = content[-1] if content else None
    is_inside = isinstance(before, Text) and not before.text.endswith("\n")
    content.append(Text(f"\n{line}\n" if is_inside else f"{line}\n"))
