"""JSON captions: reads their JSON schema from a file and checks every caption against it.

The engine's constrained decoding follows the schema; this checks the result independently, with the library
`jsonschema`. Both come with the extra `schema`.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35mm.errors import CaptioningError, MissingExtraError

# The oldest drafts use the same keywords with other meanings.
_UNKNOWN_DRAFTS = ("draft-03",)


@dataclass(frozen=True)
class JsonSchema:
    """A JSON schema.

    Attributes:
        text: compact JSON, properties in their order; for `SamplingParams.json_schema`.
    """

    text: str

    @classmethod
    def read(cls, source: Path | str) -> JsonSchema:
        """Reads a schema from a file, or from its JSON text.

        Raises:
            CaptioningError: the file can't be read, or doesn't contain a JSON schema.
            MissingExtraError: jsonschema isn't installed.
        """
        name = source.name if isinstance(source, Path) else "The JSON schema"
        try:
            text = source.read_text(encoding="utf-8-sig") if isinstance(source, Path) else source
            schema = _load(text)
            compact = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
            compact.encode()
        except OSError as error:
            raise CaptioningError(f"{name} can't be read ({error.strerror}).") from error
        except (ValueError, RecursionError) as error:
            raise CaptioningError(f"{name} must hold a JSON schema; it can't be read as JSON ({error}).") from error
        if not isinstance(schema, dict):
            raise CaptioningError(f"{name} must hold a JSON object; got {type(schema).__name__}.")
        _check_schema(name, schema)
        return cls(compact)

    def parse(self, text: str) -> Any:
        """The value of a reply's JSON text.

        Raises:
            CaptioningError: it isn't JSON, doesn't satisfy the schema, or can't be stored: an infinite number, or half
                a surrogate pair.
        """
        from jsonschema.exceptions import best_match
        from referencing.exceptions import Unresolvable

        try:
            value = _load(text)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            error = best_match(_validator(self.text).iter_errors(value))
        except Unresolvable as problem:
            raise CaptioningError(f"The schema refers to {problem.ref!r}, which isn't in it.") from problem
        except RecursionError as problem:
            raise CaptioningError("The caption is nested too deeply to be checked against the schema.") from problem
        except ValueError as problem:
            raise CaptioningError(f"The caption isn't JSON that can be kept ({problem}).") from problem
        if error is not None:
            raise CaptioningError(f"The caption doesn't satisfy the schema: {error.json_path}: {error.message[:200]}.")
        return value


@functools.lru_cache(maxsize=4)
def _validator(text: str) -> Any:
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = json.loads(text)
    # An empty registry: references never fetch anything.
    return validator_for(schema)(schema, registry=Registry())


def _check_schema(name: str, schema: dict[str, Any]) -> None:
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
    except ImportError as error:
        raise MissingExtraError("Captions that satisfy a JSON schema", "schema") from error
    draft = schema.get("$schema", "")
    if not isinstance(draft, str) or any(old in draft for old in _UNKNOWN_DRAFTS):
        raise CaptioningError(f"{name} names the draft {draft!r}; draft 4 and later ones are understood.")
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise CaptioningError(f"{name} isn't a JSON schema: {error.json_path}: {error.message[:200]}.") from error
    except RecursionError as error:
        raise CaptioningError(f"{name} is nested too deeply.") from error


def _load(text: str) -> Any:
    def finite(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"the number {digits[:40]} is out of range")
        return value

    def constant(word: str) -> float:
        raise ValueError(f"{word} isn't JSON")

    return json.loads(text, parse_float=finite, parse_constant=constant)
