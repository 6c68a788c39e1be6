"""Both pools of a model and the sequences that live in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from qwen35mm.cache.kv_pool import KVBlockPool
from qwen35mm.cache.placement import Devices
from qwen35mm.cache.sequence import SequenceCache
from qwen35mm.cache.state_pool import StatePool
from qwen35mm.config import ModelConfig

DEFAULT_BLOCK_SIZE = 64


class CachePools:
    """The memory of `num_slots` sequences with `num_tokens` tokens in all.

    Args:
        num_tokens: tokens of KV, rounded up to whole blocks.
        dtype: of K, V and the conv states; recurrent states are float32 always.
        device: of all layers, or of each.

    Attributes:
        layers: of each decoder layer, K and V of all blocks, or conv and recurrent states of all slots.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        num_tokens: int,
        dtype: torch.dtype,
        device: Devices = "cpu",
        block_size: int = DEFAULT_BLOCK_SIZE,
    ) -> None:
        num_blocks = -(-num_tokens // block_size)
        self.kv = KVBlockPool(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
        self.states = StatePool(config, num_slots=num_slots, dtype=dtype, device=device)
        self.layers = {**self.kv.layers, **self.states.layers}

    def new_sequence(self) -> SequenceCache:
        """An empty cache.

        Raises:
            OutOfSlotsError: no slot is free.
        """
        return SequenceCache(self.kv, self.states, slot=self.states.take())

    def check_integrity(self, sequences: Iterable[SequenceCache], cached: Iterable[Sequence[int]] = ()) -> None:
        """Asserts that `sequences`, and the `cached` segments' blocks, are all that is held, and every count agrees."""
        alive = [sequence for sequence in sequences if not sequence.freed]
        held = Counter(block for sequence in alive for block in sequence.block_table)
        for blocks in cached:
            held.update(blocks)
        self.kv.allocator.check_integrity(held)
        slots = [sequence.slot for sequence in alive]
        assert len(slots) == len(set(slots)), f"two sequences share a slot: {sorted(slots)}"
        self.states.check_integrity(set(slots))
        for sequence in alive:
            assert sequence.length <= len(sequence.block_table) * self.kv.block_size, "a sequence outgrew its blocks"
