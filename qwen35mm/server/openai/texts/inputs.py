"""Input forms of the routes without a template."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from qwen35mm.prompt.outside import MAX_OUTSIDE_CHARS
from qwen35mm.server.errors import ApiError

MAX_INPUTS = 2048

_Text = Annotated[str, Field(max_length=MAX_OUTSIDE_CHARS)]
_Ids = Annotated[list[int], Field(min_length=1, max_length=MAX_OUTSIDE_CHARS)]
# A text, token ids, or a list of either.
Inputs = (
    _Text
    | Annotated[list[_Text], Field(min_length=1, max_length=MAX_INPUTS)]
    | _Ids
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_INPUTS)]
)


def inputs_of(given: Any, name: str) -> list[str | list[int]]:
    """The inputs as a list.

    Raises:
        ApiError: 400, an input is empty.
    """
    is_one = isinstance(given, str) or isinstance(given[0], int)
    found: list[str | list[int]] = [given] if is_one else list(given)
    for at, each in enumerate(found):
        if not each:
            raise ApiError(400, f"{name} {at + 1} is empty.", name)
    return found
