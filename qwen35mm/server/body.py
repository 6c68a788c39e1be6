"""Reading request bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request

from qwen35mm.http.bodies import read_bytes
from qwen35mm.pools import REQUESTS
from qwen35mm.server.errors import invalid
from qwen35mm.server.history import mended
from qwen35mm.server.notes import Notes, notes_of

_OBJECT = TypeAdapter(dict[str, Any], config=ConfigDict(allow_inf_nan=False))

M = TypeVar("M", bound=BaseModel)


async def read_body(
    request: Request, model: type[M], prepare: Callable[[dict[str, Any], Notes], dict[str, Any]] | None = None
) -> M:
    """Reads and validates the body of a request. Arguments and errors as `read_object` and `validated`."""
    return validated(await read_object(request), model, notes_of(request), prepare)


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object that a request's body holds.

    Raises:
        HttpError: as `read_bytes`.
        ApiError: it isn't a JSON object.
    """
    body = await read_bytes(request)
    try:
        return await _object(body, notes_of(request))
    except ValidationError as error:
        raise invalid(error) from None


def validated(
    values: dict[str, Any],
    model: type[M],
    notes: Notes,
    prepare: Callable[[dict[str, Any], Notes], dict[str, Any]] | None = None,
) -> M:
    """Validates a body. Unknown fields are noted.

    Args:
        prepare: translates a body before it is validated.

    Raises:
        ApiError: a field can't be used.
    """
    try:
        read = model.model_validate(values if prepare is None else prepare(values, notes))
    except ValidationError as error:
        raise invalid(error) from None
    notes.ignore_extras(read)
    return read


async def _object(body: bytes | bytearray, notes: Notes) -> dict[str, Any]:
    """The object that a body holds. Damaged characters don't end a conversation that has them."""
    try:
        return _OBJECT.validate_json(body)
    except ValidationError:
        # In a thread: it may be large.
        whole = await REQUESTS.run(mended, bytes(body))
        if whole == body:
            raise
    values = _OBJECT.validate_json(whole)
    notes.change("the body", "has damaged characters, which were replaced")
    return values
