"""Wrappers for the events of a reply on their way to a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

from qwen35mm.contract import Event, MediaPlanned, Progress
from qwen35mm.server.notes import Notes
from qwen35mm.server.openai.choices import OfChoice

E = TypeVar("E", Event, OfChoice)


def note_stand_ins(item: Event | OfChoice, notes: Notes) -> None:
    """Notes media of past turns that the backend couldn't read.

    Raises:
        ApiError: 400, if the notes are strict.
    """
    event = item.event if isinstance(item, OfChoice) else item
    if isinstance(event, MediaPlanned) and None in event.plans:
        told = "can't be read; a text says so to the model"
        notes.change(f"{event.plans.count(None)} of the media in past turns and tools' results", told)


async def first_of(events: AsyncGenerator[E, None], notes: Notes) -> AsyncGenerator[E, None]:
    """The events from the one on that shows that the request is accepted: until then an error gets its own status.

    What was planned before is among them, since responses are stored with their plans.
    """
    planned: list[E] = []
    async for first in events:
        note_stand_ins(first, notes)
        event = first.event if isinstance(first, OfChoice) else first
        if isinstance(event, MediaPlanned):
            planned.append(first)
        elif not (isinstance(event, Progress) and event.phase in ("wait", "read")):
            return _again([*planned, first], events)
    raise AssertionError("a stream ends with its result")


async def _again(first: list[E], events: AsyncGenerator[E, None]) -> AsyncGenerator[E, None]:
    for event in first:
        yield event
    async for event in events:
        yield event


async def later(beginning: asyncio.Future[AsyncGenerator[E, None]]) -> AsyncGenerator[E, None]:
    """The events of a stream that hasn't begun yet."""
    async for event in await beginning:
        yield event


async def read_ahead(events: AsyncGenerator[E, None]) -> AsyncGenerator[E, None]:
    """The same events, read as they come: a slow client holds up nobody, and only its own replies pile up."""
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
