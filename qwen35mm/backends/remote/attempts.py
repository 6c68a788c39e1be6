"""How often a request is made, and how long is waited between two attempts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from qwen35mm.backends.remote.connection import Connection
from qwen35mm.backends.remote.deadline import Deadline
from qwen35mm.backends.remote.faults import Fault, delay_s

_T = TypeVar("_T")


class Attempts:
    """Makes requests of a server again where that can help.

    Args:
        most: attempts of one request.
        sleep, jitter: how to wait between two of them, and a number from 0 to 1 for each wait.
    """

    def __init__(
        self,
        connection: Connection,
        most: int,
        sleep: Callable[[float], Awaitable[None]],
        jitter: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._most = most
        self._jitter = jitter
        self.sleep = sleep

    async def make(self, request: Callable[[], Awaitable[_T]], deadline: Deadline) -> _T:
        """Makes a request as often as it can help. Raises the last Fault."""
        num_failed = 0
        while True:
            try:
                return await request()
            except Fault as fault:
                num_failed += 1
                pause_s = self.pause_s(fault, num_failed, deadline)
            await self.sleep(pause_s)

    def pause_s(self, fault: Fault, num_failed: int, deadline: Deadline) -> float:
        """Seconds after which to ask again; raises the fault where that can't help, or isn't allowed any more."""
        self._connection.check_open()
        if not fault.is_passing or fault.was_begun:
            raise fault
        pause_s = delay_s(num_failed, self._jitter(), fault.retry_after_s)
        if num_failed >= self._most or pause_s >= deadline.left_s():
            fault.num_attempts = num_failed
            raise fault
        return pause_s
