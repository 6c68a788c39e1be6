"""Events of replies on their way to a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

from qwen35mm.contract import Event, MediaPlanned, Progress
from qwen35mm.server.openai.choices import OfChoice

E = TypeVar("E", Event, OfChoice)


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
