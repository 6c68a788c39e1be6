"""What the tests of JSON replies share: schemas, requests that follow them, and the judge of replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema

from qwen35mm.contract import Result, SamplingParams
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.model import LoadedModel
from tests.engine.exact import cache_settings

SHORT: dict[str, Any] = {"type": "string", "maxLength": 12}


def record(properties: dict[str, Any], required: Sequence[str] | None = None, **more: Any) -> dict[str, Any]:
    required = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


CAPTION = record({"caption": SHORT, "tags": {"type": "array", "items": SHORT, "maxItems": 3}})
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": CAPTION,
    "nested": record({"box": record({"corner": record({"x": {"type": "integer"}, "y": {"type": "integer"}})})}),
    "enum": {"enum": ["photo", "drawing", "photograph", 7, None, {"a": [1.5]}]},
    "const": record({"kind": {"const": 'a/b "quoted" \\ \n é 日本 😀'}}),
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [SHORT, {"type": "null"}], "items": False, "minItems": 2},
    "numbers": record({"share": {"type": "number", "minimum": 0, "maximum": 1}, "any": {"type": "number"}}),
    "integers": record({"year": {"type": "integer", "exclusiveMinimum": 1899, "maximum": 2100}}),
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10_000},
    "any of": {"anyOf": [{"type": "integer"}, SHORT, record({"a": {"type": "null"}})]},
    "one of": {"oneOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "all of": {"allOf": [record({"a": SHORT, "b": SHORT}), {"properties": {"b": {"minLength": 4}}}]},
    "optional": record({"a": SHORT, "b": {"type": "integer"}, "c": SHORT}, required=["b"]),
    "nullable": record({"a": {"type": ["string", "null"], "maxLength": 5}}),
    "lengths": {"type": "string", "minLength": 5, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}(é|😀)$"},
    "date": {"type": "string", "format": "date"},
    "keys by pattern": {"type": "object", "patternProperties": {"^x_[a-z]$": {"type": "integer"}}, "required": ["x_a"]}
    | {"additionalProperties": False, "maxProperties": 1},
    "reference": {"$defs": {"name": SHORT}, **record({"a": {"$ref": "#/$defs/name"}, "b": {"$ref": "#/$defs/name"}})},
    "tree": {
        "$defs": {"t": record({"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/t"}}, ["v"])},
        "$ref": "#/$defs/t",
    },
    "free keys": {
        "type": "object",
        "properties": {"a\nb": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    },
    "anything": {},
}

TOO_MUCH = "checking it takes more than"
# Each takes minutes, gigabytes or the process itself, or is beyond what can be followed; and how it is refused.
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "patterns in allOf": (
        {"type": "string", "allOf": [{"pattern": f".*a{i}.{{50}}b"} for i in range(1, 40)]},
        TOO_MUCH,
    ),
    "choices in allOf": (
        {"allOf": [{"anyOf": [{"type": "string", "pattern": f".*{i}x{j}.*"} for j in range(4)]} for i in range(12)]},
        "schema too large",
    ),
    "keys by pattern": (
        {"type": "object", "patternProperties": {f"^x{i}_.*$": {"type": "null"} for i in range(900)}},
        TOO_MUCH,
    ),
    "multiples": ({"type": "integer", "multipleOf": 10_000_019}, TOO_MUCH),
    "a chain of arrays": (
        {"d": {f"{i:x}": {"items": {"$ref": f"#/d/{i + 1:x}"}} for i in range(1500)} | {"5dc": {}}, "$ref": "#/d/0"},
        TOO_MUCH,
    ),
    "parentheses": ({"type": "string", "pattern": "(" * 20_000 + "a" + ")" * 20_000}, "regex"),
    "optional properties": (
        record({f"p{i}": {"type": "string", "pattern": f"^[a-z]{{3,20}}{i}x+$"} for i in range(900)}, []),
        "too many properties or choices may come next",
    ),
    "a circle of objects": (
        {"$defs": {f"{i:x}": record({"a": {"$ref": f"#/$defs/{(i + 1) % 400:x}"}}) for i in range(400)}}
        | {"$ref": "#/$defs/0"},
        "without end",
    ),
}


def params(schema: dict[str, Any] | None, **options: Any) -> SamplingParams:
    text = None if schema is None else json.dumps(schema)
    return SamplingParams(**{"temperature": 1.5, "seed": 0, "max_tokens": 150, "json_schema": text, **options})


def check(result: Result, schema: dict[str, Any]) -> bool:
    """Whether the reply came to its end, in which case it satisfies the schema."""
    if result.finish_reason == "length":
        return False
    value = json.loads(result.text)
    jsonschema.Draft202012Validator(schema).validate(value)
    return True


def engine_of(loaded: LoadedModel, **options: Any) -> Engine:
    settings = EngineSettings(**{"context_length": 512, "chunk_tokens": 64, "slots": 4, **options})
    return Engine(loaded, settings, cache_settings(loaded))
