"""Limits on request bodies: size, memory of all together, time and form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar

import anyio
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen35mm.http.errors import HttpError
from qwen35mm.outside_json import MAX_VALUES, JsonDepthError, JsonLimitError, check_json
from qwen35mm.pools import REQUESTS
from qwen35mm_preprocess.say import say

# A video of 512 MiB, as base64.
MAX_BODY_BYTES = 700 * 2**20
# A sender that stalls holds memory.
BODY_TIMEOUT_S = 120.0
# For all requests in progress. Small bodies pass however much the large ones take.
MAX_HELD_BYTES = 2 * 2**30
# A reply takes seconds: by then the queue is shorter.
RETRY_AFTER_S = 5
_SMALL_BYTES = 2**20


# Counts bytes that a request holds besides its body.
_hold: ContextVar[Callable[[int], None] | None] = ContextVar("hold", default=None)


def hold(num_bytes: int) -> None:
    """Counts bytes that this request holds besides its body, until it is answered.

    Raises:
        HttpError: 429, all requests together hold too much.
    """
    if (count := _hold.get()) is not None:
        count(num_bytes)


class BodyLimits:
    """ASGI middleware: reading a body that is too large, or one large body too many, raises HttpError.

    Args:
        max_bytes: of one body.
        max_held_bytes: of all unanswered requests: their bodies, and what they `hold`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = other_bytes = 0
        announced = _announced(scope)

        def count(new: int) -> None:
            nonlocal other_bytes
            other_bytes += new
            self._held_bytes += new
            self._check_held(other_bytes, 0)

        async def counted() -> Message:
            nonlocal num_bytes
            # A body that announces its length is refused before it is sent.
            self._check(max(announced, num_bytes), announced - num_bytes)
            message = await receive()
            new = len(message.get("body", b""))
            num_bytes += new
            self._held_bytes += new
            self._check(num_bytes, 0)
            return message

        # Of two around each other, the outer one counts for all applications in it.
        token = _hold.set(_hold.get() or count)
        try:
            await self._app(scope, counted, send)
        finally:
            _hold.reset(token)
            self._held_bytes -= num_bytes + other_bytes

    def _check(self, num_bytes: int, missing_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        self._check_held(num_bytes, missing_bytes)

    def _check_held(self, num_bytes: int, missing_bytes: int) -> None:
        if num_bytes > _SMALL_BYTES and self._held_bytes + missing_bytes > self._max_held_bytes:
            raise HttpError(
                429,
                say("Too much is being sent at this moment. Try again in a while."),
                "too_much_at_once",
                {"retry-after": str(RETRY_AFTER_S)},
            )


def too_large(max_bytes: int) -> HttpError:
    """The error for a body of more bytes."""
    words = say("This is too large: at most {most} MiB are taken. Attach it as a file.", most=max_bytes // 2**20)
    return HttpError(413, words, "too_large")


def _announced(scope: MutableMapping[str, object]) -> int:
    """The body's Content-Length in bytes; 0 without one."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]  # pyright: ignore
    return int(lengths[0]) if lengths and lengths[0].isdigit() and len(lengths[0]) < 20 else 0


def as_body(data: bytes) -> Receive:
    """Passes a body that was already read to an inner application."""
    messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    return receive


async def read_bytes(request: Request, max_bytes: int | None = None) -> bytearray:
    """The raw body of a request.

    Raises:
        HttpError: it is compressed, too large, too slow, or holds too many values.
        ClientDisconnect: the client disconnected before the end.
    """
    if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        # Unpacked, it may be a thousand times as large.
        raise HttpError(415, say("A body must be sent plain, without a Content-Encoding."), "unsupported_encoding")
    body = bytearray()
    try:
        with anyio.fail_after(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if max_bytes is not None and len(body) > max_bytes:
                    raise too_large(max_bytes)
    except TimeoutError:
        words = say("The body didn't come within {s} seconds.", s=round(BODY_TIMEOUT_S))
        raise HttpError(408, words, "timeout") from None
    try:
        # Checking a large body takes a while, so a thread does it.
        await REQUESTS.run(check_json, body) if len(body) > _SMALL_BYTES else check_json(body)
    except JsonDepthError:
        raise HttpError(400, say("The body is nested too deeply, or cut off."), "invalid_json") from None
    except JsonLimitError:
        words = say("The body holds too many values: at most {most} are taken.", most=MAX_VALUES)
        raise HttpError(413, words, "too_large") from None
    return body
