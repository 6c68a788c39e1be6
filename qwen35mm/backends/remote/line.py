"""A line of requests before something that only so many may have at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any


class Line:
    """Lets in so many at once, in the order in which they came.

    Attributes:
        num_waiting: those that aren't in yet.
    """

    def __init__(self, num_places: int) -> None:
        self._places = asyncio.Semaphore(num_places)
        self.num_waiting = 0

    @property
    def is_full(self) -> bool:
        """Whether the next one has to wait."""
        return self._places.locked()

    @contextlib.asynccontextmanager
    async def place(self, bounded: Callable[[Awaitable[Any]], Awaitable[Any]]) -> AsyncIterator[None]:
        """Waits for a place and holds it.

        Args:
            bounded: awaits what it is given, and raises where that takes too long.
        """
        self.num_waiting += 1
        try:
            await bounded(self._places.acquire())
        finally:
            self.num_waiting -= 1
        try:
            yield
        finally:
            self._places.release()
