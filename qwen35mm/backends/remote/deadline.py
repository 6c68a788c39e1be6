"""Time limits, and places to wait for within them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import anyio

from qwen35mm.backends.remote import words
from qwen35mm.backends.remote.faults import Fault
from qwen35mm.errors import ConfigError, RequestTimeoutError

_T = TypeVar("_T")


@dataclass(frozen=True)
class RemoteTimeouts:
    """How long a server may be silent.

    Attributes:
        connect_s: until the connection is made.
        first_s: until the first bytes of an answer: the server's queue, media and prefill.
        silence_s: between two chunks of an answer.
    """

    connect_s: float = 10.0
    first_s: float = 300.0
    silence_s: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be a number of seconds above 0; got {getattr(self, name)!r}.")


class Deadline(NamedTuple):
    """The end of a time limit on the clock of `time.monotonic`, and the limit's length."""

    at_s: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(time.monotonic() + timeout_s, timeout_s)

    def left_s(self) -> float:
        return max(self.at_s - time.monotonic(), 0.0)


def overdue(deadline: Deadline) -> Fault:
    """The fault of a passed deadline."""
    return Fault(RequestTimeoutError, words.overdue(f"{deadline.timeout_s:g}"))


@contextlib.asynccontextmanager
async def until(deadline: Deadline) -> AsyncIterator[None]:
    """Cancels the block at the deadline. Not around a `yield` of a generator. Raises Fault."""
    try:
        # Not asyncio's wait_for: up to Python 3.11 it loses a cancellation that comes with the result.
        with anyio.fail_after(deadline.left_s()):
            yield
    except TimeoutError:
        raise overdue(deadline) from None


class Patience:
    """How long a server may be silent: one limit until its first chunk, one between chunks, and the deadline for all.
    The time between two waits doesn't count.

    Attributes:
        is_amid: whether the answer has begun.
    """

    def __init__(self, timeouts: RemoteTimeouts, deadline: Deadline) -> None:
        self._timeouts = timeouts
        self._deadline = deadline
        self._begun_s = time.monotonic()
        self.is_amid = False

    def restart(self) -> None:
        """Restarts the limit at a sign of life: a server that sends comments is alive, however long its prefill."""
        self._begun_s = time.monotonic()

    async def wait(self, awaited: Awaitable[_T]) -> _T:
        """Waits for the server's next action.

        Raises:
            Fault: the time was over first.
        """
        limit_s = self._timeouts.silence_s if self.is_amid else self._timeouts.first_s
        silent_s = limit_s if self.is_amid else max(limit_s - (time.monotonic() - self._begun_s), 0.0)
        left_s = self._deadline.left_s()
        try:
            with anyio.fail_after(min(silent_s, left_s)):
                return await awaited
        except TimeoutError:
            if left_s <= silent_s:
                raise overdue(self._deadline) from None
        told = words.silent_amid if self.is_amid else words.silent
        raise Fault(RequestTimeoutError, told(f"{limit_s:g}"), is_passing=True)


@contextlib.asynccontextmanager
async def place(places: anyio.Semaphore, deadline: Deadline) -> AsyncIterator[None]:
    """Waits for a place, first come first served, and holds it."""
    async with until(deadline):
        await places.acquire()
    try:
        yield
    finally:
        places.release()


def num_waiting(places: anyio.Semaphore) -> int:
    return places.statistics().tasks_waiting
