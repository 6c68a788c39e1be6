"""The parts of a tool call while they are read from a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from qwen35mm.prompt.call_marks import Token
from qwen35mm.prompt.call_values import Scanner, ValueReader

# Closing brackets that JSON may lack.
_MAX_MISSING = 3


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a function's parameters, by name."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def is_space(token: Token) -> bool:
    """Whether a token is white space."""
    return token.kind == "text" and not token.raw.strip()


class Call:
    """The call that is being read.

    Attributes:
        is_open: whether its parameters may follow.
        is_begun: whether its beginning was told.
        is_whole: whether it has all its arguments.
        is_doubtful: whether a value has marks, which may not have been meant as its text.
    """

    def __init__(self, name: str, schema: Mapping[str, Any], *, is_offered: bool, is_open: bool = True) -> None:
        self.name = name
        self.schema = schema
        self.properties = properties_of(schema)
        self.is_offered = is_offered
        self.is_open = is_open
        self.is_begun = False
        self.is_whole = False
        self.is_doubtful = False
        self.arguments: dict[str, Any] = {}

    @property
    def lacks_arguments(self) -> bool:
        """Whether required ones are missing."""
        required = self.schema.get("required")
        return isinstance(required, list) and not all(name in self.arguments for name in required)


NO_CALL = Call("", {}, is_offered=True, is_open=False)


class RawValue:
    """A value that is written as it is.

    Attributes:
        run: marks that wait, and white space between them: they close the value, or belong to it.
        run_kinds: the marks' kinds.
        is_plain: whether it has no marks so far.
        is_told: whether its beginning was told.
    """

    def __init__(self, name: str, reader: ValueReader, *, has_begun: bool) -> None:
        self.name = name
        self.reader = reader
        self.run: list[Token] = []
        self.run_kinds: list[str] = []
        self.is_plain = True
        self.is_told = False
        self._parts: list[str] = []
        self._has_begun = has_begun
        # A line end that belongs to the closing mark if that follows.
        self._line_end = ""
        self._is_empty = True
        # The part that isn't certain to be text.
        self._unsure: str | None = ""
        # The marks of calls that the value quotes, and those that may begin one.
        self._quoted: list[str] = []
        # By kind, so that a mark that closes nothing costs no search.
        self._num_quoted: Counter[str] = Counter()
        self._opening: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def is_at_line(self) -> bool:
        """Whether a line begins here."""
        return self._is_empty or bool(self._line_end)

    @property
    def is_sure(self) -> bool:
        """Whether the marks that wait may close it without being complete."""
        return self.run_kinds[:1] == ["/parameter"] or self.is_plain

    def is_closed(self, *, is_cut: bool) -> bool:
        """Whether the marks that wait close it if the reply ends here."""
        is_whole = "/function" in self.run_kinds or "/tool_call" in self.run_kinds
        return bool(self.run_kinds) and self.is_sure and (is_whole or not is_cut)

    def wait(self, token: Token) -> None:
        self.run.append(token)
        if token.kind != "text":
            self.run_kinds.append(token.kind)

    def closes(self, token: Token) -> bool:
        """Whether a closing mark closes something that the value quotes; forgets that."""
        opened = token.kind[1:]
        if not self._num_quoted[opened] or (opened == "parameter" and self._quoted[-1] != opened):
            return False
        closed = ""
        while closed != opened:
            closed = self._quoted.pop()
            self._num_quoted[closed] -= 1
        return True

    def add(self, token: Token | None) -> str:
        """Adds the marks that wait, and the token. Returns text that is certain now."""
        self.is_plain = self.is_plain and not self.run and (token is None or token.kind == "text")
        texts = [each.raw for each in self.run]
        if token is not None:
            texts.append(token.raw)
            self._quote(token)
        self.run, self.run_kinds = [], []
        text = "".join(texts)
        if text and not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        if not text:
            return ""
        self._is_empty = False
        text, self._line_end = self._line_end + text, ""
        if text.endswith("\n"):
            text, self._line_end = text[:-1], "\n"
        self._parts.append(text)
        if self._unsure is None:
            return text
        if not self.reader.may_be_certain:
            return ""
        self._unsure += text
        if not self.reader.is_certain(self._unsure):
            return ""
        known, self._unsure = self._unsure, None
        return known

    def _quote(self, token: Token) -> None:
        """Follows the calls that the value quotes: a mark opens one only if its parameter follows at once."""
        if token.kind == "tool_call":
            self._opening = ["tool_call"]
        elif token.kind == "function":
            self._opening = [*(self._opening if self._opening == ["tool_call"] else []), "function"]
        elif token.kind == "parameter" and (self._opening[-1:] == ["function"] or self._quoted[-1:] == ["function"]):
            opened = [*self._opening, "parameter"]
            self._quoted += opened
            self._num_quoted.update(opened)
            self._opening = []
        elif not is_space(token):
            self._opening = []


class JsonValue:
    """A value that is written as JSON."""

    def __init__(self, name: str, reader: ValueReader) -> None:
        self.name = name
        self.reader = reader
        self.scanner = Scanner()
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts).removeprefix("\n").removesuffix("\n")

    @property
    def is_closed(self) -> bool:
        """Whether its own brackets close it."""
        return self.text.strip()[-1:] in ("}", "]") and not self.scanner.depth and not self.scanner.in_string

    def push(self, text: str) -> None:
        self._parts.append(text)
        rest: str | None = text
        while rest:
            at = self.scanner.push(rest)
            rest = None if at is None else rest[at:]


class JsonObject:
    """A JSON object or list that ends with its outermost bracket."""

    def __init__(self) -> None:
        self.scanner = Scanner()
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, text: str) -> str | None:
        """Takes the next text. Returns what is left of it after the end; None if that isn't reached."""
        at = self.scanner.push(text)
        self._parts.append(text[:at])
        return None if at is None else text[at:]

    def close(self) -> bool:
        """Adds the closing brackets that are missing, if they are few."""
        missing = self.scanner.closing
        self._parts.append(missing)
        return 0 < len(missing) <= _MAX_MISSING
