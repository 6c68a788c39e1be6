"""Answers that come while they are written, and clients that hang up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from qwen35mm.engine import Event, MediaPlanned, Progress
from qwen35mm.server.choices import OfChoice
from qwen35mm.server.errors import ApiError, api_error

# Proxies and clients give up on connections that say nothing.
KEEP_ALIVE_S = 10.0

T = TypeVar("T")
E = TypeVar("E", Event, OfChoice)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """What the work gives; it is called off when the client hangs up.

    Raises:
        ClientDisconnect: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def first_of(events: AsyncGenerator[E, None]) -> AsyncGenerator[E, None]:
    """The events again, once there is one by which a request is known to be one that can be answered: what is refused
    gets a status of its own."""
    async for first in events:
        event = first.event if isinstance(first, OfChoice) else first
        is_early = isinstance(event, MediaPlanned) or (isinstance(event, Progress) and event.phase in ("wait", "read"))
        if not is_early:
            return _again(first, events)
    raise AssertionError("a stream ends with its result")


async def _again(first: E, events: AsyncGenerator[E, None]) -> AsyncGenerator[E, None]:
    yield first
    async for event in events:
        yield event


async def read_ahead(events: AsyncGenerator[E, None]) -> AsyncGenerator[E, None]:
    """The events again. They are taken as they come: a client that reads slowly holds up nobody else's turn, and what
    waits for it is no more than its replies."""
    ready: asyncio.Queue[E | Exception | None] = asyncio.Queue()

    async def read() -> None:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    ready.put_nowait(event)
            ready.put_nowait(None)
        except Exception as error:
            ready.put_nowait(error)

    reading = asyncio.ensure_future(read())
    try:
        while (event := await ready.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def server_sent(
    frames: AsyncIterator[bytes], events: AsyncGenerator[E, None], failed: Callable[[ApiError], bytes]
) -> AsyncIterator[bytes]:
    """A stream of server-sent events, with a comment where there is nothing to say for long.

    Args:
        events: what the frames are made of; closed at the end, however that comes.
        failed: the frame of an error, which is the last.
    """
    following: asyncio.Future[bytes] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(frames))
            done, _ = await asyncio.wait((following,), timeout=KEEP_ALIVE_S)
            if not done:
                yield b": working\n\n"
                continue
            try:
                data = following.result()
            except StopAsyncIteration:
                break
            except Exception as error:
                yield failed(api_error(error))
                break
            following = None
            yield data
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await events.aclose()


def frame(data: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
