"""What texts without a template may come as."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from qwen35mm.prompt.outside import MAX_OUTSIDE_CHARS
from qwen35mm.server.errors import ApiError

MAX_INPUTS = 2048

_Text = Annotated[str, Field(max_length=MAX_OUTSIDE_CHARS)]
_Ids = Annotated[list[int], Field(min_length=1, max_length=MAX_OUTSIDE_CHARS)]
# One text, or one as token ids; several of either.
Inputs = (
    _Text
    | Annotated[list[_Text], Field(min_length=1, max_length=MAX_INPUTS)]
    | _Ids
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_INPUTS)]
)


def inputs_of(given: Any, name: str) -> list[str | list[int]]:
    """Each of them.

    Raises:
        ApiError: 400, one has no text.
    """
    is_one = isinstance(given, str) or isinstance(given[0], int)
    found: list[str | list[int]] = [given] if is_one else list(given)
    for at, each in enumerate(found):
        if not each:
            raise ApiError(400, f"{name} {at + 1} is empty.", name)
    return found
