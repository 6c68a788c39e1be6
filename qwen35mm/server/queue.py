"""The queue in front of the engine. Callers share its places, so that many requests of one don't hold up another's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator

from qwen35mm.errors import QueueFullError


class FairQueue:
    """Admits a number of requests at a time: next is the caller who holds the fewest places, in turn among equals.

    Args:
        num_places: requests admitted at a time.
        max_waiting: requests that may wait, all callers together.
        several: whether there are several callers; then none of them holds the last place, whatever its prompts'
            length, so that another's request is admitted at once.
    """

    def __init__(self, num_places: int, max_waiting: int, *, several: bool = False) -> None:
        self._free = num_places
        self._most_each = num_places - (several and num_places > 1)
        self._held: Counter[str] = Counter()
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
        if self._may_enter(caller) and caller not in self._waiting:
            self._take(caller)
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
            self._give_back(caller)

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
                self._give_back(caller)
            raise

    def _leave(self, caller: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(caller, deque())
        with contextlib.suppress(ValueError):
            line.remove(turn)
        if not line:
            self._waiting.pop(caller, None)

    def _may_enter(self, caller: str) -> bool:
        return self._free > 0 and self._held[caller] < self._most_each

    def _take(self, caller: str) -> None:
        self._free -= 1
        self._held[caller] += 1

    def _give_back(self, caller: str) -> None:
        self._free += 1
        self._held[caller] -= 1
        self._held += Counter()  # forgets callers without a place
        self._let_through()

    def _let_through(self) -> None:
        while able := [caller for caller in self._waiting if self._may_enter(caller)]:
            caller = min(able, key=lambda each: self._held[each])
            line = self._waiting.pop(caller)
            turn = line.popleft()
            if line:
                self._waiting[caller] = line
            if not turn.cancelled():  # else it is about to leave, and finds itself gone
                self._take(caller)
                turn.set_result(None)
