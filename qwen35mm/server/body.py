"""The bodies of requests: how much is taken, from one sender and from all together, for how long, and as what."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request

from qwen35mm.server.errors import RETRY_AFTER_S, ApiError, invalid
from qwen35mm.server.guards import App, Receive, Scope, Send

# A video of 512 MiB, as base64.
MAX_BODY_BYTES = 700 * 2**20
# A sender that stalls holds memory.
BODY_TIMEOUT_S = 120.0
# Each value takes some 60 bytes as Python's, where three in the body are enough: a small body could fill the memory.
MAX_VALUES = 1_000_000
# Of all requests that are being answered. Small bodies come through whatever the large ones take.
MAX_HELD_BYTES = 2 * 2**30
_SMALL_BYTES = 2**20
_OBJECT = TypeAdapter(dict[str, Any], config=ConfigDict(allow_inf_nan=False))

M = TypeVar("M", bound=BaseModel)


class BodyLimits:
    """ASGI middleware: a body that is too large, or one too many of the large ones, is an ApiError when it is read.

    Args:
        max_bytes: of one body.
        max_held_bytes: of all bodies of requests that aren't answered yet.
    """

    def __init__(
        self,
        app: App,
        max_bytes: int = MAX_BODY_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = 0
        announced = _announced(scope)

        async def counted() -> MutableMapping[str, Any]:
            nonlocal num_bytes
            # One that says how long it is is refused before it is sent.
            self._check(max(announced, num_bytes), announced - num_bytes)
            message = await receive()
            new = len(message.get("body", b""))
            num_bytes += new
            self._held_bytes += new
            self._check(num_bytes, 0)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= num_bytes

    def _check(self, num_bytes: int, missing_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            most = f"{self._max_bytes / 2**20:,.0f} MiB"
            raise ApiError(413, f"The body is too large: at most {most} are taken.", code="too_large")
        if num_bytes > _SMALL_BYTES and self._held_bytes + missing_bytes > self._max_held_bytes:
            message = "Too much is being sent at this moment. Try again in a while."
            raise ApiError(429, message, code="too_much_at_once", headers={"retry-after": str(RETRY_AFTER_S)})


def _announced(scope: Scope) -> int:
    """Bytes of the body by its Content-Length; 0 where it has none."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(lengths[0]) if lengths and lengths[0].isdigit() and len(lengths[0]) < 20 else 0


async def read_bytes(request: Request) -> bytearray:
    """The body of a request, as it came.

    Raises:
        ApiError: it is packed, too large, or comes too slowly.
        ClientDisconnect: the client hung up before its end.
    """
    if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        # What is unpacked may be a thousand times as much.
        raise ApiError(415, "A body must be sent plain, without a Content-Encoding.", code="unsupported_encoding")
    body = bytearray()
    try:
        with anyio.fail_after(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
    except TimeoutError:
        raise ApiError(408, f"The body didn't come within {BODY_TIMEOUT_S:.0f} seconds.", code="timeout") from None
    if body.count(b",") > MAX_VALUES:
        raise ApiError(413, f"The body holds too many values: at most {MAX_VALUES:,} are taken.", code="too_large")
    return body


async def read_body(request: Request, model: type[M], prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> M:
    """What the body of a request says.

    Raises:
        ApiError: as `read_bytes`; and it is no JSON object, or a field of it can't be used.
    """
    body = await read_bytes(request)
    try:
        values = _OBJECT.validate_json(body)
        del body
        return model.model_validate(prepare(values))
    except ValidationError as error:
        raise invalid(error) from None
