"""Reading request bodies."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request

from qwen35mm.http.bodies import read_bytes
from qwen35mm.outside_json import num_objects
from qwen35mm.pools import REQUESTS
from qwen35mm.server.errors import ApiError, invalid
from qwen35mm.server.notes import Notes, notes_of

_OBJECT = TypeAdapter(dict[str, Any], config=ConfigDict(allow_inf_nan=False))

_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u([dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)
_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 32_768
# Each message, part, block, item and call is one or two. Numbers are cheap; these are read one by one.
MAX_OBJECTS = 100_000

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
        ApiError: it isn't a JSON object, or has too many in it.
    """
    body = await read_bytes(request)
    if body.count(b"{") > MAX_OBJECTS and await REQUESTS.run(num_objects, body) > MAX_OBJECTS:
        message = f"The body holds too many objects: at most {MAX_OBJECTS:,} are taken."
        raise ApiError(413, message, code="too_large")
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
        whole = await REQUESTS.run(mended, body)
        if whole is None:
            raise
    values = _OBJECT.validate_json(whole)
    notes.change("the body", "has damaged characters, which were replaced")
    return values


def mended(body: bytes | bytearray) -> bytearray | None:
    """A body of JSON whose lone surrogates and foreign bytes are replacement characters, without a byte order mark.

    None if it has none of these; nothing is copied then.
    """
    is_text = _is_utf8(body)
    if is_text and not body.startswith(_MARK) and next(_lone_surrogates(body), None) is None:
        return None
    whole = bytearray(body if is_text else body.decode("utf-8", "replace").encode())
    whole = whole.removeprefix(_MARK)
    for at in _lone_surrogates(bytes(whole)):
        whole[at : at + 6] = b"\\ufffd"
    return whole


def _lone_surrogates(body: bytes | bytearray) -> Iterator[int]:
    """Where the escapes of halves of a pair begin."""
    return (found.start() for found in _ESCAPE.finditer(body) if found[1])


def _is_utf8(body: bytes | bytearray) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for at in range(0, len(body), _CHUNK_BYTES):
            decoder.decode(body[at : at + _CHUNK_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True
