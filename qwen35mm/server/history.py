"""Reads past turns as clients send them back. No old turn ends a conversation: what can't be read is carried as text.

The model's own forms are in `qwen35mm.contract`; these are the ones of other servers, models and client libraries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from qwen35mm.contract import ToolCall
from qwen35mm.errors import PromptError
from qwen35mm.outside_json import check_json
from qwen35mm.server.notes import Notes

# The argument that holds what a call was written with, if that is no JSON object.
RAW_ARGUMENTS = "arguments"
# The name of a call without one.
UNNAMED = "unknown"
# Values in the arguments of one request's calls, where these are JSON text.
MAX_ARGUMENT_VALUES = 250_000
_SURROGATE = re.compile("[\ud800-\udfff]")


class CallReader:
    """Reads the past calls of one request."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        # Of all arguments that come as JSON text: what reads the body has only counted each as one.
        self._values_left = MAX_ARGUMENT_VALUES

    def read(self, name: Any, arguments: Any, call_id: Any, place: str) -> ToolCall:
        """A past call. Arguments that are no JSON object become one argument, `arguments`, with their text.

        Args:
            arguments: JSON text, as in OpenAI's protocols, or a value, as in Anthropic's.
            place: the call's path in the request.
        """
        if not isinstance(name, str) or not name.strip():
            self._notes.change(f"{place}.name", f"is missing; the call is read as one of {UNNAMED!r}")
            name = UNNAMED
        values = self._values(arguments)
        if not isinstance(values, Mapping):
            self._notes.change(f"{place}.arguments", f"isn't a JSON object; its text is the argument {RAW_ARGUMENTS!r}")
            values = {RAW_ARGUMENTS: values}
        call_id = call_id if isinstance(call_id, str) else None
        try:
            return ToolCall(name, values, call_id)
        except PromptError:  # nested too deeply
            return ToolCall(name, {RAW_ARGUMENTS: json.dumps(values)}, call_id)

    def _values(self, arguments: Any) -> Any:
        """The arguments' values; the text itself if it isn't JSON, or has too many values."""
        # Some clients write JSON into JSON.
        for _ in range(2):
            if not isinstance(arguments, str):
                break
            text = _SURROGATE.sub("\ufffd", arguments)
            try:
                check_json(text, max_values=self._values_left)
                arguments = json.loads(text) if text.strip() else {}
            except (ValueError, RecursionError):
                return text
            self._values_left -= _num_values(arguments)
        return {} if arguments is None else _clean(arguments)


def _num_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_num_values, value.values()))
    return 1 + sum(map(_num_values, value)) if isinstance(value, list) else 1


def _clean(value: Any, depth: int = 0) -> Any:
    """A JSON value without lone surrogates, which escapes in JSON text can form."""
    if depth > 100:
        return value
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_clean(name): _clean(each, depth + 1) for name, each in value.items()}
    if isinstance(value, list):
        return [_clean(each, depth + 1) for each in value]
    return value


def left_out(kind: str, name: object = None) -> str:
    """What the model reads in place of a part that can't be read, such as an audio file."""
    named = f" {name!r:.100}" if isinstance(name, str) and name else ""
    return f"[{kind}{named} left out: it can't be read here]"


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """An assistant's past thinking, in any of the forms in which clients send it back; None without any."""
    own = message.get("provider_specific_fields")
    for values in (message, own if isinstance(own, Mapping) else {}):
        for name in ("reasoning_content", "reasoning", "thinking"):
            if isinstance(values.get(name), str) and values[name]:
                return values[name]
        for name in ("reasoning_details", "thinking_blocks"):
            blocks = values.get(name)
            texts = [_thought(block) for block in blocks] if isinstance(blocks, list) else []
            if joined := "".join(texts):
                return joined
    return None


def _thought(block: Any) -> str:
    found = [block.get(name) for name in ("thinking", "text", "summary")] if isinstance(block, Mapping) else []
    if found and isinstance(found[0], list):
        # Mistral's chunks.
        return "".join(
            each["text"] for each in found[0] if isinstance(each, Mapping) and isinstance(each.get("text"), str)
        )
    return next((each for each in found if isinstance(each, str)), "")
