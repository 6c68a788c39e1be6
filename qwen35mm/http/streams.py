"""Server-sent events, and whether the client is still there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive

from qwen35mm.http.ends import Ending
from qwen35mm.http.errors import HttpError
from qwen35mm_preprocess.say import say

# Proxies and clients close silent connections.
KEEP_ALIVE_S = 10.0

T = TypeVar("T")


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Runs the work for a request whose body was read; cancels it if the client disconnects or the server ends.

    Raises:
        ClientDisconnect: the client disconnected.
        HttpError: 503, the server ends.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    ending = asyncio.ensure_future(Ending.of(request.scope).event.wait())
    try:
        await asyncio.wait((task, gone, ending), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if ending.done():
            raise ends()
        raise ClientDisconnect
    finally:
        for each in (task, gone, ending):
            each.cancel()
        await asyncio.gather(task, gone, ending, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def ends() -> HttpError:
    """The error of a request that the server's end cuts off."""
    return HttpError(503, say("The program is being ended. Ask again when it runs."), "shutting_down")


def body_until_the_end(scope: Mapping[str, Any], receive: Receive) -> Receive:
    """Receives a request's body. Raises HttpError (503) if the server ends first."""
    is_whole = False

    async def received() -> Message:
        nonlocal is_whole
        if is_whole:
            return await receive()
        message = await until_ending(scope, receive())
        is_whole = not message.get("more_body", False)
        return message

    return received


async def until_ending(scope: Mapping[str, Any], work: Awaitable[T]) -> T:
    """Runs the work. If the server ends, cancels it and raises HttpError (503)."""
    task = asyncio.ensure_future(work)
    ending = asyncio.ensure_future(Ending.of(scope).event.wait())
    try:
        await asyncio.wait((task, ending), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ends()
        return task.result()
    finally:
        task.cancel()
        ending.cancel()
        await asyncio.gather(task, ending, return_exceptions=True)


async def until_the_end(scope: Mapping[str, Any], stream: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Passes a stream on. Raises HttpError (503) if the server ends."""
    while True:
        try:
            item = await until_ending(scope, anext(stream))
        except StopAsyncIteration:
            return
        yield item


async def event_stream(
    scope: Mapping[str, Any], frames: AsyncIterator[bytes], failed: Callable[[Exception], bytes]
) -> AsyncGenerator[bytes, None]:
    """A stream of server-sent events, with a comment during long silence.

    Args:
        scope: the request's.
        failed: makes the last frame, for an error or the server's end.
    """
    following: asyncio.Future[bytes] | None = None
    stream = until_the_end(scope, frames)
    try:
        while True:
            following = following or asyncio.ensure_future(anext(stream))
            done, _ = await asyncio.wait((following,), timeout=KEEP_ALIVE_S)
            if not done:
                yield b": working\n\n"
                continue
            try:
                data = following.result()
            except StopAsyncIteration:
                break
            except Exception as error:
                yield failed(error)
                break
            following = None
            yield data
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await stream.aclose()


def streaming(stream: AsyncIterator[bytes]) -> StreamingResponse:
    """The response for a stream of server-sent events."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def frame(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # Clients in Python may split lines here, too.
    for end in ("\x85", "\u2028", "\u2029"):
        text = text.replace(end, f"\\u{ord(end):04x}")
    return head + b"data: " + text.encode() + b"\n\n"
