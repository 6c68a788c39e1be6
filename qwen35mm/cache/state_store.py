"""The checkpoints that are kept in host memory, under a budget of bytes, least recently used first.

New ones stay on their device until `settle`: most of them are dropped at the next cut, and a copy to the host waits for
the device (49 MiB at 9B, as long as a good part of a segment's prefill).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from qwen35mm.cache.chain import Checkpoint
from qwen35mm.cache.segment_index import CachedSegment


class StateStore:
    """Which cached segments have a state.

    Args:
        max_bytes: budget of all states together.
        on_drop: told of a segment whose state gives way to others; it takes the state off the segment.
    """

    def __init__(self, *, max_bytes: int, on_drop: Callable[[CachedSegment], None]) -> None:
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._segments: OrderedDict[bytes, CachedSegment] = OrderedDict()
        self._num_bytes = 0
        self._unsettled: list[CachedSegment] = []

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def has_unsettled(self) -> bool:
        """Whether states wait for their copy to host memory."""
        return bool(self._unsettled)

    def settle(self, *, but_newest: bool = False) -> None:
        """Copies to host memory what is still kept and isn't there yet; waits for the device."""
        stays = self._unsettled[-1:] if but_newest else []
        for segment in self._unsettled[: len(self._unsettled) - len(stays)]:
            if segment.state is not None:
                segment.state = segment.state.on_host()
        self._unsettled = stays

    def keep(self, segment: CachedSegment, state: Checkpoint) -> None:
        """Gives a segment its state; one that is larger than the whole budget is not kept."""
        assert segment.state is None, "a segment has one state"
        if state.num_bytes > self._max_bytes:
            return
        while self._num_bytes + state.num_bytes > self._max_bytes:
            _, oldest = self._segments.popitem(last=False)
            assert oldest.state is not None
            self._num_bytes -= oldest.state.num_bytes
            self._on_drop(oldest)
        segment.state = state
        self._segments[segment.address] = segment
        self._num_bytes += state.num_bytes
        if not state.is_on_host:
            self._unsettled.append(segment)

    def drop(self, segment: CachedSegment) -> None:
        """Takes a segment's state away."""
        assert segment.state is not None
        del self._segments[segment.address]
        self._num_bytes -= segment.state.num_bytes
        segment.state = None

    def touch(self, addresses: Sequence[bytes]) -> None:
        """Marks a chain's states as used just now, the first segment's as the last."""
        for address in reversed(addresses):
            if address in self._segments:
                self._segments.move_to_end(address)

    def check_integrity(self, segments: Iterable[CachedSegment]) -> None:
        """Asserts that these are all segments with a state, counted right and within the budget."""
        states = {segment.address: segment.state for segment in segments if segment.state is not None}
        assert set(self._segments) == set(states), "the list of states is off"
        assert self._num_bytes == sum(state.num_bytes for state in states.values()), "the states' bytes are off"
        assert self._num_bytes <= self._max_bytes, "the states are over their budget"
