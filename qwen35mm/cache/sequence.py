"""One sequence's hybrid cache (blocks, slot, length and rope_delta), and the pools behind it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from qwen35mm.cache.eviction import EvictedRows
from qwen35mm.cache.kv_pool import DEFAULT_BLOCK_SIZE, KVBlockPool
from qwen35mm.cache.kv_types import kv_formats_of
from qwen35mm.cache.placement import Devices
from qwen35mm.cache.state_pool import StatePool
from qwen35mm.config import ModelConfig
from qwen35mm_kernels.kv_formats import KVFormats


class SequenceCache:
    """A running sequence's memory: the model reads and writes its blocks and its slot's states.

    `CachePools.new_sequence` makes an empty one; `free` releases everything. A sequence that continues from another
    gets its blocks (`share`, `adopt`) and states (`StatePool.save`, `load`).

    Attributes:
        rope_delta: next M-RoPE position minus next cache_position, after the prompt; it belongs to the cached tokens
            and moves with them.
        num_evicted: tokens whose keys and values were evicted; moves with the cached tokens, too.
        table_key: a new object whenever `block_table` changes.
    """

    def __init__(self, pools: CachePools, *, slot: int) -> None:
        self.rope_delta = self.num_evicted = 0
        self._pools = pools
        self._slot: int | None = slot
        self._draft_slots: list[int] = []
        # 32 bits each, as in batches: copying those of a million tokens takes microseconds.
        self._blocks = array("i")
        self.table_key = object()
        self._length = 0
        # Places claimed by this sequence, and places that others may share: see KVBlockPool.filled.
        self._claimed = 0
        self._shared = 0

    @property
    def length(self) -> int:
        """Rows of keys and values; the place of the next token's."""
        return self._length

    @property
    def num_tokens(self) -> int:
        """Tokens so far, also those without keys and values; the cache_position of the next one."""
        return self._length + self.num_evicted

    @property
    def next_position(self) -> int:
        """The next text token's M-RoPE position (all three rows)."""
        return self.position(self._length)

    def position(self, place: int) -> int:
        """The M-RoPE position of a token after the prompt, by its row's place: cache_position + rope_delta."""
        return place + self.num_evicted + self.rope_delta

    @property
    def slot(self) -> int:
        """This sequence's row in the state pool."""
        assert self._slot is not None, "this cache was freed"
        return self._slot

    @property
    def draft_slots(self) -> Sequence[int]:
        """Borrowed slots, for the states after each drafted token."""
        return self._draft_slots

    @property
    def layers(self) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
        """By decoder layer: K and V of all blocks, or conv and recurrent states of all slots."""
        return self._pools.layers

    @property
    def kv_formats(self) -> KVFormats:
        """The formats of K and V."""
        return self._pools.kv.formats

    @property
    def block_table(self) -> array[int]:
        """A copy, int32: the pool's blocks of this sequence, in order; the last ones may still be empty."""
        return self._blocks[:]

    def row(self, place: int) -> int:
        """The pool's row for a place of this sequence; there must be room for it."""
        return self._blocks[place // self.block_size] * self.block_size + place % self.block_size

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._pools.kv.block_size

    @property
    def freed(self) -> bool:
        return self._slot is None

    def prepare(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` more. Claims the rest of the last block, or copies that block if it is shared.

        Raises:
            OutOfBlocksError: no room; nothing has changed.
        """
        assert not self.freed, "this cache was freed"
        stop = self._length + num_tokens
        if num_tokens and self._must_copy_last():
            self._copy_last(stop)
        else:
            self._grow(stop)
        size = self._pools.kv.block_size
        for index in range(self._length // size, -(-stop // size)):
            self._pools.kv.filled[self._blocks[index]] = min(stop - index * size, size)
        self._claimed = max(stop, self._claimed)

    def advance(self, num_tokens: int) -> None:
        """Counts `num_tokens` more as cached, after every layer has processed them."""
        assert self._length + num_tokens <= len(self._blocks) * self._pools.kv.block_size, "advance without prepare"
        self._length += num_tokens

    def evict(self, rows: EvictedRows, scores: Mapping[int, torch.Tensor] | None = None) -> None:
        """Keeps some of the newest rows, those of a segment that has just ended, and frees the others' places.

        Args:
            scores: see `KVBlockPool.keep`.
        """
        pool, start = self._pools.kv, self._length - rows.num_tokens
        assert start >= self._shared, "rows that others share are evicted"
        pool.keep(self._blocks, start, self._length, rows, scores or {})
        self._length = self._claimed = start + rows.num_kept
        self.num_evicted += rows.num_tokens - rows.num_kept
        unused = self._blocks[pool.blocks_for(self._length) :]
        if unused:
            pool.allocator.release(unused)
            self._blocks, self.table_key = self._blocks[: -len(unused)], object()
        if self._length % pool.block_size:
            pool.filled[self._blocks[-1]] = self._length % pool.block_size

    def borrow(self, num_drafts: int) -> None:
        """Borrows slots for a step of one token and `num_drafts` drafted ones; there must be so many spare slots."""
        assert not self._draft_slots, "drafts are borrowed already"
        spare = self._pools.states.spare
        self._draft_slots = [spare.pop() for _ in range(num_drafts)]

    def accept(self, num_drafts: int) -> None:
        """Counts the first drafted tokens as cached, continues from the states after them, and returns the slots."""
        slots = [self.slot, *self._draft_slots]
        self.advance(num_drafts)
        self._slot = slots.pop(num_drafts)
        self._pools.states.spare += slots
        self._draft_slots = []

    def adopt(self, blocks: Sequence[int], length: int) -> None:
        """Begins this empty sequence with shared blocks, whose first `length` places are filled."""
        assert self._length == 0, "only an empty sequence can adopt blocks"
        assert len(blocks) == self._pools.kv.blocks_for(length), "blocks and length don't match"
        self._pools.kv.allocator.share(blocks)
        self._pools.kv.allocator.release(self._blocks)
        self._blocks, self.table_key = array("i", blocks), object()
        self._length = self._claimed = self._shared = length

    def share(self, start: int, stop: int) -> tuple[int, ...]:
        """The blocks with places `start` to `stop`, with the caller as one more holder; it must release them."""
        assert 0 <= start < stop <= self._length
        size = self._pools.kv.block_size
        blocks = tuple(self._blocks[start // size : self._pools.kv.blocks_for(stop)])
        self._pools.kv.allocator.share(blocks)
        self._shared = max(self._shared, stop)
        return blocks

    def append(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Appends exported KV (see KVBlockPool.export).

        Raises:
            OutOfBlocksError: no room; nothing has changed.
        """
        num_tokens = tensors["k"].shape[1]
        self.prepare(num_tokens)
        self._pools.kv.restore(self._blocks, self._length, tensors)
        self.advance(num_tokens)

    def export(self) -> dict[str, torch.Tensor]:
        """Copies the KV of all tokens to host memory (see KVBlockPool.export)."""
        return self._pools.kv.export(self._blocks, 0, self._length)

    def free(self) -> None:
        """Releases blocks and slot; a second call does nothing."""
        if self._slot is None:
            return
        self._unclaim()
        self._pools.kv.allocator.release(self._blocks)
        self._pools.states.release(self._slot)
        self._pools.states.spare += self._draft_slots
        self._draft_slots = []
        self._blocks, self.table_key = array("i"), object()
        self._slot, self._length = None, 0

    def _must_copy_last(self) -> bool:
        """Whether the next token's block is partly filled and only another sequence may continue in it."""
        row = self._length % self._pools.kv.block_size
        if row == 0 or self._claimed > self._length:
            return False
        block = self._blocks[self._length // self._pools.kv.block_size]
        return self._pools.kv.allocator.count(block) > 1 and self._pools.kv.filled[block] != row

    def _copy_last(self, num_tokens: int) -> None:
        pool, index = self._pools.kv, self._length // self._pools.kv.block_size
        missing = max(pool.blocks_for(num_tokens) - len(self._blocks), 0)
        fresh = pool.take(1 + missing)
        pool.copy_block(self._blocks[index], fresh[0])
        pool.allocator.release([self._blocks[index]])
        self._blocks[index] = fresh[0]
        self._blocks.extend(fresh[1:])
        self.table_key = object()

    def _unclaim(self) -> None:
        """Lets another holder of the last shared block continue in it in place."""
        size = self._pools.kv.block_size
        if self._claimed > self._shared and self._shared % size:
            self._pools.kv.filled[self._blocks[self._shared // size]] = self._shared % size

    def _grow(self, num_tokens: int) -> None:
        missing = self._pools.kv.blocks_for(num_tokens) - len(self._blocks)
        if missing > 0:
            self._blocks.extend(self._pools.kv.take(missing, after=self._blocks[-1] if self._blocks else None))
            self.table_key = object()


class CachePools:
    """The memory of `num_slots` sequences with `num_tokens` tokens in total.

    Args:
        num_spare: slots for drafted tokens.
        num_tokens: tokens of KV, rounded up to whole blocks.
        dtype: of conv states, and of K and V if `kv_formats` is None; running recurrent states are float32.
        device: of all layers, or of each.
        kv_formats: of K and V.
        kept_states: dtype of recurrent states in checkpoints.
        kv_directory: the folder of a file that holds KV; None keeps KV in memory.

    Attributes:
        layers: by decoder layer, K and V of all blocks, or conv and recurrent states of all slots.
        block_size: tokens of a block.
        kv_formats: of K and V.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        num_spare: int = 0,
        num_tokens: int,
        dtype: torch.dtype,
        device: Devices = "cpu",
        block_size: int = DEFAULT_BLOCK_SIZE,
        kv_formats: KVFormats | None = None,
        kept_states: torch.dtype = torch.float32,
        kv_directory: Path | None = None,
    ) -> None:
        num_blocks = -(-num_tokens // block_size)
        formats = kv_formats or kv_formats_of("auto", dtype)
        where = {"device": device, "directory": kv_directory}
        self.kv = KVBlockPool(config, num_blocks=num_blocks, block_size=block_size, formats=formats, **where)
        slots = {"num_slots": num_slots, "num_spare": num_spare}
        self.states = StatePool(config, **slots, dtype=dtype, device=device, kept_dtype=kept_states)
        self.layers = {**self.kv.layers, **self.states.layers}
        self.block_size, self.kv_formats = self.kv.block_size, self.kv.formats

    def new_sequence(self) -> SequenceCache:
        """An empty cache.

        Raises:
            OutOfSlotsError: no slot is free.
        """
        return SequenceCache(self, slot=self.states.take())

    def check_integrity(self, sequences: Iterable[SequenceCache], cached: Iterable[Sequence[int]] = ()) -> None:
        """Asserts that `sequences` and the `cached` segments' blocks hold all that is in use, and that counts agree."""
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
