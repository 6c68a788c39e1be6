"""Numbers of things, in words."""

from __future__ import annotations


def amount(number: int, noun: str) -> str:
    """Such as `1 file` and `1,000 files`, for a noun whose plural has an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
