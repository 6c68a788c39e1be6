"""Values of tool calls: the types that a schema allows, and the value that a text means by them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import unquote

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
# Schemas may refer to themselves.
_MAX_REFERENCES = 16
_MAX_DEPTH = 64
_NONE: Any = object()
_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"[+-]?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z]+(?!\w)")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_EVENT = re.compile(r"[\"'\[\]{}\\,:(]|[^\s\"'\[\]{}\\,:(]+")
_PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", '"': '"', "'": "'"}
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_UNICODE = re.compile(r"[0-9a-fA-F]{4}")


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema, or its reference's target in `root`; None if there is no such target."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        schema = root
        for name in reference.removeprefix("#").split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return None


def kinds_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty if it doesn't restrict them."""
    return _kinds_of(schema, root, {}, 0)


def _kinds_of(schema: Any, root: Mapping[str, Any], found: dict[int, set[str]], depth: int) -> set[str]:
    """`found` has the kinds of visited schemas by identity, since choices may share schemas."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return set()
    if id(schema) not in found:
        # A reference to itself adds nothing.
        found[id(schema)] = set()
        found[id(schema)] = _own_kinds(schema, root, found, depth)
    return found[id(schema)]


def _own_kinds(schema: Mapping[str, Any], root: Mapping[str, Any], found: dict[int, set[str]], depth: int) -> set[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        return {kinds} if isinstance(kinds, str) else {each for each in kinds if isinstance(each, str)}
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {_kind(each) for each in ([schema["const"]] if "const" in schema else schema["enum"])}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            choices = [_kinds_of(each, root, found, depth + 1) for each in schema[name]]
            return set().union(*choices) if all(choices) else set()
    parts = schema.get("allOf")
    parts = [_kinds_of(each, root, found, depth + 1) for each in parts] if isinstance(parts, list) else []
    known = [kinds for kinds in parts if kinds]
    return set.intersection(*known) if known else set()


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "object")


class ValueReader:
    """Reads the values of one parameter, by its schema.

    Args:
        schema: the parameter's; None if there is none.
        root: the schema of all parameters, for references.

    Attributes:
        is_text: whether its values are written as they are, not as JSON.
        may_be_certain: whether a text value can be certain before its end.
    """

    def __init__(self, schema: Any, root: Mapping[str, Any]) -> None:
        self._kinds = kinds_of(schema, root)
        self.is_text = not self._kinds or "string" in self._kinds
        schema = resolved(schema, root)
        listed = schema.get("enum") if isinstance(schema, Mapping) else None
        self._listed = listed if isinstance(listed, list) else []
        self._others = [each for each in self._listed if not isinstance(each, str)]
        self.may_be_certain = not self._others
        self._may_be_null = "null" in self._kinds and "null" not in self._listed

    def is_certain(self, beginning: str) -> bool:
        """Whether a text value that begins like this is that text, whatever follows."""
        return self.may_be_certain and not (self._may_be_null and "null".startswith(beginning))

    def read(self, text: str) -> Any:
        """The value that a text means. A text that its schema can't mean stays a string: the tool will refuse it."""
        if not self.is_text:
            value = self._literal(text)
            return text if value is _NONE else self.fitted(value)
        if text in self._listed or self.is_certain(text):
            return text
        if text == "null" and self._may_be_null:
            return None
        value = self._literal(text)
        is_listed = any(type(each) is type(value) and each == value for each in self._others)
        return value if is_listed else text

    def fitted(self, value: Any) -> Any:
        """A value, or what it means where its schema wants another type: a number in quotes, an array as text."""
        if isinstance(value, str) and not self.is_text:
            meant = self._literal(value)
            is_meant = meant is not _NONE and (_kind(meant) in self._kinds or _is_number(meant, self._kinds))
            return self.fitted(meant) if is_meant else value
        if isinstance(value, float) and value.is_integer() and not self._kinds & {"number", "string"}:
            return int(value) if "integer" in self._kinds else value
        return value

    def _literal(self, text: str) -> Any:
        if "boolean" in self._kinds and (word := text.strip().lower()) in ("true", "false"):
            return word == "true"
        try:
            return read_literal(text)
        except ValueError:
            return _NONE


def _is_number(value: Any, kinds: set[str]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return "number" in kinds or ("integer" in kinds and (isinstance(value, int) or value.is_integer()))


def read_literal(text: str) -> Any:
    """A JSON value, also as Python writes it (`None`, single quotes) or with a trailing comma or `+5`.

    Raises:
        ValueError: it is no such value, is nested too deeply, or has a number that JSON doesn't know.
    """
    try:
        try:
            # Raw line ends in strings are allowed.
            value = json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
        except ValueError:
            value = _Literal(text).read()
        # An escape can hold half a character, which can't be sent.
        return _whole(value) if _HALF.search(text) else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _whole(value: Any) -> Any:
    written = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(written.decode("utf-16", "replace"))


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse(text)
    return number


class _Literal:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> Any:
        value = self._value(0)
        self._skip()
        if self._at < len(self._text):
            raise self._wrong()
        return value

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._skip()
        first = self._text[self._at : self._at + 1]
        if first in ('"', "'") and first:
            return self._string(first)
        if first in ("{", "[") and first:
            return self._object(depth) if first == "{" else self._array(depth)
        if number := _NUMBER.match(self._text, self._at):
            self._at = number.end()
            text = number[0].removeprefix("+")
            return _finite(text) if re.search("[.eE]", text) else int(text)
        word = _WORD.match(self._text, self._at)
        if word is None or word[0] not in _WORDS:
            raise self._wrong()
        self._at = word.end()
        return _WORDS[word[0]]

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._at += 1
        while not self._takes("}"):
            self._skip()
            mark = self._text[self._at : self._at + 1]
            if mark not in ('"', "'") or not mark:
                raise self._wrong()
            name = self._string(mark)
            if not self._takes(":") or name in found:
                raise self._wrong()
            found[name] = self._value(depth + 1)
            if not self._takes(","):
                if not self._takes("}"):
                    raise self._wrong()
                break
        return found

    def _array(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self._at += 1
        while not self._takes("]"):
            found.append(self._value(depth + 1))
            if not self._takes(","):
                if not self._takes("]"):
                    raise self._wrong()
                break
        return found

    def _string(self, mark: str) -> str:
        parts: list[str] = []
        self._at += 1
        while True:
            plain = _PLAIN[mark].match(self._text, self._at)
            assert plain is not None, "it matches the empty text"
            parts.append(plain[0])
            self._at = plain.end()
            if self._text.startswith(mark, self._at):
                self._at += 1
                return "".join(parts)
            parts.append(self._escape())

    def _escape(self) -> str:
        escaped = self._text[self._at + 1 : self._at + 2]
        if escaped == "u" and (code := _UNICODE.match(self._text, self._at + 2)):
            self._at = code.end()
            return chr(int(code[0], 16))
        if escaped not in _ESCAPES:
            raise self._wrong()
        self._at += 2
        return _ESCAPES[escaped]

    def _takes(self, mark: str) -> bool:
        self._skip()
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None, "it matches the empty text"
        self._at = found.end()

    def _wrong(self) -> ValueError:
        return ValueError(f"no value at character {self._at}")


class Scanner:
    """Follows the brackets and quotes of a value through a stream.

    A quote opens a string only where a value or a name may begin, so an apostrophe inside a word is none.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._quote = ""
        self._is_escaped = False
        self._may_begin = True

    @property
    def depth(self) -> int:
        """Brackets that are open."""
        return len(self._open)

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a string."""
        return bool(self._quote)

    @property
    def closing(self) -> str:
        """The brackets that would close all that are open."""
        return "".join("}" if each == "{" else "]" for each in reversed(self._open))

    def push(self, text: str) -> int | None:
        """Takes the next text. Returns where in it the outermost bracket closes, and stops there; else None."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING[self._quote] if self._quote else _EVENT).search(text, at)
            if found is None:
                return None
            mark, at = found[0], found.end()
            if mark == "\\":
                self._is_escaped = bool(self._quote)
                self._may_begin = False
            elif self._quote:
                self._quote, self._may_begin = "", False
            elif mark in "\"'":
                self._quote = mark if self._may_begin else ""
            elif mark in "[{":
                self._open.append(mark)
                self._may_begin = True
            elif mark in "]}":
                self._may_begin = False
                if self._open:
                    self._open.pop()
                if not self._open:
                    return at
            else:
                self._may_begin = mark in ",:("
        return None
