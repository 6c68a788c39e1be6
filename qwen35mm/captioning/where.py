"""`--where`: a small expression over what is known of a medium, such as "width >= 512 and sharpness > 20".

It is parsed with Python's own parser, and only the nodes below are evaluated: nothing is called or looked up elsewhere.
"""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from qwen35mm.captioning.items import Item
from qwen35mm.errors import CaptioningError

ITEM_NAMES: Final = ("name", "stem", "folder", "kind", "bytes", "metadata")
"""Names whose values are known without opening the medium."""
SIZE_NAMES: Final = ("width", "height", "aspect", "pixels", "duration")
"""Names whose values the medium's head gives."""
MEASURED_NAMES: Final = ("sharpness", "letterbox")
"""Names whose values need the decoded medium."""

_KNOWN = (*SIZE_NAMES, *MEASURED_NAMES, *ITEM_NAMES)
_EXAMPLE = "for example: width >= 512 and sharpness > 20 and aspect < 2.5"
_MAX_CHARS = 2000
_MAX_DEPTH = 50


class _Unknown:
    """A value that isn't known yet."""


_UNKNOWN = _Unknown()
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = MappingProxyType(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
)
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = MappingProxyType(
    {
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.In: lambda one, many: one in many,
        ast.NotIn: lambda one, many: one not in many,
    }
)


class Where:
    """An expression that says which media are wanted.

    A comparison with a value that a medium lacks is false.

    Attributes:
        names: the names that it uses.

    Raises:
        CaptioningError: it can't be read, or it has a name or an operation that isn't known.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.names: set[str] = set()
        if len(text) > _MAX_CHARS:
            raise CaptioningError(f"--where takes at most {_MAX_CHARS:,} characters; got {len(text):,}.")
        try:
            self._body = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            said = error.msg if isinstance(error, SyntaxError) else "it is too deep"
            raise CaptioningError(f"--where {text!r} can't be read: {said}. Write it {_EXAMPLE}.") from error
        self._check(self._body)

    @property
    def needs_size(self) -> bool:
        """Whether it needs what the medium's head gives."""
        return not self.names.isdisjoint(SIZE_NAMES)

    @property
    def needs_pixels(self) -> bool:
        """Whether it needs the decoded medium."""
        return not self.names.isdisjoint(MEASURED_NAMES)

    def holds(self, facts: Mapping[str, Any]) -> bool | None:
        """Whether it holds; None if that depends on values that `facts` lacks."""
        found = self._value(self._body, facts)
        return None if found is _UNKNOWN else bool(found)

    def _check(self, node: ast.expr, depth: int = 0) -> None:
        if depth > _MAX_DEPTH:
            raise CaptioningError(f"--where {self.text!r} is nested too deeply.")
        inner: list[ast.expr] = []
        match node:
            case ast.BoolOp(values=inner):
                pass
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                inner = [operand]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                inner = [left, right]
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
                inner = [left, *others]
            case ast.Constant(value=value) if isinstance(value, (bool, int, float, str)):
                pass
            case ast.Tuple(elts=inner) | ast.List(elts=inner):
                pass
            case ast.Attribute(value=ast.Name(id="metadata")):
                self.names.add("metadata")
            case ast.Subscript(value=ast.Name(id="metadata"), slice=ast.Constant(value=str())):
                self.names.add("metadata")
            case ast.Name(id=name) if name in _KNOWN and name != "metadata":
                self.names.add(name)
            case ast.Name(id="metadata"):
                raise CaptioningError("--where takes one value of the metadata: write metadata.KEY or metadata['KEY'].")
            case ast.Name(id=name):
                close = difflib.get_close_matches(name, _KNOWN, 1)
                meant = f" Did you mean {close[0]}?" if close else ""
                known = ", ".join(each for each in _KNOWN if each != "metadata")
                raise CaptioningError(f"--where has no name {name!r}.{meant} It knows {known} and metadata.KEY.")
            case _:
                raise CaptioningError(
                    f"--where takes comparisons, and, or, not, + - * /, numbers and texts; got "
                    f"'{ast.unparse(node)[:80]}'. Write it {_EXAMPLE}."
                )
        for each in inner:
            self._check(each, depth + 1)

    def _value(self, node: ast.expr, facts: Mapping[str, Any]) -> Any:
        """A node's value: None if the medium lacks it, `_UNKNOWN` if `facts` doesn't say."""
        match node:
            case ast.BoolOp(op=op, values=inner):
                decides = isinstance(op, ast.Or)
                found = [self._value(each, facts) for each in inner]
                if any(each is not _UNKNOWN and bool(each) is decides for each in found):
                    return decides
                return _UNKNOWN if _UNKNOWN in found else not decides
            case ast.UnaryOp(op=op, operand=operand):
                value = self._value(operand, facts)
                if value is _UNKNOWN:
                    return value
                return not value if isinstance(op, ast.Not) else _tried(operator.neg, value)
            case ast.BinOp(left=left, op=op, right=right):
                return self._both(_ARITHMETIC[type(op)], left, right, facts)
            case ast.Compare(left=left, ops=ops, comparators=others):
                pairs = zip([left, *others], ops, others, strict=False)
                found = [self._both(_COMPARISONS[type(op)], one, other, facts) for one, op, other in pairs]
                if any(each is not _UNKNOWN and not each for each in found):
                    return False
                return _UNKNOWN if _UNKNOWN in found else True
            case ast.Tuple(elts=inner) | ast.List(elts=inner):
                values = [self._value(each, facts) for each in inner]
                return _UNKNOWN if _UNKNOWN in values else values
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return facts.get(name, _UNKNOWN)
            case ast.Attribute(attr=key) | ast.Subscript(slice=ast.Constant(value=key)):
                return facts["metadata"].get(key)
        raise AssertionError("it was checked")

    def _both(
        self, function: Callable[[Any, Any], Any], one: ast.expr, other: ast.expr, facts: Mapping[str, Any]
    ) -> Any:
        values = [self._value(each, facts) for each in (one, other)]
        return _UNKNOWN if _UNKNOWN in values else _tried(function, *_alike(*values))


def item_facts(item: Item) -> dict[str, Any]:
    """The values of `ITEM_NAMES`. Raises OSError if the medium is gone."""
    return {
        "name": item.name,
        "stem": item.stem,
        "folder": item.folder,
        "kind": item.kind,
        "bytes": item.num_bytes,
        "metadata": item.metadata,
    }


def size_facts(width: int, height: int, duration_s: float | None) -> dict[str, Any]:
    """The values of `SIZE_NAMES`; a picture has no duration."""
    aspect = round(width / height, 4)
    return {"width": width, "height": height, "aspect": aspect, "pixels": width * height, "duration": duration_s}


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Both values, and a text beside a number as a number: metadata from CSV files are texts."""
    for text, number in ((one, other), (other, one)):
        if isinstance(text, str) and isinstance(number, (int, float)):
            try:
                value = float(text)
            except ValueError:
                break
            return (value, other) if text is one else (one, value)
    return one, other


def _tried(function: Callable[..., Any], *values: Any) -> Any:
    """The function's value; None if a value is missing or of another type."""
    if any(value is None for value in values):
        return None
    try:
        return function(*values)
    except (TypeError, ValueError, ArithmeticError):
        return None
