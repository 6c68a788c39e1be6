"""Captions from several servers with one model: the least busy one gets the next item, and a failed one rests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.items import Failed
from qwen35mm.captioning.media.workers import Prepared
from qwen35mm.captioning.records import Caption
from qwen35mm.captioning.requests import CaptionRequest
from qwen35mm.errors import CaptioningError

_log = logging.getLogger(__name__)

# Failures of a server. Others are the item's own and are the same on each server.
_OF_SERVER = frozenset({"engine", "timeout"})
# An item that so many attempts of servers failed at is a failure.
_MOST_TRIES = 5
# A failed server rests, each time twice as long. Then one item tries it.
_LEAST_REST_S, _MOST_REST_S = 1.0, 30.0


@dataclass
class Member:
    """A server of a pool, and how it does in this run."""

    address: str
    captioner: Captioner
    num_running: int = 0
    num_captions: int = 0
    num_failures: int = 0
    num_failures_in_a_row: int = 0
    rests_until_s: float = 0.0

    def may_take(self, now_s: float) -> bool:
        """Whether it may get an item: after a failure one at a time, when it has rested."""
        return not self.num_failures_in_a_row or (not self.num_running and now_s >= self.rests_until_s)

    def fail(self, now_s: float, message: str) -> None:
        self.num_failures += 1
        # Items that were under way when it died say nothing new.
        if self.num_failures_in_a_row and now_s < self.rests_until_s:
            return
        self.num_failures_in_a_row += 1
        rest_s = min(_LEAST_REST_S * 2 ** (self.num_failures_in_a_row - 1), _MOST_REST_S)
        self.rests_until_s = now_s + rest_s
        _log.warning("%s rests for %g s, its items go elsewhere: %s", self.address, rest_s, message)


@dataclass(frozen=True, kw_only=True)
class PoolCaptioner(Captioner):
    """Several servers as one; made by `of`.

    Attributes:
        members: the servers.
        sleep: waits so many seconds, while all servers rest.
    """

    members: Sequence[Member]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    @classmethod
    def of(cls, members: Sequence[Member], slots: int) -> PoolCaptioner:
        """A pool of servers that take `slots` items each.

        Raises:
            CaptioningError: their models have different names, or they handle media differently.
        """
        first, *others = members
        own = first.captioner
        for other in others:
            if other.captioner.describe() != own.describe():
                raise CaptioningError(
                    f"The servers of one run need the same model: {first.address} has {own.name}, {other.address} has "
                    f"{other.captioner.name}. Name one that all have with --model, or run once for each."
                )
        given = {name: value for name, value in vars(own).items() if name != "others"}
        before = [each for member in members for each in member.captioner.others]
        return cls(**{**given, "num_at_once": slots * len(members)}, others=before, members=members)

    async def caption(
        self, request: CaptionRequest, prepared: Prepared | None, known: Caption | None = None, *, judges: bool = False
    ) -> Caption | Failed:
        """As `Captioner.caption`. What a server fails at is tried on the others."""
        failed_at: list[Member] = []
        while True:
            member = await self._next(failed_at)
            member.num_running += 1
            try:
                result = await member.captioner.caption(request, prepared, known, judges=judges)
            finally:
                member.num_running -= 1
            if not isinstance(result, Failed) or result.kind not in _OF_SERVER:
                member.num_failures_in_a_row = 0
                member.num_captions += isinstance(result, Caption)
                return result
            member.fail(monotonic(), result.message)
            failed_at.append(member)
            if len(failed_at) >= _MOST_TRIES:
                tries = f"{_MOST_TRIES} attempts on {len(self.members)} servers failed"
                return replace(result, message=f"{tries}, the last one so: {result.message}")

    async def _next(self, failed_at: Sequence[Member]) -> Member:
        """The least busy server that may take an item, if possible one where this item hasn't failed."""
        while True:
            now_s = monotonic()
            fit = [member for member in self.members if member.may_take(now_s)]
            if fit:
                return min(fit, key=lambda member: (failed_at.count(member), member.num_running))
            # Those that are tried again by one item end by themselves.
            await self.sleep(max(min(member.rests_until_s for member in self.members) - now_s, 0.05))

    def told(self) -> list[str]:
        """A line a server: what it did in this run."""
        lines = []
        for member in self.members:
            failures = f", {member.num_failures} failed attempts" if member.num_failures else ""
            lines.append(f"{member.address}: {member.num_captions} captions{failures}")
        return lines
