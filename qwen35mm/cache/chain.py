"""A prompt as the cache sees it: segments with content addresses, by which their tensors are found.

An address covers everything that decides the tensors: the root (the fingerprint of weights, kernels and machine), every
token before the segment's end, the places, pixels and grids of its media, and the cuts. So a cache hit needs no other
comparison, and a changed token changes every address from its segment on. Every hashed field has its length or a fixed
width: no two inputs share an encoding.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from qwen35mm.cache.kv_keep import OFF, KVKeep
from qwen35mm.prompt import Prompt, Segment

_SEGMENT = b"qwen35mm segment 1"
_VISION = b"qwen35mm vision 1"


@dataclass(frozen=True, eq=False)
class Chain:
    """The addressed part of a prompt.

    Attributes:
        root: the first segment's parent.
        salt, salt_from: see `segment_addresses`.
        addresses: 32 bytes for each segment; each also covers everything before it.
        rope_deltas: the rope_delta at each segment's end.
        row_stops: the rows of K and V that the segments up to each one keep.
    """

    prompt: Prompt
    root: bytes
    salt: bytes
    salt_from: int
    addresses: tuple[bytes, ...]
    rope_deltas: tuple[int, ...]
    row_stops: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Prompt, root: bytes, *, salt: bytes = b"", salt_from: int = 0, keep: KVKeep = OFF) -> Chain:
        """The chain of a prompt; its media must have digests."""
        addresses = segment_addresses(prompt, root, salt=salt, salt_from=salt_from)
        highest = np.maximum.accumulate(prompt.positions.max(axis=0)) if prompt.segments else np.empty(0)
        rope_deltas = tuple(int(highest[segment.stop - 1]) + 1 - segment.stop for segment in prompt.segments)
        row_stops = tuple(accumulate(keep.rows(prompt)))
        return cls(prompt, root, salt, salt_from, addresses, rope_deltas, row_stops)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.prompt.segments

    def __len__(self) -> int:
        return len(self.addresses)

    def up_to(self, num_tokens: int) -> Chain:
        """The chain of the segments that end within the first `num_tokens` tokens."""
        num = bisect_right(self.segments, num_tokens, key=lambda segment: segment.stop)
        prompt = replace(self.prompt, segments=self.segments[:num])
        lists = {name: getattr(self, name)[:num] for name in ("addresses", "rope_deltas", "row_stops")}
        return replace(self, prompt=prompt, **lists)

    def parent(self, index: int) -> bytes:
        """The address before segment `index`: the root for the first."""
        return self.addresses[index - 1] if index else self.root

    def ids(self, index: int) -> np.ndarray:
        """The token ids of one segment."""
        segment = self.segments[index]
        return self.prompt.token_ids[segment.start : segment.stop]

    def salt_of(self, index: int) -> bytes:
        """The tenant's salt if segment `index` is the tenant's, else empty."""
        return self.salt if self.segments[index].stop > self.salt_from else b""

    def stop(self, num_segments: int) -> int:
        """Number of tokens in the first `num_segments` segments."""
        return self.segments[num_segments - 1].stop if num_segments else 0

    def row_stop(self, num_segments: int) -> int:
        """Rows of K and V of the first `num_segments` segments."""
        return self.row_stops[num_segments - 1] if num_segments else 0

    def num_rows(self, index: int) -> int:
        """Rows of K and V of one segment."""
        return self.row_stops[index] - self.row_stop(index)

    def first_address(self, root: bytes) -> bytes:
        """The first segment's address under another root."""
        first = replace(self.prompt, segments=self.segments[:1])
        return segment_addresses(first, root, salt=self.salt, salt_from=self.salt_from)[0]


def segment_addresses(prompt: Prompt, root: bytes, *, salt: bytes = b"", salt_from: int = 0) -> tuple[bytes, ...]:
    """An address of 32 bytes for each of the prompt's segments; each depends on all before it.

    Args:
        root: the fingerprint of the arithmetic, the first segment's parent.
        salt: a tenant's secret; entries of one salt are never found under another. Empty: none.
        salt_from: the tenant's first token. The salt enters at the first segment that ends after it, so that earlier
            segments (the system prompt) are shared.

    Raises:
        ValueError: a span has no digest (its medium isn't prepared), or `salt_from` is negative.
    """
    if salt_from < 0:
        raise ValueError(f"salt_from is the index of a token, 0 or more; got {salt_from}.")
    # The last bits of a temporal patch's features depend on the patches encoded with it.
    num_units = Counter(span.media_index for span in prompt.spans)
    addresses: list[bytes] = []
    parent, salted = root, not salt
    for segment in prompt.segments:
        entering = b""
        if not salted and segment.stop > salt_from:
            entering, salted = salt, True
        parent = _segment_address(prompt, segment, parent, entering, num_units)
        addresses.append(parent)
    return tuple(addresses)


def vision_address(root: bytes, salt: bytes, unit_digests: Sequence[str], grid_thw: tuple[int, int, int]) -> bytes:
    """The address of one vision unit's embeddings: an image, or temporal patches that are encoded together.

    Args:
        root: the fingerprint of the arithmetic.
        salt: the tenant's secret, or empty.
        unit_digests: digests of the pixels, one for each temporal patch of the unit, in order.
        grid_thw: the unit's grid in patches; t is the number of digests.

    Raises:
        ValueError: the grid doesn't fit the digests.
    """
    if len(unit_digests) != grid_thw[0] or not unit_digests:
        raise ValueError(f"A unit of {grid_thw[0]} temporal patches came with {len(unit_digests)} digests.")
    digest = hashlib.sha256(_field(_VISION) + _field(root) + _field(salt) + struct.pack("<3q", *grid_thw))
    for unit_digest in unit_digests:
        digest.update(_field(unit_digest.encode()))
    return digest.digest()


def _segment_address(prompt: Prompt, segment: Segment, parent: bytes, salt: bytes, num_units: Counter[int]) -> bytes:
    token_ids = np.ascontiguousarray(prompt.token_ids[segment.start : segment.stop], dtype="<i8")
    digest = hashlib.sha256(_field(_SEGMENT) + _field(parent) + _field(salt))
    digest.update(_field(token_ids.tobytes()))
    digest.update(struct.pack("<q", len(segment.span_indices)))
    for index in segment.span_indices:
        span = prompt.spans[index]
        if span.digest is None:
            raise ValueError(f"Span {index} of the prompt has no digest: prepare its medium first.")
        place = (span.start - segment.start, span.stop - segment.start)
        digest.update(struct.pack("<7q", *place, *span.grid_thw, span.unit_index, num_units[span.media_index]))
        digest.update(_field(span.digest.encode()))
    return digest.digest()


def _field(value: bytes) -> bytes:
    return struct.pack("<q", len(value)) + value
