"""Command-line options from dataclasses, and parsers of their values. Imports no library of a model."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, get_type_hints

import typer

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
# At most twelve digits and three decimals, so that parsing stays quick.
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,3})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)

_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_size(text: str) -> int:
    """Bytes of "8GiB", "8G" (the same), "8GB" (of 1,000 MB), "0.5 GiB", "1000000" or "0".

    Raises:
        typer.BadParameter: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise typer.BadParameter(f"expected a size such as 8GiB, 500MB or 0; got '{text}'.")
    return int(Decimal(found[1]) * unit)


def parse_time(text: str) -> float | None:
    """Seconds of "10m", "1.5h", "30s", "90" or "0"; None for "never", and for -1 as Ollama writes it.

    Raises:
        typer.BadParameter: it is no time.
    """
    if text.strip().lower() in ("never", "-1"):
        return None
    found = _TIME.fullmatch(text.strip().lower())
    if found is None:
        raise typer.BadParameter(f"expected a time such as 10m, 30s, 2h, 0 or never; got '{text}'.")
    return float(found[1]) * _SECONDS[found[2]]


class Logins(tuple[tuple[str, str], ...]):
    """Names and passwords. A class, because typer takes no nested types."""


def parse_logins(text: str) -> Logins:
    """Names and passwords of `name:password` pairs, separated by lines or commas.

    Raises:
        typer.BadParameter: a pair is malformed. The message repeats no pair.
    """
    pairs = []
    for entry in re.split(r"[\n,]", text):
        if not entry.strip():
            continue
        name, colon, password = entry.strip().partition(":")
        if not (name and colon and password):
            raise typer.BadParameter(
                f"expected name:password pairs, separated by lines or commas; pair {len(pairs) + 1} isn't one. "
                "A password may contain colons, but no commas."
            )
        pairs.append((name, password))
    if text.strip() and not pairs:
        raise typer.BadParameter("it has no name:password pair; leave it empty to let everybody in.")
    if len({name for name, _ in pairs}) < len(pairs):
        raise typer.BadParameter("a name appears twice; give each person another name.")
    return Logins(pairs)


class Names(tuple[str, ...]):
    """Texts without commas. A class, because typer takes no tuples of any length."""


def parse_names(text: str) -> Names:
    """The texts that are separated by commas or white space."""
    return Names(re.split(r"[\s,]+", text.strip(" ,\n"))) if text.strip(" ,\n") else Names()


def parse_json_options(texts: Iterable[str]) -> dict[str, Any]:
    """Names and values of `name=value` texts. A value that isn't JSON is a string.

    Raises:
        typer.BadParameter: a text has no name or no value.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not (name.strip() and mark and value):
            raise typer.BadParameter(f"expected NAME=VALUE, such as preserve_thinking=true; got '{text}'.")
        try:
            values[name.strip()] = json.loads(value)
        except (ValueError, RecursionError):
            values[name.strip()] = value
    return values


def parse_token(text: str) -> str:
    """A token of the page's address; "" for "none".

    Raises:
        typer.BadParameter: it is no valid token. The message doesn't repeat it.
    """
    if text == "none":
        return ""
    if not re.fullmatch(r"[A-Za-z0-9._~-]{8,200}", text):
        raise typer.BadParameter("expected at least 8 letters, digits or any of . _ ~ - or the word none.")
    return text


def parse_folder(text: str) -> Path:
    """A folder. Expands "~", which no shell does in a variable."""
    folder = Path(text)
    try:
        return folder.expanduser()
    except RuntimeError:  # there is no such user
        return folder


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces each parameter of a command whose type is a dataclass of options by one option a field.

    If the class has an ENVIRONMENT, each option is also a variable with that prefix.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: each.annotation for name, each in signature.parameters.items() if is_dataclass(each.annotation)
    }
    own = [parameter for name, parameter in signature.parameters.items() if name not in groups]
    added = []
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        prefix = getattr(group, "ENVIRONMENT", None)
        for each in fields(group):
            option = hints[each.name].__metadata__[0]
            if prefix:
                option.envvar = f"{prefix}{each.name.upper()}"
            kind = inspect.Parameter.KEYWORD_ONLY
            added.append(inspect.Parameter(each.name, kind, default=each.default, annotation=hints[each.name]))

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        made = {
            name: group(**{each.name: values.pop(each.name) for each in fields(group)})
            for name, group in groups.items()
        }
        return command(**values, **made)

    run.__signature__ = signature.replace(parameters=[*own, *added])  # pyright: ignore[reportAttributeAccessIssue]
    return run
