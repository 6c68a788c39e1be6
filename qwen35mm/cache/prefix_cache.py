"""The prefix cache: KV by segment, and states at some segments' ends, both by content address.

A cache hit gives a sequence exactly an earlier one's contents: it shares KV blocks and copies states. So further
computation has the same bits as without the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from qwen35mm.cache.chain import Chain
from qwen35mm.cache.disk_tier import DiskTier, Loaded, Tensors
from qwen35mm.cache.policy import RecentAddresses
from qwen35mm.cache.segment_index import CachedSegment, SegmentIndex
from qwen35mm.cache.sequence import CachePools, SequenceCache
from qwen35mm.cache.tensor_store import TensorStore
from qwen35mm.contract import MissReason, Tier


@dataclass(frozen=True, eq=False)
class Start:
    """A sequence that begins with a chain's first `num_segments` segments.

    Attributes:
        tokens_from: number of its tokens by tier.
        miss: why no more was found; None if the whole chain was found.
        pinned: the segments that it uses, a chain's first ones; released by `PrefixCache.unpin`.
        states: in order, the addresses of those that had a state when one was last entered.
    """

    sequence: SequenceCache
    num_segments: int
    tokens_from: Mapping[Tier, int] = field(default_factory=dict)
    miss: MissReason | None = None
    pinned: list[CachedSegment] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)


class PrefixCache:
    """Cached segments in a model's pools, under byte budgets.

    Args:
        pools: hold running sequences and cached segments; this cache sets their `reclaim`.
        state_bytes: budget for states in host memory.
        device_state_bytes: budget for states that also stay on the device.
        host_kv_bytes: budget for KV evicted to host memory; 0 drops it instead.
        disk: the tier that outlives the process.

    Attributes:
        states: conv and recurrent states at some segments' ends (see StatePool.save), by the segment's address.
    """

    def __init__(
        self,
        pools: CachePools,
        *,
        state_bytes: int,
        device_state_bytes: int = 0,
        host_kv_bytes: int = 0,
        disk: DiskTier | None = None,
    ) -> None:
        budgets = {"max_bytes": state_bytes, "device_bytes": device_state_bytes}
        self.states = TensorStore("state", **budgets, disk=disk, on_evict=self._state_evicted)
        self._host_kv = TensorStore("kv", max_bytes=host_kv_bytes, disk=disk, on_evict=self._host_kv_evicted)
        self._pools = pools
        self._disk = disk
        self._index = SegmentIndex()
        self._asked_for = RecentAddresses()
        self._dropped = RecentAddresses()  # tells evicted from new content
        pools.kv.reclaim = self.reclaim

    @property
    def num_segments(self) -> int:
        return len(self._index)

    def match(self, chain: Chain) -> int:
        """How many of a chain's first segments can be reused: all have KV in memory, the last also its state."""
        held = range(self._num_held(chain))
        return max((index + 1 for index in held if chain.addresses[index] in self.states), default=0)

    def load(self, chain: Chain) -> Future[Loaded] | None:
        """Starts reading from disk what memory lacks of a chain; None if there is nothing to read."""
        num_segments = self.match(chain)
        if self._disk is None or num_segments == len(chain):
            return None
        has_kv = [self._index.get(chain, index) is not None for index in range(len(chain))]
        has_state = [held and address in self.states for held, address in zip(has_kv, chain.addresses, strict=True)]
        return self._disk.load(chain, has_kv, has_state, num_segments)

    def begin(self, chain: Chain, loaded: Loaded | None = None) -> Start:
        """A new sequence with a chain's longest cached prefix, which may be empty.

        Args:
            loaded: the result of `load`, if it was called.

        Raises:
            OutOfSlotsError: no slot is free.
            OutOfBlocksError: no room for the KV; nothing has changed.
        """
        loaded = loaded or Loaded()
        num_segments = self.match(chain)
        state = self.states.get(chain.addresses[num_segments - 1]) if num_segments else None
        if loaded.num_segments > num_segments:
            # Memory may have evicted entries since the disk was asked.
            available = all(i in loaded.kv or self._index.get(chain, i) for i in range(loaded.num_segments))
            at_end = loaded.state or self.states.get(chain.addresses[loaded.num_segments - 1])
            if available and at_end is not None:
                num_segments, state = loaded.num_segments, at_end
        sequence = self._pools.new_sequence()
        try:
            tokens_from = self._fill(chain, sequence, num_segments, loaded.kv)
        except BaseException:
            sequence.free()
            raise
        miss = self._miss_reason(chain, num_segments, loaded)
        start = Start(sequence, num_segments, tokens_from, miss)
        if state is not None:
            addresses = chain.addresses[:num_segments]
            if not self.states.is_on_device(addresses[-1]):
                self.states.make_room(self._pools.states.slot_bytes)
            there = self._pools.states.on_device(state)
            self._pools.states.load(sequence.slot, there)
            sequence.rope_delta = chain.rope_deltas[num_segments - 1]
            sequence.num_evicted = chain.stop(num_segments) - chain.row_stop(num_segments)
            self._pin(chain, num_segments, start, is_new=False)
            self._index.touch(addresses)
            for each in (state, there):
                self.states.put(addresses[-1], each, is_new=False)
            self._touch_states(start, addresses)
            if self._disk is not None:
                self._disk.touch(addresses)
        return start

    def publish(
        self,
        chain: Chain,
        index: int,
        sequence: SequenceCache,
        start: Start,
        *,
        keep_state: bool,
        on_disk: bool = True,
    ) -> None:
        """Enters segment `index`, which a sequence has just computed, and its state if `keep_state`.

        Its cost doesn't grow with the chain: the earlier segments are pinned already.

        Args:
            on_disk: whether both may be written to disk.
        """
        assert sequence.length == chain.row_stops[index], "a segment is published at its end"
        if self._pin(chain, index + 1, start, is_new=on_disk) and keep_state:
            if chain.addresses[index] not in self.states:
                self.states.make_room(self._pools.states.slot_bytes)
                state = self._pools.states.keep(sequence.slot)
                self.states.put(chain.addresses[index], state, is_new=on_disk)
            self._touch_states(start, [*start.states, chain.addresses[index]])

    def thin(self, chain: Chain, kept: Iterable[int]) -> None:
        """Drops a chain's states that aren't in `kept`, except where another conversation branches off."""
        kept = set(kept)
        for index in range(len(chain)):
            if index not in kept:
                self.drop_state(chain, index)

    def drop_state(self, chain: Chain, index: int) -> None:
        """Drops one state of a chain, also on disk, unless another conversation branches off there."""
        address = chain.addresses[index]
        if address in self.states and self._index.num_children(address) <= 1:
            self.states.drop(address)

    def sight(self, chain: Chain) -> int:
        """How many of a chain's first segments were asked for before. Records all of them as asked for."""
        unseen = (index for index, address in enumerate(chain.addresses) if address not in self._asked_for)
        num_seen = next(unseen, len(chain))
        self._asked_for.add(chain.addresses)
        return max(num_seen, self._num_held(chain))

    def unpin(self, start: Start) -> None:
        """Releases an ended sequence's segments; drops those that lead to no state."""
        # New segments were entered after their parents.
        self._index.touch([segment.address for segment in start.pinned])
        for segment in start.pinned:
            segment.pins -= 1
        for segment in reversed(start.pinned):
            self._prune(segment)
        start.pinned.clear()

    def reclaim(self, num_blocks: int) -> None:
        """Evicts least recently used segments until `num_blocks` more blocks are free, or none is left to evict."""
        allocator = self._pools.kv.allocator
        wanted = allocator.num_free + num_blocks
        for segment in self._index.unpinned():
            if allocator.num_free >= wanted:
                return
            if segment.blocks is not None:
                self._evict(segment)

    def check_integrity(self, sequences: Iterable[SequenceCache], pinned: Sequence[Start] = ()) -> None:
        """Asserts that sequences and cached segments account for every block and slot, and that all counts agree."""
        blocks = [segment.blocks for segment in self._index if segment.blocks is not None]
        self._pools.check_integrity(sequences, blocks)
        self._index.check_integrity()
        self.states.check_integrity()
        self._host_kv.check_integrity()
        assert self.states.addresses <= {segment.address for segment in self._index}, "a state has lost its segment"
        off_device = {segment.address for segment in self._index if segment.blocks is None}
        assert self._host_kv.addresses == off_device, "a segment's KV is in one place"
        pins = Counter(segment.address for start in pinned for segment in start.pinned)
        assert pins == {s.address: s.pins for s in self._index if s.pins}, "the pins are off"

    def _num_held(self, chain: Chain) -> int:
        """How many of a chain's first segments have KV in memory."""
        return next((index for index in range(len(chain)) if self._index.get(chain, index) is None), len(chain))

    def _miss_reason(self, chain: Chain, num_segments: int, loaded: Loaded) -> MissReason | None:
        """Why a chain's segment `num_segments` wasn't found; None if there is no such segment."""
        if num_segments == len(chain):
            return None
        address, salt = chain.addresses[num_segments], chain.salt_of(num_segments)
        if self._index.find(address) is not None or address in self._dropped:
            return "evicted"
        if chain.segments[num_segments].span_indices:
            # A reason must not reveal another tenant's segments.
            siblings = [each for each in self._index.children(chain.parent(num_segments)) if each.salt == salt]
            if any(np.array_equal(sibling.token_ids, chain.ids(num_segments)) for sibling in siblings):
                return "different media"
        return loaded.miss if num_segments == 0 and loaded.miss else "new content"

    def _fill(
        self, chain: Chain, sequence: SequenceCache, num_segments: int, loaded: Mapping[int, Tensors]
    ) -> dict[Tier, int]:
        """Fills an empty sequence with the KV of a chain's first segments; returns the number of tokens by tier."""
        found = [self._index.get(chain, index) for index in range(num_segments)]
        shared: list[CachedSegment] = []
        # Copies, taken before anything is allocated: an allocation may evict the originals.
        copies: list[Tensors] = []
        tokens_from: Counter[Tier] = Counter()
        for index, segment in enumerate(found):
            tier: Tier = "disk" if segment is None else "host" if segment.blocks is None else "device"
            tokens_from[tier] += len(chain.ids(index))
            if segment is None:
                copies.append(loaded[index])
            elif segment.blocks is None or copies:
                copies.append(self._kv_of(segment))
            else:
                shared.append(segment)
        if shared:
            sequence.adopt(_overlay(shared, self._pools.kv.block_size), shared[-1].stop)
        for tensors in copies:
            sequence.append(tensors)
        assert sequence.length == chain.row_stop(num_segments), "a sequence of another length"
        return dict(tokens_from)

    def _pin(self, chain: Chain, num_segments: int, start: Start, *, is_new: bool) -> bool:
        """Enters missing segments of a chain's first ones, and pins all of them on the device.

        Args:
            start: its sequence has the segments' KV.
            is_new: whether missing segments are to be written to disk.

        Returns:
            False if an address has other content. SHA-256 doesn't collide in practice, but we check.
        """
        for index in range(len(start.pinned), num_segments):
            start_row, address = chain.row_stop(index), chain.addresses[index]
            segment = self._index.get(chain, index)
            if segment is None:
                if self._index.find(address) is not None:
                    return False
                ids = chain.ids(index).copy()
                rows = start_row, chain.num_rows(index)
                segment = CachedSegment(address, chain.parent(index), ids, *rows, chain.salt_of(index))
                self._index.add(segment)
                if self._disk is not None and is_new:
                    self._disk.mark("kv", address, self._kv_tensors)
            if segment.blocks is None:
                segment.blocks = start.sequence.share(start_row, chain.row_stops[index])
                self._host_kv.pop(address)
            segment.pins += 1
            start.pinned.append(segment)
        return True

    def _touch_states(self, start: Start, addresses: Iterable[bytes]) -> None:
        """Marks a sequence's states, which are few, as just used."""
        start.states[:] = [address for address in addresses if address in self.states]
        self.states.touch(start.states)

    def _state_evicted(self, address: bytes) -> None:
        """After a state's eviction: drops KV that leads to no state."""
        self._dropped.add([address])
        self._prune(self._index.find(address))

    def _host_kv_evicted(self, address: bytes) -> None:
        """After an eviction of KV from host memory: removes its segment."""
        segment = self._index.find(address)
        assert segment is not None, "KV in host memory has a segment"
        self._remove(segment)

    def _prune(self, segment: CachedSegment | None) -> None:
        """Drops KV that leads to no state, from this segment towards the root."""
        while (
            segment is not None
            and self._index.find(segment.address) is segment
            and segment.address not in self.states
            and not segment.pins
            and not self._index.num_children(segment.address)
        ):
            self._remove(segment)
            segment = self._index.find(segment.parent)

    def _evict(self, segment: CachedSegment) -> None:
        """Moves a segment's KV to host memory if its budget allows, else removes the segment."""
        assert segment.blocks is not None
        if segment.num_rows * self._pools.kv.token_bytes > self._host_kv.max_bytes:
            self._remove(segment)
            return
        self._host_kv.put(segment.address, self._kv_of(segment), is_new=False)
        self._pools.kv.allocator.release(segment.blocks)
        segment.blocks = None

    def _remove(self, segment: CachedSegment) -> None:
        """Removes a segment and its descendants, which would be unreachable."""
        doomed = [segment]
        for parent in doomed:
            doomed += self._index.children(parent.address)
        for each in reversed(doomed):
            assert not each.pins, "a segment in use is removed"
            if self._disk is not None:
                self._disk.save("kv", each.address)
            if each.address in self.states:
                self.states.evict(each.address)
            self._host_kv.pop(each.address)
            if each.blocks is not None:
                self._pools.kv.allocator.release(each.blocks)
            self._index.remove(each)
            self._dropped.add([each.address])

    def _kv_of(self, segment: CachedSegment) -> Tensors:
        """A segment's KV in host memory (see KVBlockPool.export), copied there if it is on the device."""
        if segment.blocks is None:
            host_kv = self._host_kv.get(segment.address)
            assert host_kv is not None, "a segment has lost its KV"
            return host_kv
        offset = segment.start % self._pools.kv.block_size
        return self._pools.kv.export(segment.blocks, offset, offset + segment.num_rows)

    def _kv_tensors(self, address: bytes) -> Tensors | None:
        segment = self._index.find(address)
        return None if segment is None else {**self._kv_of(segment), "token_ids": torch.from_numpy(segment.token_ids)}


def _overlay(segments: Sequence[CachedSegment], block_size: int) -> list[int]:
    """The block table of consecutive segments. If two overlap in a block, the later one's has both their rows."""
    table: list[int] = []
    for segment in segments:
        assert segment.blocks is not None
        table[segment.start // block_size :] = segment.blocks
    return table
