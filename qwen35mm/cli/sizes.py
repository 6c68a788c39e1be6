"""Sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

import typer

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
# Twelve digits and three after the point say all that is of use, and are quickly read.
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,3})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "8GiB", "8G" (the same), "8GB" (of 1,000 MB), "0.5 GiB", "1000000" or "0".

    Raises:
        typer.BadParameter: it is no such size.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise typer.BadParameter(f"expected a size such as 8GiB, 500MB or 0; got '{text}'.")
    return int(Decimal(found[1]) * unit)
