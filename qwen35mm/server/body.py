"""Reading request bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request

from qwen35mm.http.bodies import read_bytes
from qwen35mm.server.errors import invalid
from qwen35mm.server.notes import Notes, notes_of

_OBJECT = TypeAdapter(dict[str, Any], config=ConfigDict(allow_inf_nan=False))

M = TypeVar("M", bound=BaseModel)


async def read_body(
    request: Request, model: type[M], prepare: Callable[[dict[str, Any], Notes], dict[str, Any]] | None = None
) -> M:
    """Reads and validates the body of a request. Unknown fields are noted.

    Args:
        prepare: translates a body before it is validated.

    Raises:
        HttpError: as `read_bytes`.
        ApiError: it isn't a JSON object, or a field of it can't be used.
    """
    body = await read_bytes(request)
    try:
        values = _OBJECT.validate_json(body)
        del body
        notes = notes_of(request)
        read = model.model_validate(values if prepare is None else prepare(values, notes))
    except ValidationError as error:
        raise invalid(error) from None
    notes.ignore_extras(read)
    return read
