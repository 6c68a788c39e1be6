"""Decides what to keep: states by their chain's cuts, other entries by whether they were asked for before.

A recurrent state is as large as the KV of hundreds of tokens, so only few are kept: those for the next turn, an edit, a
regenerated answer, or another conversation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from qwen35mm.prompt import Segment

MAX_STATES_PER_CHAIN = 6
MAX_RECENT_ADDRESSES = 16_384
# For the next turn, for regenerating the last answer, and for editing the last question.
_RECENT_TURN_ENDS = 3


def states_to_keep(
    segments: Sequence[Segment], *, system_stop: int = 0, max_states: int = MAX_STATES_PER_CHAIN
) -> frozenset[int]:
    """The indices of the segments whose end states are kept, at most `max_states`.

    In this order: the last cut, the ends of the last turns, the system prompt (shared by other conversations), the
    first media (asked about again in new chats), the latest media, and then older cuts, far apart: those whose place is
    a multiple of the highest power of two. The order of the older cuts stays the same while a chain grows, so a dropped
    state is never wanted again.

    Args:
        system_stop: token where the system message ends; 0 without one.
    """
    if not segments:
        return frozenset()
    last = len(segments) - 1
    turn_ends = [index for index, segment in enumerate(segments) if segment.end == "turn"]
    media_ends = [index for index, segment in enumerate(segments) if segment.end == "media"]
    system = [index for index, segment in enumerate(segments) if 0 < system_stop == segment.stop]
    thinned = sorted(range(last), key=lambda index: ((index + 1) & -(index + 1), index), reverse=True)
    recent = reversed(turn_ends[-_RECENT_TURN_ENDS:])
    wanted = dict.fromkeys([last, *recent, *system, *media_ends[:1], *media_ends[-1:], *thinned])
    return frozenset(list(wanted)[:max_states])


class RecentAddresses:
    """Remembers recent addresses without their entries; forgets old ones."""

    def __init__(self) -> None:
        self._addresses: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, address: bytes) -> bool:
        return address in self._addresses

    def add(self, addresses: Iterable[bytes]) -> None:
        for address in addresses:
            self._addresses[address] = None
            self._addresses.move_to_end(address)
        while len(self._addresses) > MAX_RECENT_ADDRESSES:
            self._addresses.popitem(last=False)
