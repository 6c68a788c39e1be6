"""One change of the model at a time: none while replies are written, and replies wait for its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from qwen35mm.contract import Event
from qwen35mm.errors import RequestError
from qwen35mm_preprocess.say import say


class Changes:
    """Keeps changes and replies apart. To be used from one event loop."""

    def __init__(self) -> None:
        self._num_streams = 0
        self._ended: asyncio.Event | None = None

    @property
    def is_going_on(self) -> bool:
        """Whether the model is being changed."""
        return self._ended is not None

    async def stream(self, begin: Callable[[], AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
        """A reply's events, which begin when no change is going on."""
        while self._ended is not None:
            await self._ended.wait()
        events = begin()
        self._num_streams += 1
        try:
            async for event in events:
                yield event
        finally:
            try:
                await events.aclose()
            finally:
                self._num_streams -= 1

    async def make(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Makes a change; once begun it goes to its end, even if the caller is cancelled.

        Raises:
            RequestError: replies are in progress, or another change is.
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
