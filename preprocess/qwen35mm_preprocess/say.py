"""Messages for users: keeps texts apart from their values, so that a page can translate both.

An error can take the result of `say` as its first argument. Its `str` is the English sentence, for terminals and logs:

    raise MediaLimitError(say("{name} has {n} {n|frame|frames}. Cut it.", name=name, n=num_frames))

A text has a `{name}` for each value. `{n|one form|another}` selects a word by a number. It has one form for each plural
category of the text's language (English: one, other), in the CLDR's order zero, one, two, few, many, other.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

# A text with its values, a single value, or a name that is never translated; JSON values for `said` in words.js.
Said = dict[str, Any] | str | int

# A placeholder in a text.
PLACE = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")
# Limits for messages in imported conversations.
MAX_DEPTH = 8
MAX_CHARS = 20_000


class Saying(dict[str, Any]):
    """A text with its values, as in JSON. Its `str` is English."""

    def __str__(self) -> str:
        return english(self)

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(json.dumps(self, sort_keys=True))


def say(text: str, **values: Said) -> Saying:
    """A message for a user, translated in every file of assets/web/languages.

    Args:
        text: English, with a `{name}` for each value. It must be a literal, so that tests find it.
        values: an integer, a name that is not translated, or a result of `decimal`, `percent`, `size` or `say`.
    """
    return Saying(text=text, values=values)


def decimal(number: float, num_digits: int | None = None) -> dict[str, Any]:
    """A number with `num_digits` digits after the point; None means as many as needed, up to three.

    Raises:
        ValueError: it is not finite.
    """
    return {"number": _finite(number), "digits": num_digits}


def percent(share: float) -> dict[str, Any]:
    """A share of 1 in percent, such as 50%. Raises ValueError if it is not finite."""
    return {"share": _finite(share)}


def size(num_bytes: float) -> dict[str, Any]:
    """A size in bytes, shown as 18 MiB for example. Raises ValueError if it is not finite."""
    return {"bytes": _finite(num_bytes)}


def tokens(number: int) -> Said:
    """A number of tokens."""
    return say("no tokens") if number == 0 else say("{n} {n|token|tokens}", n=number)


def said_of(error: BaseException) -> Said:
    """An error's message: its `say` value if it has one, else its English text."""
    first = error.args[0] if error.args else None
    return first if isinstance(first, dict) else str(error)


def english(words: Said) -> str:
    """The message in English, as the page shows it. Only halves may round differently."""
    if isinstance(words, str):
        return words
    if isinstance(words, int):
        return f"{words:,}"
    if "text" in words:
        return PLACE.sub(lambda place: _fill(place, words["values"]), words["text"])
    if "number" in words:
        return _number(words["number"], words["digits"])
    return f"{words['share']:.0%}" if "share" in words else _size(words["bytes"])


def renamed(words: Said, rename: Callable[[str], str]) -> Said:
    """The message with `rename` applied to its names."""
    if isinstance(words, str):
        return rename(words)
    if isinstance(words, dict) and "text" in words:
        values = {name: renamed(value, rename) for name, value in words["values"].items()}
        return Saying(text=words["text"], values=values)
    return words


def is_said(words: object, depth: int = 0) -> bool:
    """Whether untrusted data has the form of a `Said` value."""
    if isinstance(words, str):
        return len(words) <= MAX_CHARS
    if isinstance(words, int):
        return not isinstance(words, bool)
    if not isinstance(words, Mapping) or depth == MAX_DEPTH:
        return False
    if words.keys() == {"text", "values"}:
        text, values = words["text"], words["values"]
        if not (isinstance(text, str) and len(text) <= MAX_CHARS and isinstance(values, Mapping)):
            return False
        names = {place[1] for place in PLACE.finditer(text)}
        return names <= values.keys() and all(is_said(value, depth + 1) for value in values.values())
    if words.keys() == {"number", "digits"}:
        return _is_finite(words["number"]) and words["digits"] in (None, *range(10))
    return words.keys() in ({"share"}, {"bytes"}) and _is_finite(*words.values())


def _fill(place: re.Match[str], values: Mapping[str, Said]) -> str:
    value = values[place[1]]
    if place[2] is None:
        return english(value)
    forms = place[2].split("|")
    return forms[0] if value == 1 else forms[-1]


def _number(number: float, num_digits: int | None) -> str:
    if num_digits is not None:
        return f"{number:,.{num_digits}f}"
    return f"{number:,.3f}".rstrip("0").rstrip(".")


def _size(num_bytes: float) -> str:
    if num_bytes < 1024:
        return "1 byte" if num_bytes == 1 else f"{num_bytes:,.0f} bytes"
    amount, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if amount >= 1024:
            amount, unit = amount / 1024, larger
    return f"{amount:,.1f} {unit}" if amount < 10 else f"{amount:,.0f} {unit}"


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number}")
    return number


def _is_finite(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
