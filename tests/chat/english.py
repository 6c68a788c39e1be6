"""What `said` of words.js writes on an English page, for tests without a browser."""

from __future__ import annotations

from typing import Any


def english(words: Any) -> str:
    """A said text as an English page shows it; only a half is rounded another way."""
    if isinstance(words, str):
        return words
    if isinstance(words, int):
        return f"{words:,}"
    if "text" in words:
        return words["text"].format(**{name: english(value) for name, value in words["values"].items()})
    if "number" in words:
        return f"{words['number']:,.{words['digits']}f}"
    return f"{words['share']:.0%}" if "share" in words else _size(words["bytes"])


def _size(num_bytes: float) -> str:
    if num_bytes < 1024:
        return "1 byte" if num_bytes == 1 else f"{num_bytes:,.0f} bytes"
    amount, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if amount >= 1024:
            amount, unit = amount / 1024, larger
    return f"{amount:,.1f} {unit}" if amount < 10 else f"{amount:,.0f} {unit}"
