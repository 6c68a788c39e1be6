"""JSON schemas of Python types, and values by them.

pydantic knows its own classes, dataclasses, TypedDicts, enums, Literals, list[T] and more.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast, get_origin

from qwen35mm.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from pydantic import TypeAdapter


def is_type(schema: object) -> bool:
    """Whether it is a type, such as `Shape`, `int` or `list[Shape]`, rather than a schema itself."""
    return isinstance(schema, type) or get_origin(schema) is not None


def schema_of(type_: Any) -> dict[str, Any]:
    """A type's JSON schema. Objects have no names but their fields', except where a pydantic class allows others.

    Raises:
        ConfigError: pydantic can't make one.
        MissingExtraError: pydantic isn't installed.
    """
    of_class: Any = getattr(type_, "model_json_schema", None)
    if isinstance(type_, type) and callable(of_class):
        return cast("Any", of_class)()
    from_adapter = _adapter(type_)
    try:
        return _closed(from_adapter.json_schema())
    except _faults() as error:
        raise _no_schema(type_, error) from None


def value_of(type_: Any, text: str) -> Any:
    """JSON text as an instance of a type; raises pydantic's ValidationError."""
    of_class: Any = getattr(type_, "model_validate_json", None)
    if isinstance(type_, type) and callable(of_class):
        return cast("Any", of_class)(text)
    return _adapter(type_).validate_json(text)


def _adapter(type_: Any) -> TypeAdapter[Any]:
    try:
        from pydantic import TypeAdapter
    except ModuleNotFoundError:
        raise MissingExtraError("A Python type as a schema", "schema") from None
    try:
        return TypeAdapter(type_)
    except _faults() as error:
        raise _no_schema(type_, error) from None


@functools.cache
def _faults() -> tuple[type[Exception], ...]:
    from pydantic.errors import PydanticUserError

    # An annotation may also name something that isn't there.
    return PydanticUserError, NameError, TypeError


def _no_schema(type_: Any, error: Exception) -> ConfigError:
    reason = str(error).split("\n", 1)[0]
    return ConfigError(f"schema: {type_!r} has no JSON schema: {reason}")


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` for objects that name properties and don't say."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: value
        if key in ("default", "const", "enum", "examples")
        else {name: _closed(each) for name, each in value.items()}
        if key in ("properties", "$defs")
        else _closed(value)
        for key, value in schema.items()
    }
    if isinstance(made.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made
