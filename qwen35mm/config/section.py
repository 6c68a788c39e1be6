"""Typed reading of one object of config.json, with errors that name the key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen35mm.errors import ConfigError

_MAX_CHARS = 500
# Larger than any model's sizes, and small enough for floats and tensors.
_MAX_INTEGER = 1 << 40


@dataclass(frozen=True)
class Section:
    """One object of config.json; `name` is its prefix in error messages."""

    name: str
    data: Mapping[str, Any]

    def error(self, key: str, what: str) -> ConfigError:
        # The value may be as long as the file.
        shown = what if len(what) <= _MAX_CHARS else f"{what[:_MAX_CHARS]}..."
        return ConfigError(f"config.json: {self.name}{key} {shown}")

    def value(self, key: str) -> Any:
        if self.data.get(key) is None:
            raise self.error(key, "is missing.")
        return self.data[key]

    def section(self, key: str) -> Section:
        value = self.value(key)
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object; got {value!r}.")
        return Section(f"{self.name}{key}.", value)

    def integer(self, key: str, minimum: int = 1) -> int:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_INTEGER:
            raise self.error(key, f"must be an integer from {minimum} to {_MAX_INTEGER}; got {value!r}.")
        return value

    def integers(self, *keys: str) -> dict[str, int]:
        return {key: self.integer(key) for key in keys}

    def number(self, key: str) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.error(key, f"must be a number above 0; got {value!r}.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if not isinstance(value, bool | None):
            raise self.error(key, f"must be true or false; got {value!r}.")
        return default if value is None else value

    def require_multiple(self, many: str, few: str) -> None:
        if self.integer(many) % self.integer(few):
            raise self.error(many, f"({self.data[many]}) must be a multiple of {few} ({self.data[few]}).")

    def require_empty(self, key: str) -> None:
        if self.data.get(key):
            raise self.error(key, "must be empty: it isn't supported.")

    def require(self, key: str, wanted: Any, *, default: Any) -> None:
        """Refuses any value of `key` but `wanted`; a missing key counts as `default`."""
        value = self.data.get(key, default)
        if value != wanted:
            raise self.error(key, f"is {value!r}; only {wanted!r} is supported.")
