"""One sequence's hybrid cache: its blocks in the KV pool, its slot in the state pool, its length and rope_delta."""

from __future__ import annotations

import torch

from qwen35mm.cache.kv_pool import KVBlockPool, Runs, find_runs
from qwen35mm.cache.state_pool import StatePool


class SequenceCache:
    """What the model reads and writes while it runs one sequence (model.cache_protocol.SequenceCache).

    Made empty by `CachePools.new_sequence`; `clone` shares its blocks, `free` gives everything back.

    Attributes:
        rope_delta: next M-RoPE position minus next cache_position, once the prompt is in; it belongs to the
            cached tokens and goes wherever they go.
    """

    def __init__(self, kv_pool: KVBlockPool, state_pool: StatePool, *, slot: int) -> None:
        self.rope_delta = 0
        self._kv_pool = kv_pool
        self._state_pool = state_pool
        self._slot: int | None = slot
        self._blocks: list[int] = []
        self._runs: Runs = ()
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens in the cache; the cache_position of the next one."""
        return self._length

    @property
    def next_position(self) -> int:
        """The M-RoPE position (all three rows) of the next text token: length + rope_delta."""
        return self._length + self.rope_delta

    @property
    def slot(self) -> int:
        """This sequence's row in `states`."""
        assert self._slot is not None, "this cache was freed"
        return self._slot

    @property
    def states(self) -> StatePool:
        return self._state_pool

    @property
    def block_table(self) -> tuple[int, ...]:
        """The pool's blocks that hold this sequence, in order; the last ones may be empty yet."""
        return tuple(self._blocks)

    @property
    def freed(self) -> bool:
        return self._slot is None

    def reserve(self, num_tokens: int) -> None:
        """Takes blocks for `num_tokens` tokens in all, side by side where that can be; what is there counts.

        Optional: it keeps a sequence whose final length is known in one run, which a CPU reads without a copy.

        Raises:
            OutOfBlocksError: there aren't as many; nothing has changed.
        """
        assert not self.freed, "this cache was freed"
        self._grow(num_tokens, exact=True)

    def prepare(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` more and makes the block they start in this sequence's own.

        Raises:
            OutOfBlocksError: no room; nothing has changed.
        """
        assert not self.freed, "this cache was freed"
        pool, index = self._kv_pool, self._length // self._kv_pool.block_size
        partial = self._length % pool.block_size > 0
        if num_tokens == 0 or not partial or pool.allocator.count(self._blocks[index]) == 1:
            self._grow(self._length + num_tokens)
            return
        # Only the last filled block can be shared and have room: `clone` shares no empty blocks.
        missing = max(pool.blocks_for(self._length + num_tokens) - len(self._blocks), 0)
        fresh = pool.take(1 + missing)
        pool.copy_block(self._blocks[index], fresh[0])
        pool.allocator.release([self._blocks[index]])
        self._set_blocks([*self._blocks[:index], fresh[0], *self._blocks[index + 1 :], *fresh[1:]])

    def append_kv(self, layer_idx: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes k and v ([T, Hkv, D]) after the cached tokens, into room made by `prepare`.

        Returns:
            K and V of all tokens, the new ones included: [length + T, Hkv, D], views where possible.
        """
        stop = self._length + k.shape[0]
        assert stop <= len(self._blocks) * self._kv_pool.block_size, "append_kv without prepare"
        self._kv_pool.write(layer_idx, self._runs, self._length, k, v)
        return self._kv_pool.read(layer_idx, self._runs, stop)

    def kv(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the cached tokens, [length, Hkv, D]; not to be written to."""
        return self._kv_pool.read(layer_idx, self._runs, self._length)

    def conv_state(self, layer_idx: int) -> torch.Tensor:
        """[C, kernel - 1] in the model's dtype, a view of the pool."""
        return self._state_pool.conv(layer_idx)[self.slot]

    def recurrent_state(self, layer_idx: int) -> torch.Tensor:
        """[Hv, K, V] float32, a view of the pool."""
        return self._state_pool.recurrent(layer_idx)[self.slot]

    def advance(self, num_tokens: int) -> None:
        """Counts `num_tokens` as cached; every layer has seen them."""
        assert self._length + num_tokens <= len(self._blocks) * self._kv_pool.block_size, "advance without prepare"
        self._length += num_tokens

    def clone(self) -> SequenceCache:
        """A sequence that goes on from here on its own: blocks shared, states copied.

        Whoever writes first into the shared last, partial block gets a copy of it.

        Raises:
            OutOfSlotsError: no state slot is free; nothing has changed.
        """
        slot = self._state_pool.take_copy(self.slot)
        other = SequenceCache(self._kv_pool, self._state_pool, slot=slot)
        other.rope_delta, other._length = self.rope_delta, self._length
        other._set_blocks(self._blocks[: self._kv_pool.blocks_for(self._length)])
        self._kv_pool.allocator.share(other._blocks)
        return other

    def free(self) -> None:
        """Gives blocks and slot back; a second call does nothing."""
        if self._slot is None:
            return
        self._kv_pool.allocator.release(self._blocks)
        self._state_pool.release(self._slot)
        self._set_blocks([])
        self._slot, self._length = None, 0

    def _grow(self, num_tokens: int, *, exact: bool = False) -> None:
        missing = self._kv_pool.blocks_for(num_tokens) - len(self._blocks)
        if missing > 0:
            last = self._blocks[-1] if self._blocks else None
            self._set_blocks(self._blocks + self._kv_pool.take(missing, after=last, exact=exact))

    def _set_blocks(self, blocks: list[int]) -> None:
        self._blocks, self._runs = blocks, find_runs(blocks)
