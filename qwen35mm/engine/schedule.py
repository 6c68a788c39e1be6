"""Whose work comes next: which of several prompts, and when running replies get a token between them.

Nothing here changes arithmetic: a chunk has the same bits whatever runs between its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

# A prompt's work: the cost of its tokens at the start of a context. Attention doubles it after so many tokens.
DEEP_TOKENS = 32_768
# Work that goes ahead of a longer prompt before that one gets its share.
BURST = 2048.0
# Work of later prompts for each unit of the oldest one's, once they have had their burst: it keeps a quarter.
LATER_PER_OLDEST = 3.0
# Absent tenants whose work is remembered. A client can name any number of them.
MOST_ABSENT = 1000
# Time for prompts per time for running replies, where a step is shorter than a chunk: replies keep a quarter.
PREFILL_PER_DECODE = 3.0


def work(start: int, stop: int) -> float:
    """The work of a prompt's tokens `start` to `stop`."""
    return (stop - start) * (1 + (start + stop) / (2 * DEEP_TOKENS))


class Prompt(Protocol):
    """What the order depends on.

    Attributes:
        ahead: the work of others that went ahead of this prompt while it was its tenant's oldest. `Shares` keeps it.
    """

    ahead: float

    @property
    def tenant(self) -> bytes: ...

    @property
    def left(self) -> float:
        """The work until its first token."""
        ...


P = TypeVar("P", bound=Prompt)


class Shares:
    """Orders prompts: equal shares for tenants, and a tenant's shortest prompt first.

    A tenant's oldest prompt keeps a share, so that a stream of short ones never starves it. A tenant that comes
    (back) is ahead of the others by `BURST` at most.
    """

    def __init__(self) -> None:
        self._done: dict[bytes, float] = {}
        self._present: set[bytes] = set()
        # The least work of those who stayed. It never falls; newcomers begin near it.
        self._floor = 0.0

    def order(self, prompts: Sequence[P], ready: Sequence[P]) -> list[P]:
        """The prompts to try, in order.

        Args:
            prompts: all of them, in order of admission.
            ready: those that could do some work, or wait for another prompt's, in the same order.
        """
        self._meet({each.tenant for each in prompts})
        tenants = sorted(dict.fromkeys(each.tenant for each in ready), key=lambda tenant: self._done[tenant])
        return [each for tenant in tenants for each in _of_one([each for each in ready if each.tenant == tenant])]

    def count(self, prompt: P, done: float, ready: Sequence[P]) -> None:
        """Charges a prompt for work that was done in its turn; `ready` as in `order`."""
        self._done[prompt.tenant] += done
        oldest = next(each for each in ready if each.tenant == prompt.tenant)
        oldest.ahead = max(oldest.ahead - LATER_PER_OLDEST * done, 0.0) if oldest is prompt else oldest.ahead + done

    def _meet(self, tenants: set[bytes]) -> None:
        """Enters tenants who weren't here, and forgets those who left long ago or are too many."""
        staying = [self._done[tenant] for tenant in tenants & self._present]
        self._floor = max(self._floor, min(staying, default=self._floor))
        if tenants == self._present:
            return
        least = self._floor - BURST
        absent = [(done, tenant) for tenant, done in self._done.items() if tenant not in tenants and done > least]
        remembered = tenants | {tenant for _, tenant in sorted(absent)[-MOST_ABSENT:]}
        self._done = {tenant: done for tenant, done in self._done.items() if tenant in remembered}
        for tenant in tenants - self._present:
            self._done[tenant] = max(self._done.get(tenant, least), least)
        self._present = tenants


def _of_one(prompts: Sequence[P]) -> list[P]:
    """One tenant's prompts: the shortest first, or the oldest if others have been ahead of it for long."""
    oldest, by_length = prompts[0], sorted(prompts, key=lambda each: each.left)
    if oldest.ahead > BURST:
        by_length.remove(oldest)
        by_length.insert(0, oldest)
    return by_length


class Pace:
    """When running replies get a token beside prompts whose steps are shorter than a chunk."""

    def __init__(self) -> None:
        self._prefill_s = self._decode_s = 0.0
        self._is_due = False

    def prefilled(self, seconds: float, *, ends_chunk: bool) -> None:
        """Counts a step of a prompt. A reply never waits for more than a chunk."""
        self._prefill_s += seconds
        self._is_due |= ends_chunk

    def decoded(self, seconds: float) -> None:
        """Counts a token of every running reply."""
        self._prefill_s, self._decode_s, self._is_due = 0.0, seconds, False

    @property
    def decodes(self) -> bool:
        """Whether the next token is due."""
        return self._is_due or self._prefill_s >= PREFILL_PER_DECODE * self._decode_s
