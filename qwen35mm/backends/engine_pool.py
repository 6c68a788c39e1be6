"""Several engines with the same model as one.

A request goes to the engine that has its beginning in its cache, else to the least busy, and elsewhere if its engine
dies.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import anyio

from qwen35mm.errors import EngineError, QueueFullError, Qwen35mmError, RequestError, RequestTimeoutError

E = TypeVar("E")
T = TypeVar("T")

logger = logging.getLogger(__name__)

# A request that so many engines lost fails: it may be what ends them.
MAX_LOST = 3
# A lost engine is tried again after pauses that double from the first to the longest.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
# A server loads a large model in minutes.
PATIENCE_S = 300.0
# Conversations whose engine is remembered.
_MOST_HELD = 10_000
# The engine may answer later, or another engine now.
PASSING = (EngineError, QueueFullError, RequestTimeoutError)


@dataclass(eq=False)
class Member(Generic[E]):
    """An engine of a pool, and what it did.

    Attributes:
        name: for a person.
        slots: the most requests that it has at one time.
        state: `away` is tried again; `left` is not.
        num_active: requests that it has now.
        num_answered: requests that it answered.
        num_lost: requests that it failed on; others got them.
    """

    name: str
    engine: E
    slots: int
    state: Literal["here", "away", "left"] = "here"
    num_active: int = 0
    num_answered: int = 0
    num_lost: int = 0
    num_pauses: int = 0
    last_begun: int = 0


class EnginePool(Generic[E]):
    """Sends each request to the engine that answered its conversation last, while that one has a free slot; else to the
    engine with the largest share of free slots. Use it in one event loop.

    Args:
        probe: returns when a lost engine answers again. Raises EngineError if it doesn't yet, and another Qwen35mmError
            if it never will as asked.
        patience_s: how long requests wait while every engine is away.
        sleep: how to wait before the next probe.
    """

    def __init__(
        self,
        members: Sequence[Member[E]],
        probe: Callable[[E], Awaitable[None]],
        *,
        patience_s: float = PATIENCE_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.members = members
        self._probe = probe
        self._patience_s = patience_s
        self._sleep = sleep
        self._held: OrderedDict[Hashable, Member[E]] = OrderedDict()
        self._clock = itertools.count(1)
        self._changed = asyncio.Event()
        self._none_since_s: float | None = None
        self._error: Qwen35mmError | None = None
        self._probing: set[asyncio.Task[None]] = set()

    async def use(self, ask: Callable[[E], Awaitable[T]], conversation: Hashable = None) -> T:
        """An engine's answer.

        Args:
            conversation: requests with the same one begin alike, so that one engine's cache serves them. None for none.
            ask: may be called again with another engine. If it raises EngineError, QueueFullError or
                RequestTimeoutError, the engine is away; if just RequestError, the engine refuses everything.

        Raises:
            EngineError: `MAX_LOST` engines were lost with this, or none came back in time.
            Exception: of `ask`, if another engine wouldn't help.
        """
        lost: list[Member[E]] = []
        while True:
            member = await self._take(lost, conversation)
            try:
                answer = await ask(member.engine)
            except PASSING as error:
                lost.append(member)
                self.lose(member, error)
                if len(lost) == MAX_LOST:
                    raise
            except RequestError as error:
                # A subclass is about the request.
                if type(error) is not RequestError or not self._has_others(member):
                    raise
                member.num_lost += 1
                self._leave(member, error)
            else:
                member.num_answered += 1
                member.num_pauses = 0
                self._remember(conversation, member)
                return answer
            finally:
                member.num_active -= 1
                self._tell()

    def lose(self, member: Member[E], error: Qwen35mmError) -> None:
        """Sends an engine nothing until it answers again."""
        member.num_lost += 1
        # Its other requests fail too.
        if member.state != "here":
            return
        member.state, self._error = "away", error
        others = "Others get its work" if any(each.state == "here" for each in self.members) else "No other is there"
        logger.warning("%s is left for now: %s %s; it is tried again.", member.name, error, others)
        if not any(each.state == "here" for each in self.members):
            self._none_since_s = time.monotonic()
        task = asyncio.create_task(self._return(member))
        self._probing.add(task)
        task.add_done_callback(self._probing.discard)

    async def aclose(self) -> None:
        """Ends the probes."""
        tasks = list(self._probing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _remember(self, conversation: Hashable, member: Member[E]) -> None:
        if conversation is None:
            return
        self._held[conversation] = member
        self._held.move_to_end(conversation)
        while len(self._held) > _MOST_HELD:
            self._held.popitem(last=False)

    async def _take(self, lost: Sequence[Member[E]], conversation: Hashable) -> Member[E]:
        """A slot of the conversation's engine if it has one, else of the least busy; of one that lost this request only
        if no other is free.
        """
        while True:
            holder = self._held.get(conversation)
            here = [each for each in self.members if each.state == "here"]
            free = [each for each in here if each.num_active < each.slots]
            if free:
                order = {each: (each in lost, each is not holder, each.num_active / each.slots) for each in free}
                found = min(free, key=lambda each: (*order[each], each.last_begun))
                found.num_active += 1
                found.last_begun = next(self._clock)
                return found
            left_s = math.inf
            if not here:
                assert self._error is not None
                if all(each.state == "left" for each in self.members):
                    raise EngineError(f"No engine is left: {self._error}") from self._error
                left_s = max(self._patience_s - (time.monotonic() - (self._none_since_s or 0.0)), 0.0)
            try:
                with anyio.fail_after(left_s):
                    await self._changed.wait()
            except TimeoutError:
                raise EngineError(f"No engine came back in {self._patience_s:g} s: {self._error}") from self._error

    async def _return(self, member: Member[E]) -> None:
        """Waits until a lost engine answers again."""
        while True:
            await self._sleep(min(_FIRST_PAUSE_S * 2.0 ** min(member.num_pauses, 16), _LONGEST_PAUSE_S))
            member.num_pauses += 1
            try:
                await self._probe(member.engine)
                break
            except PASSING:
                continue
            except Qwen35mmError as error:
                self._leave(member, error)
                return
            except Exception:
                logger.exception("asking %s whether it answers failed", member.name)
        member.state, self._none_since_s = "here", None
        logger.warning("%s answers again.", member.name)
        self._tell()

    def _has_others(self, member: Member[E]) -> bool:
        return any(each.state != "left" for each in self.members if each is not member)

    def _leave(self, member: Member[E], error: Qwen35mmError) -> None:
        if member.state != "left":
            member.state, self._error = "left", error
            logger.warning("%s gets nothing more in this run: %s", member.name, error)
            if self._none_since_s is None and not any(each.state == "here" for each in self.members):
                self._none_since_s = time.monotonic()
        self._tell()

    def _tell(self) -> None:
        """Wakes everything that waits for a slot."""
        self._changed.set()
        self._changed = asyncio.Event()
