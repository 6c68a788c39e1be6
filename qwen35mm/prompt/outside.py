"""Separates outside text from the control tokens that a template writes.

In every outside string, a private-use stand-in replaces each character that can begin a control token, one for one. So
no outside text, not even two joined strings, can form a control token while the template tests, trims and joins it.
After the template's own control tokens are found, the stand-ins are replaced back.

This doesn't protect a template that writes the beginning of a control token and lets a message complete it, as in `'<'
~ name ~ '>'`. No template of the family does that.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from qwen35mm.contract import Message, Part, Text
from qwen35mm.errors import PromptError

_PRIVATE_USE = range(0xE000, 0xF900)
_JSON_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_SURROGATE = re.compile("[\ud800-\udfff]")

MAX_OUTSIDE_CHARS = 2_000_000
"""Most characters of one prompt's texts: half a million English tokens, and at worst a few seconds of tokenizing."""


class StandIns:
    """Stand-ins for `chars` that occur in none of `texts`, neither literally nor as JSON escapes.

    Attributes:
        marks: `num_marks` further characters that occur in none of them.

    Raises:
        PromptError: the texts hold nearly all private-use characters.
    """

    def __init__(self, chars: Iterable[str], texts: Iterable[str], *, num_marks: int = 0) -> None:
        used: set[str] = set()
        for text in texts:
            used.update(text)
            used.update(chr(int(code, 16)) for code in _JSON_ESCAPE.findall(text))
        free = (char for char in map(chr, _PRIVATE_USE) if char not in used)
        pairs = list(zip(sorted(chars), free, strict=False))
        self.marks = tuple(itertools.islice(free, num_marks))
        if len(pairs) < len(set(chars)) or len(self.marks) < num_marks:
            raise PromptError("The messages hold too many different private-use characters (U+E000 to U+F8FF).")
        self._hidden = pairs
        # A template may write JSON that escapes every non-ASCII character.
        self._restored = [form for char, stand_in in pairs for form in _both_forms(stand_in, char)]

    def hide(self, text: str) -> str:
        """`text` with stand-ins."""
        for char, stand_in in self._hidden:
            text = text.replace(char, stand_in)
        return text

    def restore(self, text: str) -> str:
        """`text` with the original characters."""
        for stand_in, char in self._restored:
            text = text.replace(stand_in, char)
        return text


def template_message(message: Message, visit: Callable[[str], str]) -> dict[str, Any]:
    """A message in the form for chat templates, with every outside string passed through `visit`."""
    parts = message.content
    content: str | list[dict[str, str]]
    if not parts:
        content = ""
    elif len(parts) == 1 and isinstance(parts[0], Text):
        content = visit(parts[0].text)
    else:
        content = [_template_part(part, visit) for part in parts]
    data: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        data["reasoning_content"] = visit(message.reasoning)
    if message.tool_calls:
        data["tool_calls"] = [
            {
                "type": "function",
                **({} if call.id is None else {"id": visit(call.id)}),
                "function": {"name": visit(call.name), "arguments": visit_json(call.arguments, visit)},
            }
            for call in message.tool_calls
        ]
    for key in ("tool_call_id", "name"):
        if (value := getattr(message, key)) is not None:
            data[key] = visit(value)
    return data


def visit_json(value: Any, visit: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string, including field names, passed through `visit`."""
    if isinstance(value, str):
        return visit(value)
    if isinstance(value, Mapping):
        return {visit(key): visit_json(item, visit) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [visit_json(item, visit) for item in value]
    return value


def check_texts(texts: Iterable[str], where: str) -> int:
    """Total length in characters. Raises PromptError at a lone surrogate, which no tokenizer can read."""
    total = 0
    for text in texts:
        total += len(text)
        if found := _SURROGATE.search(text):
            raise PromptError(
                f"{where}: the text holds half of a surrogate pair (U+{ord(found[0]):04X}, character "
                f"{found.start() + 1}), which is not a character. Remove it, or send the text as proper UTF-8."
            )
    return total


def _both_forms(stand_in: str, char: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """(stand-in, character), literally and as JSON escapes."""
    return (stand_in, char), (json.dumps(stand_in)[1:-1], json.dumps(char)[1:-1])


def _template_part(part: Part, visit: Callable[[str], str]) -> dict[str, str]:
    if isinstance(part, Text):
        return {"type": "text", "text": visit(part.text)}
    # Templates check the type or a field of that name; they never read its value.
    return {"type": part.kind, part.kind: ""}
