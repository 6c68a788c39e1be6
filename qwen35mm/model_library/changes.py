"""Lets the model change once at a time: never during replies, and new replies wait until the change ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from qwen35mm.contract import Event
from qwen35mm.errors import RequestError
from qwen35mm_preprocess.say import say


class Changes:
    """Keeps changes and replies apart. For use from one event loop."""

    def __init__(self) -> None:
        self._num_streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: asyncio.Event | None = None

    @property
    def is_going_on(self) -> bool:
        """Whether a change is in progress."""
        return self._ended is not None

    async def stream(self, begin: Callable[[], AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
        """A reply's events; starts once no change is in progress."""
        while self._ended is not None:
            await self._ended.wait()
        events = begin()
        self._num_streams += 1
        self._idle.clear()
        try:
            async for event in events:
                yield event
        finally:
            try:
                await events.aclose()
            finally:
                self._num_streams -= 1
                if not self._num_streams:
                    self._idle.set()

    async def until_idle(self) -> None:
        """Returns once no reply is in progress."""
        await self._idle.wait()

    async def make(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Makes a change, which runs to its end even if the caller is cancelled.

        Raises:
            RequestError: replies or another change are in progress.
        """
        if self._ended is not None:
            raise RequestError(say("Another model is already loading. Wait until it is ready."))
        if self._num_streams:
            raise RequestError(
                say(
                    "{n} {n|answer is|answers are} being written. Stop or wait, then change the model.",
                    n=self._num_streams,
                )
            )
        self._ended = asyncio.Event()
        change = asyncio.ensure_future(work())
        change.add_done_callback(self._end)
        await asyncio.shield(change)

    def _end(self, change: asyncio.Future[Any]) -> None:
        ended, self._ended = self._ended, None
        assert ended is not None
        ended.set()
        if not change.cancelled():
            change.exception()  # the caller may be gone
