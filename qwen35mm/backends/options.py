"""Checks the options of backends."""

from __future__ import annotations

from typing import Any

from qwen35mm.errors import ConfigError


def check_options(**given: tuple[Any, type]) -> None:
    """Raises ConfigError for an option that is neither None nor an instance of its class."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind | None):
            raise ConfigError(f"{name} must be {kind.__name__}, or None; got {value!r}.")
