"""What other servers put into a conversation, as text for the model: searches, results of their tools, summaries."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from qwen35mm.contract import Image, Text, Video

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
_MAX_DEPTH = 16


def carried(values: Mapping[str, Any]) -> str | None:
    """A block or item of a kind that has no place in the prompt, as a line of text; None if it says nothing.

    The same values always give the same text, so that the cache keeps a conversation that holds them.
    """
    said = {name: value for name, value in values.items() if name not in _SILENT}
    if said.get("status") == "completed":
        del said["status"]
    told = {name: value for name, value in _told(said).items() if value not in ("", [], {})}
    kind = values.get("type")
    return f"[{kind!s:.100}: {json.dumps(told, ensure_ascii=False)}]" if told else None


def _told(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return None if _SEALED.fullmatch(value) else value
    if depth == _MAX_DEPTH or not isinstance(value, dict | list):
        return value if isinstance(value, int | float | None) else "..."
    if isinstance(value, list):
        return [_told(each, depth + 1) for each in value]
    found = {name: _told(each, depth + 1) for name, each in value.items() if name not in _NEVER}
    return {name: each for name, each in found.items() if each is not None}


def add_line(content: list[Text | Image | Video], line: str) -> None:
    """Adds a text on lines of its own."""
    before = content[-1] if content else None
    is_inside = isinstance(before, Text) and not before.text.endswith("\n")
    content.append(Text(f"\n{line}\n" if is_inside else f"{line}\n"))
