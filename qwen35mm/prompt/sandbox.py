"""The sandbox for chat templates: a checkpoint's template is an untrusted program.

It offers templates what transformers' `apply_chat_template` does, without importing transformers, which takes most of a
second. `tests/prompt/test_sandbox.py` compares the two.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from qwen35mm.prompt.limits import BoundedEnvironment, TooMuchError

# The family's templates have up to 8,000 characters; a compiled one takes a hundred times its length.
MAX_SOURCE_CHARS = 100_000
_MAX_FORM_CHARS = 200


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> Template:
    """Compiles a template. Raises jinja2's TemplateSyntaxError, and TooMuchError if it is too long."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TooMuchError(f"has {len(source):,} characters, and up to {MAX_SOURCE_CHARS:,} are read")
    return _environment().from_string(source)


def read_names(source: str) -> set[str]:
    """The variables that a template reads from outside. Its own variables aren't among them, except one that it gives
    a default, as in `{% set x = x if x is defined else 1 %}`."""
    environment = _environment()
    tree = environment.parse(source)
    own = {name.name for part in tree.find_all((nodes.For, nodes.Macro)) for name in _assigned(part)}
    for assignment in tree.find_all(nodes.Assign):
        names = {name.name for name in _assigned(assignment)}
        own |= names - {name.name for name in assignment.node.find_all(nodes.Name)}
    return meta.find_undeclared_variables(tree) - own - environment.globals.keys()


def plain(value: Any) -> Any:
    """A copy of a JSON value in Python's own types; any other object becomes its type's name."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    # Not str(value) and the like, which call the value's own methods.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"


@functools.cache
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.bound()


def _assigned(part: nodes.Node) -> Iterator[nodes.Name]:
    names = part.find_all(nodes.Name)
    return (name for name in names if name.ctx == "store")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, around an assistant's text: for training; no effect here."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` for templates: not the class itself, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` for templates: its attributes can't have Python's internal names."""

    # Like its parent: a template may name an attribute "self".
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *others = args
        values = dict(*others, **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    # Nested namespaces would be written out once per reference.
    def __repr__(self) -> str:
        return "<Namespace>"


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"A template's namespace can't have an attribute {name!r}.")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter of this name, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    if len(form) > _MAX_FORM_CHARS:
        raise TooMuchError("asks for a longer date than any prompt needs")
    return datetime.datetime.now().strftime(form)
