"""Limits on a chat template: an untrusted program that could write gigabytes with a few characters.

A `Meter` counts what a template makes: characters, list items, loop iterations. Operations that make much from little
(`"a" * 10**10`, `|center`, `|indent`) are counted before they run. A list may contain another list many times, so it
counts at its written-out size.

A single Python operation isn't interrupted, but its inputs are within the limit. A counted character takes up to four
bytes of memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import GeneratorType
from typing import Any, cast

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# The limit is this, plus `_TIMES` the cost of the template's arguments.
_LEAST = 50_000_000
_TIMES = 100
# The cost of a list item or a loop iteration; a character costs 1.
_EACH = 16
# The cost of an item in a copied list, by its memory.
_PLACE = 2
_CPU_S = 20.0
_BETWEEN_CLOCKS = 1_000_000
_MAX_INT_BITS = 10_000
_MAX_DIGITS = 100

# A large width, or a width from an argument: in `%`, and in `format`.
_WIDE_MARK = re.compile(r"%[^%a-zA-Z]*(?:\*|\d{4})")
_WIDE_FIELD = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{4})")
# Filters and methods that return an existing value.
_EXISTING = frozenset({"first", "last", "default", "d", "attr", "min", "max", "random", "get"})
# Filters that don't write out their value.
_STRUCTURAL = _EXISTING | {
    *("list", "map", "select", "reject", "selectattr", "rejectattr", "length", "count", "items", "dictsort", "sort"),
    *("unique", "groupby", "reverse", "sum", "batch", "slice", "int", "float", "abs", "round", "join", "tojson"),
}
# Filters with their own loops, or that add text for each word.
_REMOVED = ("urlize", "pprint", "xmlattr")
_ESCAPES = {"e": 6, "escape": 6, "forceescape": 6, "urlencode": 3}
# String methods whose result is no longer than their input.
_METHODS = frozenset(name for name in vars(str) if name.startswith("is")) | {
    *("capitalize", "casefold", "count", "encode", "endswith", "find", "index", "lower", "lstrip", "partition"),
    *("removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rstrip", "startswith", "strip", "swapcase"),
    *("title", "upper"),
}


class TooMuchError(TemplateError):
    """A template exceeds its limit."""


class Meter:
    """Counts down what a template may still do."""

    def __init__(self, given: Any) -> None:
        self._left = _LEAST
        self._left += _TIMES * self.weight(given, with_texts=True, most=10**12)
        self._clock_at = self._left
        self._end_s = time.thread_time() + _CPU_S

    def charge(self, amount: int) -> None:
        """Subtracts a cost. Raises TooMuchError at the limit."""
        self._left -= amount
        if self._left < 0:
            raise TooMuchError("makes more of these messages than any prompt needs")
        if self._left < self._clock_at:
            self._clock_at = self._left - _BETWEEN_CLOCKS
            if time.thread_time() > self._end_s:
                raise TooMuchError("takes longer for these messages than any prompt needs")

    def weight(self, value: Any, *, with_texts: bool, indent: int = 0, most: int | None = None) -> int:
        """The cost of a value and of everything in it, each as often as it occurs.

        Args:
            with_texts: whether strings in it count by their length, as when it is written out.
            indent: characters before each value per level of nesting.
            most: None takes what is left.

        Raises:
            TooMuchError: more than `most`.
        """
        most = self._left if most is None else most
        total, pending = 0, [(value, 0)]
        while pending:
            each, depth = pending.pop()
            total += _EACH + indent * depth
            inner: Any = ()
            if isinstance(each, str | bytes):
                total += len(each) if with_texts else 0
            elif isinstance(each, Mapping):
                inner = each if with_texts else ()
                total += len(each) * _EACH
                pending += [(item, depth + 1) for item in each.values()]
            elif isinstance(each, list | tuple | set | frozenset):
                inner = each
            elif isinstance(each, range):
                total += len(each) * _EACH
            if total + len(inner) * _EACH > most:
                raise TooMuchError("makes more of these messages than any prompt needs")
            pending += [(item, depth + 1) for item in inner]
        return total

    def made(self, value: Any) -> Any:
        """A new value, counted."""
        if isinstance(value, str | bytes):
            self.charge(_EACH + len(value))
        elif isinstance(value, GeneratorType):
            return self.steps(value)
        else:
            self.charge(self.weight(value, with_texts=False))
        return value

    def steps(self, values: Any) -> Iterator[Any]:
        """Yields the values, counting each."""
        for value in values:
            self.charge(_EACH)
            yield value

    def written(self, value: Any, times: int = 1, indent: int = 0) -> None:
        """Counts a value before it is written out."""
        self.charge(times * self.weight(value, with_texts=True, indent=indent))


_METER: ContextVar[Meter | None] = ContextVar("_METER", default=None)


def _meter() -> Meter:
    meter = _METER.get()
    assert meter is not None, "templates run in `BoundedTemplate.render`"
    return meter


class BoundedTemplate(Template):
    """A template with a meter while it renders."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """Returns the text. Raises what the template raises, and TooMuchError."""
        token = _METER.set(Meter([args, kwargs]))
        try:
            return super().render(*args, **kwargs)
        finally:
            _METER.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with metered templates. Call `bound` once its filters are complete."""

    template_class = BoundedTemplate
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def bound(self) -> BoundedEnvironment:
        self.filters = {
            name: _metered_filter(name, function) for name, function in self.filters.items() if name not in _REMOVED
        }
        self.filters |= {"_made": _made, "_steps": _steps, "_step": _step, "_joined": _joined}
        self.globals["lipsum"] = _refuse
        self.finalize = _written
        return self

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter()
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INT_BITS:
                raise TooMuchError("computes with numbers longer than any prompt needs")
        elif operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(some, str | bytes | list | tuple) and isinstance(times, int) and times > 0:
                    meter.charge(times * meter.weight(some, with_texts=isinstance(some, str | bytes)))
        elif operator == "%" and isinstance(left, str | bytes):
            _check_format(meter, left, right)
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            return _added(meter, left, right, super().call_binop(context, operator, left, right))
        return meter.made(super().call_binop(context, operator, left, right))

    # Like its parent: a template may name an argument "self".
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            args = _check_method(meter, owner, name, args, kwargs)
        elif isinstance(owner, int | float | bytes):
            raise TooMuchError(f"uses {name}, which no prompt needs")
        result = super().call(__context, __obj, *args, **kwargs)
        meter.charge(_EACH)
        return result if name in _EXISTING else meter.made(result)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metered().visit(source), *args, **kwargs)


class _Metered(NodeTransformer):
    """Adds metering to operations without a name: loops, lists, slices and concatenation."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_List(self, node: nodes.Expr) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(node, "_made")

    visit_Dict = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made") if node.ctx == "load" else node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(cast(nodes.Expr, node.iter), "_steps")
        # Also counts recursive loops, and the template's own text.
        num_chars = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        step = _filter(nodes.Const(_EACH + num_chars, lineno=node.lineno), "_step")
        node.body = [nodes.ExprStmt(step, lineno=node.lineno), *node.body]
        return node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# With the context, so that the compiler doesn't fold constants.
@pass_context
def _made(_: Context, value: Any) -> Any:
    return _meter().made(value)


@pass_context
def _steps(_: Context, values: Any) -> Iterator[Any]:
    return _meter().steps(values)


@pass_context
def _step(_: Context, amount: int) -> None:
    _meter().charge(amount)


@pass_context
def _joined(_: Context, values: list[Any]) -> str:
    _meter().written(values)
    return "".join(map(str, values))


@pass_context
def _written(_: Context, value: Any) -> Any:
    _meter().written(value)
    return value


def _added(meter: Meter, left: Sequence[Any], right: Sequence[Any], result: Any) -> Any:
    """Counts a concatenated list: the items of the shorter one, and the places of both.

    The longer one is already counted, and repeated appending (`ns.x = ns.x + [message]`) is ordinary.
    """
    meter.charge(_EACH + _PLACE * len(result) + meter.weight(min(left, right, key=len), with_texts=False))
    return result


def _refuse(*_: Any, **__: Any) -> None:
    raise TooMuchError("uses lipsum, which no prompt needs")


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def run(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        value = _check_filter(meter, name, value, args, kwargs)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        result = function(*([first[wants]] if wants else []), value, *args, **kwargs)
        meter.charge(_EACH)
        return result if name in _EXISTING else meter.made(result)

    return run


def _check_filter(meter: Meter, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Counts what a filter will make; returns its input."""
    given = [*args, *kwargs.values()]
    if name == "join":
        value = list(meter.steps(value))
        meter.written(value)
        meter.charge(len(value) * sum(len(each) for each in given if isinstance(each, str)))
    elif name == "tojson":
        indent = kwargs.get("indent", args[1] if len(args) > 1 else None)
        size = len(indent) if isinstance(indent, str) else max(int(indent or 0), 0)
        separators = sum(len(str(each)) for each in kwargs.get("separators") or ())
        meter.written(value, 6, size + separators)
    elif name not in _STRUCTURAL:
        meter.written(value, _ESCAPES.get(name, 1))
        text = str(value)
        match name:
            case "replace":
                old, new, *_ = (*args, kwargs.get("old", ""), kwargs.get("new", ""))
                _replaced(meter, text, str(old), str(kwargs.get("new", new)))
            case "format":
                _check_format(meter, text, given)
            case "indent" | "wordwrap":
                # Every line may get the indent; a wrapped line may have one character.
                num_lines = len(text) if name == "wordwrap" else text.count("\n") + 1
                size = sum(len(each) if isinstance(each, str) else 0 for each in given)
                size += sum(each for each in given if isinstance(each, int) and each > 0 and name == "indent")
                meter.charge(num_lines * (size + (4 if name == "indent" else 1)))
            case _:
                _widths(meter, given)
    elif name == "round" and any(isinstance(each, int) and abs(each) > _MAX_DIGITS for each in given):
        raise TooMuchError("rounds to more digits than there are")
    elif name == "sum" and not all(isinstance(each, str | int | float | None) for each in given):
        raise TooMuchError("adds something that isn't a number")
    elif name in ("batch", "slice"):
        _widths(meter, given, _EACH)
    return value


def _check_method(
    meter: Meter, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Counts what a string method will make; returns its arguments."""
    meter.charge(len(text))
    match name:
        case "join" if args:
            items = list(meter.steps(args[0]))
            meter.written(items)
            meter.charge(len(items) * len(text))
            return (items, *args[1:])
        case "replace" if len(args) > 1:
            _replaced(meter, text, str(args[0]), str(args[1]))
        case "split" | "rsplit" | "splitlines":
            mark = kwargs.get("sep", args[0] if args and name != "splitlines" else None)
            meter.charge(_EACH * (text.count(mark) if isinstance(mark, str) and mark else len(text) // 2))
        case "center" | "ljust" | "rjust" | "zfill":
            _widths(meter, args)
        case "expandtabs":
            _widths(meter, [*args, *kwargs.values()], text.count("\t"))
        case "format" | "format_map":
            _check_format(meter, text, [*args, *kwargs.values()], fields=True)
        case _ if name not in _METHODS:
            raise TooMuchError(f"uses {name}, which no prompt needs")
    return args


def _widths(meter: Meter, given: Any, times: int = 1) -> None:
    meter.charge(times * sum(each for each in given if isinstance(each, int) and each > 0))


def _replaced(meter: Meter, text: str, old: str, new: str) -> None:
    meter.charge(len(text) + text.count(old) * len(new))


def _check_format(meter: Meter, form: str | bytes, given: Any, *, fields: bool = False) -> None:
    if isinstance(form, bytes) or (
        _WIDE_FIELD.search(form.replace("{{", "").replace("}}", "")) if fields else _WIDE_MARK.search(form)
    ):
        raise TooMuchError("formats wider than any prompt needs")
    # A format may use one argument many times.
    num_marks = form.count("{" if fields else "%")
    meter.charge(len(form))
    meter.written(given, max(num_marks, 1))
