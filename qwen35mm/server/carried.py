"""What other servers put into a conversation, as text for the model: searches, results of their tools, summaries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qwen35mm.contract import Image, Text, Video

# Say nothing to the model.
_SILENT = frozenset(
    {"type", "id", "tool_use_id", "call_id", "item_id", "cache_control", "caller", "citations", "index", "status"}
    | {"signature", "container", "container_id", "created_by", "response_id", "fingerprint"}
)
# Longer words are files or sealed texts.
_MAX_WORD = 1000
_MAX_DEPTH = 16


def carried(values: Mapping[str, Any]) -> str | None:
    """A block or item of a kind that has no place in the prompt, as a line of text; None if it says nothing.

    The same values always give the same text, so that the cache keeps a conversation that holds them.
    """
    told = {name: value for name, value in _told(dict(values)).items() if name != "type" and value not in ("", [], {})}
    kind = values.get("type")
    return f"[{kind!s:.100}: {json.dumps(told, ensure_ascii=False)}]" if told else None


def _told(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return None if len(value) > _MAX_WORD and " " not in value and "\n" not in value else value
    if depth == _MAX_DEPTH or not isinstance(value, dict | list):
        return value if isinstance(value, int | float | None) else "..."
    if isinstance(value, list):
        return [_told(each, depth + 1) for each in value]
    found = {
        name: _told(each, depth + 1)
        for name, each in value.items()
        if name not in _SILENT - {"type"} and not name.startswith("encrypted")
    }
    return {name: each for name, each in found.items() if each is not None}


def add_line(content: list[Text | Image | Video], line: str) -> None:
    """Adds a text on lines of its own."""
    before = content[-1] if content else None
    is_inside = isinstance(before, Text) and not before.text.endswith("\n")
    content.append(Text(f"\n{line}\n" if is_inside else f"{line}\n"))
