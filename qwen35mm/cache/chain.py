"""A prompt as the cache sees it: its segments with their addresses, and what is kept at a segment's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from qwen35mm.cache.address import segment_addresses
from qwen35mm.prompt import Prompt, Segment


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The states at a segment's end, in host memory or, where they are new, on their device; never changed once made.

    Attributes:
        length: tokens before it.
        rope_delta: next M-RoPE position - length.
        tensors: conv and recurrent states, see StatePool.save.
    """

    length: int
    rope_delta: int
    tensors: Mapping[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def is_on_host(self) -> bool:
        return all(tensor.device.type == "cpu" for tensor in self.tensors.values())

    def on_host(self) -> Checkpoint:
        """The same in host memory, or itself."""
        if self.is_on_host:
            return self
        return replace(self, tensors={name: tensor.to("cpu") for name, tensor in self.tensors.items()})


@dataclass(frozen=True, eq=False)
class Chain:
    """The addressed part of a prompt.

    Attributes:
        root: what the first segment's address was derived from.
        salt, salt_from: see `segment_addresses`.
        addresses: of each segment, 32 bytes; each stands for everything before it too.
        rope_deltas: at each segment's end.
    """

    prompt: Prompt
    root: bytes
    salt: bytes
    salt_from: int
    addresses: tuple[bytes, ...]
    rope_deltas: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Prompt, root: bytes, *, salt: bytes = b"", salt_from: int = 0) -> Chain:
        """The chain of a prompt whose media have their digests."""
        addresses = segment_addresses(prompt, root, salt=salt, salt_from=salt_from)
        highest = np.maximum.accumulate(prompt.positions.max(axis=0)) if prompt.segments else np.empty(0)
        rope_deltas = tuple(int(highest[segment.stop - 1]) + 1 - segment.stop for segment in prompt.segments)
        return cls(prompt, root, salt, salt_from, addresses, rope_deltas)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.prompt.segments

    def __len__(self) -> int:
        return len(self.addresses)

    def parent(self, index: int) -> bytes:
        """The address before segment `index`: the root for the first."""
        return self.addresses[index - 1] if index else self.root

    def ids(self, index: int) -> np.ndarray:
        """The token ids of one segment."""
        segment = self.segments[index]
        return self.prompt.token_ids[segment.start : segment.stop]

    def salt_of(self, index: int) -> bytes:
        """The tenant's salt where segment `index` is the tenant's, else empty."""
        return self.salt if self.segments[index].stop > self.salt_from else b""

    def stop(self, num_segments: int) -> int:
        """Tokens in the first `num_segments` segments."""
        return self.segments[num_segments - 1].stop if num_segments else 0

    def first_address(self, root: bytes) -> bytes:
        """The first segment's address under another root."""
        first = replace(self.prompt, segments=self.segments[:1])
        return segment_addresses(first, root, salt=self.salt, salt_from=self.salt_from)[0]
