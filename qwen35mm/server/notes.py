"""What the server ignores or translates in a request: a header tells the client, the log tells the owner.

A request is refused only if the answer would mean something else and the server can't do what is asked. With
`--strict-fields`, everything that would be noted is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from qwen35mm.server.errors import ApiError

logger = logging.getLogger(__name__)

HEADER = "x-qwen35mm-notes"
UNKNOWN = "isn't a known field"
UNSUPPORTED = "isn't supported here"
# Limits for the header: proxies refuse long ones.
_MAX_NOTES = 20
_MAX_CHARS = 120
# Distinct notes that are logged; each is logged once.
_MAX_LOGGED = 500
_logged: set[str] = set()


class Notes:
    """The notes on one request.

    Args:
        strict: whether the first note refuses the request instead.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._notes: dict[str, None] = {}

    def ignore(self, place: str, why: str = UNKNOWN) -> None:
        """Notes that a part of the request has no effect.

        Args:
            place: its path in the request.
            why: goes on after `place`.

        Raises:
            ApiError: 400, if strict.
        """
        if self._strict:
            code = "unknown_field" if why == UNKNOWN else "unsupported_field"
            raise ApiError(400, f"{place[:_MAX_CHARS]} {why}. Leave it out.", place, code)
        self._add(f"{place[:_MAX_CHARS]} {why}; ignored")

    def change(self, place: str, what: str) -> None:
        """Notes that a part of the request is read as something else: `what` goes on after `place`.

        Raises:
            ApiError: 400, if strict.
        """
        if self._strict:
            raise ApiError(400, f"{place[:_MAX_CHARS]} {what}. Strict requests can't have it.", place)
        self._add(f"{place[:_MAX_CHARS]} {what}")

    def ignore_rest(self, given: Iterable[str], known: Iterable[str], place: str) -> None:
        """Notes all names in `given` that aren't `known`; `place` is the path of what has them."""
        for name in sorted(set(given) - set(known)):
            self.ignore(f"{place}.{name}" if place else name)

    def ignore_extras(self, model: BaseModel, place: str = "") -> None:
        """Notes the unknown fields of a validated body that allows them, and of everything in it. Nulls ask nothing."""
        self.ignore_rest((name for name, value in (model.model_extra or {}).items() if value is not None), (), place)
        for name, field in type(model).model_fields.items():
            self._ignore_extras_in(getattr(model, name), ".".join(filter(None, (place, field.alias or name))))

    def _ignore_extras_in(self, value: Any, place: str) -> None:
        if isinstance(value, BaseModel):
            self.ignore_extras(value, place)
        elif isinstance(value, list):
            for at, each in enumerate(value):
                self._ignore_extras_in(each, f"{place}.{at}")

    def _add(self, note: str) -> None:
        # A request of a stranger can have thousands.
        if len(self._notes) <= _MAX_NOTES:
            self._notes[note] = None

    @property
    def header(self) -> str:
        """The header's value, in ASCII; empty if there is nothing to say."""
        told = [note.encode("ascii", "replace").decode() for note in self._notes]
        told = [re.sub(r"[^ -~]", "?", note) for note in told]
        # Servers refuse a value with a space at its beginning or end: a client's field can be named so.
        return " | ".join([*told[:_MAX_NOTES], *(["and more"] if len(told) > _MAX_NOTES else [])]).strip()

    def log(self, path: str) -> None:
        """Logs each kind of note once for the process."""
        for note in self._notes:
            kind = f"{path}: {re.sub(r'[.][0-9]+', '', note)!r}"
            if kind not in _logged and len(_logged) < _MAX_LOGGED:
                _logged.add(kind)
                logger.info("%s", kind)


def notes_of(request: Request) -> Notes:
    """The notes on a request that is being answered."""
    notes: Notes = request.state.notes
    return notes
