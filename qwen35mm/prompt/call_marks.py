"""The marks of tool calls in a stream of text, and where that text is code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "tool_call", "/tool_call", "function", "/function", "parameter", "/parameter"]

_MAX_NAME_CHARS = 256
_MAX_MARK_CHARS = _MAX_NAME_CHARS + 40
_GAP = r"[ \t]{0,4}"
_MARK = re.compile(
    rf"<(?:(?P<plain>tool_call|/tool_call|/function|/parameter){_GAP}>"
    rf"|(?P<named>function|parameter)(?:{_GAP}=|[ \t]{{1,4}}name{_GAP}=)"
    rf"(?P<name>[^>\n]{{1,{_MAX_NAME_CHARS}}}?)(?P<end>[>\n]))"
)
_PLAIN = ("<tool_call", "</tool_call", "</function", "</parameter")
_NAMED = ("<function", "<parameter")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)", re.DOTALL)
# A fence's line is read as far as this.
_MAX_FENCE_CHARS = 200


@dataclass(frozen=True)
class Token:
    """A mark, or text between marks. Text may be cut anywhere.

    Attributes:
        raw: as it was written.
        name: the function's or the parameter's, without quotes.
        is_broken: the mark ends with its line instead of `>`.
    """

    kind: Kind
    raw: str
    name: str = ""
    is_broken: bool = False


class Marks:
    """Splits a stream into marks and texts; holds back no more than the beginning of a mark."""

    def __init__(self) -> None:
        self._rest = ""

    def push(self, text: str) -> Iterator[Token]:
        """Takes the next delta."""
        text, self._rest = self._rest + text, ""
        start = at = 0
        while (at := text.find("<", at)) >= 0:
            found = _MARK.match(text, at)
            if found is None and not _may_be_mark(text, at):
                at += 1
                continue
            if at > start:
                yield Token("text", text[start:at])
            if found is None:
                self._rest = text[at:]
                return
            yield _token(found)
            start = at = found.end()
        if start < len(text):
            yield Token("text", text[start:])

    def flush(self) -> Iterator[Token]:
        """The rest at the end."""
        text, self._rest = self._rest, ""
        if text:
            yield Token("text", text)


def _token(found: re.Match[str]) -> Token:
    kind: Kind = found["plain"] or found["named"]  # pyright: ignore[reportAssignmentType]
    name = (found["name"] or "").strip()
    if len(name) > 1 and name[0] in "\"'" and name[-1] == name[0]:
        name = name[1:-1].strip()
    return Token(kind, found[0], name, found["end"] == "\n")


def _may_be_mark(text: str, at: int) -> bool:
    """Whether more text may make a mark of the text from `at`."""
    if len(text) - at > _MAX_MARK_CHARS:
        return False
    beginning = text[at:]
    if any(head.startswith(beginning) for head in (*_PLAIN, *_NAMED)):
        return True
    if any(beginning.startswith(head) and not beginning[len(head) :].strip(" \t") for head in _PLAIN):
        return len(beginning) < _MAX_MARK_CHARS
    named = next((head for head in _NAMED if beginning.startswith(head)), None)
    if named is None:
        return False
    rest = beginning[len(named) :]
    return not rest or (rest[0] in " \t=" and ">" not in rest and "\n" not in rest)


class Code:
    """Follows Markdown's code through a stream of text: fences, and code inside a line."""

    def __init__(self) -> None:
        self._fence = ""
        self.end_line()

    @property
    def is_inside(self) -> bool:
        """Whether the next character is code."""
        return bool(self._fence) or self._num_ticks % 2 == 1

    @property
    def is_at_start(self) -> bool:
        """Whether the line has only white space so far."""
        return not self._line.strip()

    def push(self, text: str) -> None:
        """Takes the next text."""
        *lines, last = text.split("\n")
        for line in lines:
            self._add(line)
            self._close_line()
        self._add(last)

    def end_line(self) -> None:
        """Begins a line without looking at the one before."""
        self._line, self._num_ticks, self._was_tick = "", 0, False

    def _add(self, text: str) -> None:
        if len(self._line) < _MAX_FENCE_CHARS:
            self._line += text[:_MAX_FENCE_CHARS]
        if "`" in text or self._was_tick:
            for run in re.finditer("`+", text):
                self._num_ticks += not (self._was_tick and run.start() == 0)
            self._was_tick = text.endswith("`") if text else self._was_tick

    def _close_line(self) -> None:
        found = _FENCE.match(self._line)
        if found is not None:
            mark, rest = found[1], found[2]
            if not self._fence:
                self._fence = mark if mark[0] == "~" or "`" not in rest else ""
            elif mark.startswith(self._fence) and not rest.strip():
                self._fence = ""
        self.end_line()
