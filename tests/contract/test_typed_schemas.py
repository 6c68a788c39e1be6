"""Schemas from Python types, and values by them."""

from __future__ import annotations

import dataclasses
import enum
import json
import threading
from typing import Any, Literal, Union

import pydantic
import pytest
import typing_extensions

from qwen35mm.contract import SamplingParams
from qwen35mm.contract.typed_schemas import is_type, schema_of, value_of
from qwen35mm.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    default: int = 0


class Named(typing_extensions.TypedDict):
    name: str
    at: Point


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    a: int


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (int, "3", 3),
        (bool, "true", True),
        (list[int], "[1, 2]", [1, 2]),
        (Literal["a", "b"], '"b"', "b"),
        (Colour, '"red"', Colour.RED),
        (Point, '{"x": 1}', Point(1)),
        (list[Point], '[{"x": 1, "default": 2}]', [Point(1, 2)]),
        (Named, '{"name": "a", "at": {"x": 1}}', {"name": "a", "at": Point(1)}),
        (Point | None, "null", None),
        (Union[int, str], '"a"', "a"),  # noqa: UP007
        (dict[str, Colour], '{"a": "blue"}', {"a": Colour.BLUE}),
        (Open, '{"a": 1, "b": 2}', Open(a=1, b=2)),  # pyright: ignore[reportCallIssue]
    ],
)
def test_values_are_of_the_type(type_: Any, text: str, value: object) -> None:
    assert is_type(type_)
    found = value_of(type_, text)
    assert (found, type(found)) == (value, type(value))
    assert json.loads(SamplingParams(json_schema=type_).json_schema or "") == schema_of(type_)
    with pytest.raises(pydantic.ValidationError):
        value_of(type_, '{"nothing": "of it"}' if type_ is not dict[str, Colour] else "[]")


def test_objects_have_the_names_of_their_fields_alone() -> None:
    schema = schema_of(list[Named])
    assert schema["items"] == {"$ref": "#/$defs/Named"}
    assert [each["additionalProperties"] for each in schema["$defs"].values()] == [False, False]
    # A field called `default` is a field, and a class that allows more says so.
    assert set(schema["$defs"]["Point"]["properties"]) == {"x", "default"}
    assert schema_of(list[Open])["$defs"]["Open"]["additionalProperties"] is True


@pytest.mark.parametrize("schema", ["{}", {"type": "object"}, None])
def test_schemas_are_no_types(schema: object) -> None:
    assert not is_type(schema)


@pytest.mark.parametrize("type_", [threading.Event, list[threading.Event], list["Missing"]])  # noqa: F821 # pyright: ignore[reportUndefinedVariable]
def test_types_without_a_schema_are_refused_in_words(type_: Any) -> None:
    with pytest.raises(ConfigError, match="has no JSON schema"):
        SamplingParams(json_schema=type_)
