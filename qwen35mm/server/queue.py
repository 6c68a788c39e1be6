"""The queue in front of the engine. Callers take turns, so that many requests of one don't hold up another's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

from qwen35mm.errors import QueueFullError


class FairQueue:
    """Admits a number of requests at a time. Waiting callers take turns, one request each.

    Args:
        num_places: requests admitted at a time.
        max_waiting: requests that may wait, all callers together.
    """

    def __init__(self, num_places: int, max_waiting: int) -> None:
        self._free = num_places
        self._max_waiting = max_waiting
        self._num_counted = 0
        # Callers in order of turn; the one admitted last is at the end.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def place(self, caller: str, *, may_be_refused: bool = True) -> AsyncIterator[None]:
        """Waits for a place and holds it until the end of the block.

        Args:
            may_be_refused: False for a part of a request that was admitted already; it doesn't count as waiting.

        Raises:
            QueueFullError: `max_waiting` requests are waiting.
        """
        if self._free and not self._waiting:
            self._free -= 1
        else:
            if may_be_refused and self._num_counted >= self._max_waiting:
                raise QueueFullError(f"{self._num_counted} requests are waiting already. Try again in a moment.")
            self._num_counted += may_be_refused
            try:
                await self._wait(caller)
            finally:
                self._num_counted -= may_be_refused
        try:
            yield
        finally:
            self._free += 1
            self._let_through()

    async def _wait(self, caller: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(caller, turn)
            else:
                # Admitted and cancelled at the same time: hand the place on.
                self._free += 1
                self._let_through()
            raise

    def _leave(self, caller: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(caller, deque())
        with contextlib.suppress(ValueError):
            line.remove(turn)
        if not line:
            self._waiting.pop(caller, None)

    def _let_through(self) -> None:
        while self._free and self._waiting:
            caller, line = self._waiting.popitem(last=False)
            turn = line.popleft()
            if line:
                self._waiting[caller] = line
            if not turn.cancelled():  # else it is about to leave, and finds itself gone
                self._free -= 1
                turn.set_result(None)
