"""How long something may take, and waiting for one of several places no longer than that."""

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
        connect_s: until the connection stands.
        first_s: until the first bytes of an answer's text: its line of waiting requests, the media, the prefill.
        silence_s: between two pieces of an answer.
    """

    connect_s: float = 10.0
    first_s: float = 300.0
    silence_s: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be a number of seconds above 0; got {getattr(self, name)!r}.")


class Deadline(NamedTuple):
    """When something must be over, by `time.monotonic`, and how long that was from the beginning."""

    at_s: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(time.monotonic() + timeout_s, timeout_s)

    def left_s(self) -> float:
        return max(self.at_s - time.monotonic(), 0.0)


def overdue(deadline: Deadline) -> Fault:
    """What it is when a deadline is over."""
    return Fault(RequestTimeoutError, words.overdue(f"{deadline.timeout_s:g}"))


@contextlib.asynccontextmanager
async def until(deadline: Deadline) -> AsyncIterator[None]:
    """Ends what is in it at the deadline. Not around a `yield` of a generator. Raises Fault."""
    try:
        # Not asyncio's wait_for, which up to Python 3.11 loses a cancellation that comes with the result.
        with anyio.fail_after(deadline.left_s()):
            yield
    except TimeoutError:
        raise overdue(deadline) from None


class Patience:
    """How long a server may say nothing: so long until its first words, so long between two pieces, and to no later
    than the deadline. Whoever asks may take their time between two waits.

    Attributes:
        is_amid: whether it has begun to answer.
    """

    def __init__(self, timeouts: RemoteTimeouts, deadline: Deadline) -> None:
        self._timeouts = timeouts
        self._deadline = deadline
        self._begun_s = time.monotonic()
        self.is_amid = False

    def restart(self) -> None:
        """The server gave a sign of life: one that sends comments is alive, however long its prefill takes."""
        self._begun_s = time.monotonic()

    async def wait(self, awaited: Awaitable[_T]) -> _T:
        """Waits for what the server does next.

        Raises:
            Fault: it didn't within its time.
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
    """Waits for one of so many places, in the order of asking, and holds it."""
    async with until(deadline):
        await places.acquire()
    try:
        yield
    finally:
        places.release()


def num_waiting(places: anyio.Semaphore) -> int:
    return places.statistics().tasks_waiting
