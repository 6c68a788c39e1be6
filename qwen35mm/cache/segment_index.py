"""This process's cached segments: a forest by address, in order of use.

A segment is touched after its children, so every child comes before its parent in order of use, and eviction never
leaves a child without its parent. Only pinned segments may be out of order: their sequence touches them when it ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qwen35mm.cache.chain import Chain


@dataclass(eq=False)
class CachedSegment:
    """One segment's KV; the state at its end, if kept, has the same address.

    Attributes:
        parent: the address before it; the root for a first segment.
        token_ids: int64, compared on a cache hit.
        start: its first row's place in the sequence.
        num_rows: rows of K and V; less than its tokens if some were evicted.
        salt: its tenant's; empty if all tenants share it.
        blocks: its blocks in the KV pool; it may share the first and last with its neighbours. None once its KV was
            evicted to host memory.
        pins: number of running sequences that use it.
    """

    address: bytes
    parent: bytes
    token_ids: np.ndarray
    start: int
    num_rows: int
    salt: bytes = b""
    blocks: tuple[int, ...] | None = None
    pins: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.num_rows


class SegmentIndex:
    """Finds segments by address; knows their children and order of use."""

    def __init__(self) -> None:
        self._segments: OrderedDict[bytes, CachedSegment] = OrderedDict()
        self._children: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[CachedSegment]:
        return iter(self._segments.values())

    def unpinned(self) -> Iterator[CachedSegment]:
        """Segments that no running sequence uses, least recently used first; the index may change meanwhile."""
        for segment in list(self):
            if not segment.pins and self.find(segment.address) is segment:
                yield segment

    def get(self, chain: Chain, index: int) -> CachedSegment | None:
        """Segment `index` of a chain, if it is cached with the same tokens."""
        segment = self._segments.get(chain.addresses[index])
        if segment is None or not np.array_equal(segment.token_ids, chain.ids(index)):
            return None
        return segment

    def find(self, address: bytes) -> CachedSegment | None:
        """The segment at an address."""
        return self._segments.get(address)

    def add(self, segment: CachedSegment) -> None:
        assert segment.address not in self._segments, "a segment is added twice"
        self._segments[segment.address] = segment
        self._children.setdefault(segment.parent, set()).add(segment.address)

    def remove(self, segment: CachedSegment) -> None:
        del self._segments[segment.address]
        siblings = self._children[segment.parent]
        siblings.remove(segment.address)
        if not siblings:
            del self._children[segment.parent]

    def touch(self, addresses: Sequence[bytes]) -> None:
        """Marks segments as just used; `addresses` has parents first, and parents are marked last."""
        for address in reversed(addresses):
            if address in self._segments:
                self._segments.move_to_end(address)

    def children(self, address: bytes) -> list[CachedSegment]:
        """The cached segments directly after an address."""
        return [self._segments[child] for child in self._children.get(address, ())]

    def num_children(self, address: bytes) -> int:
        return len(self._children.get(address, ()))

    def check_integrity(self) -> None:
        """Asserts that parents outlive their children and come after them in order of use."""
        place = {address: index for index, address in enumerate(self._segments)}
        listed = {child for children in self._children.values() for child in children}
        assert listed == set(self._segments), "the children's lists and the segments differ"
        for segment in self._segments.values():
            parent = self._segments.get(segment.parent)
            if parent is None:
                assert segment.start == 0, "a segment has lost its parent"
            else:
                assert parent.stop == segment.start, "a segment doesn't begin where its parent ends"
                in_order = place[parent.address] > place[segment.address]
                assert in_order or segment.pins, "a parent is older than its child"
