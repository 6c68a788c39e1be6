"""What Python says on the page: texts apart from their values, both to be written in the person's language.

Messages of errors and the notes of a media plan are plain English strings.
"""

from __future__ import annotations

import math
from typing import Any

# A text with its values, a value by itself, or a name that stays as it is; JSON values for `said` in words.js.
Said = dict[str, Any] | str | int


def say(text: str, **values: Said) -> dict[str, Any]:
    """A text for the page; every language in assets/web/languages has it.

    Args:
        text: in English, with a `{name}` for each value; written out in the call, where the tests find it.
        values: a whole number, a string that is no words but a name, what `decimal`, `percent` or `size` make of a
            number, or what another `say` says.
    """
    return {"text": text, "values": values}


def decimal(number: float, num_digits: int) -> dict[str, Any]:
    """A number with so many digits after the point.

    Raises:
        ValueError: it is not finite.
    """
    return {"number": _finite(number), "digits": num_digits}


def percent(share: float) -> dict[str, Any]:
    """A share of 1 in percent, such as 50%. Raises ValueError where it is not finite."""
    return {"share": _finite(share)}


def size(num_bytes: float) -> dict[str, Any]:
    """A size for a person, such as 18 MiB. Raises ValueError where it is not finite."""
    return {"bytes": _finite(num_bytes)}


def tokens(number: int) -> Said:
    """A number of tokens; none and one have words of their own, since languages count them differently."""
    if number == 0:
        return say("no tokens")
    return say("1 token") if number == 1 else say("{n} tokens", n=number)


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number}")
    return number
