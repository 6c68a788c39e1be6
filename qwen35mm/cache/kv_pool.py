"""KV of the full-attention layers, in blocks that sequences share by reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from qwen35mm.cache.block_allocator import BlockAllocator
from qwen35mm.cache.placement import Devices, layer_devices, stack_on_host
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ContextTooLongError

# Runs of consecutive blocks: (first block, number of blocks).
Runs = tuple[tuple[int, int], ...]


class OutOfBlocksError(ContextTooLongError):
    """The KV pool hasn't enough free blocks; the message has the arithmetic. Nothing was changed."""


class KVBlockPool:
    """K and V of every full-attention layer, [num_blocks * block_size, Hkv, D] each, and who holds which block.

    A block index means the same block in every layer. On a CPU the memory is only taken up as blocks are first
    written.

    A block may be shared while it is partly filled: `filled` says how many of its rows belong to anybody. The one
    sequence that is exactly there may go on in place, so that a conversation which grows from turn to turn stays in
    one run of blocks; every other one copies the block first.

    Args:
        num_blocks, block_size: capacity; a block holds `block_size` tokens.
        device: of all layers, or of each.

    Attributes:
        device: the first layer's.
        reclaim: called with the number of blocks that are missing, before `take` fails for want of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: Devices = "cpu",
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1; got {num_blocks} and {block_size}.")
        text = config.text
        shape = (num_blocks * block_size, text.num_key_value_heads, text.head_dim)
        self.block_size = block_size
        self.block_bytes = block_size * config.kv_bytes_per_token(dtype)
        self.allocator = BlockAllocator(num_blocks)
        self.reclaim: Callable[[int], None] | None = None
        self._filled = [0] * num_blocks
        places = layer_devices(text, device)
        self.device = places[text.attention_layers[0]]
        self._kv = {
            layer_idx: (
                torch.empty(shape, dtype=dtype, device=places[layer_idx]),
                torch.empty(shape, dtype=dtype, device=places[layer_idx]),
            )
            for layer_idx in text.attention_layers
        }

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.block_bytes // self.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.allocator.num_blocks * self.block_size

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all blocks, [num_blocks * block_size, Hkv, D] each."""
        return self._kv[layer_idx]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int, *, after: int | None = None, exact: bool = False) -> list[int]:
        """Takes `count` free blocks (see BlockAllocator.take).

        Raises:
            OutOfBlocksError: fewer are free.
        """
        if count > self.allocator.num_free and self.reclaim is not None:
            self.reclaim(count - self.allocator.num_free)
        free = self.allocator.num_free
        if count > free:
            raise OutOfBlocksError(
                f"The KV cache is full: {count * self.block_size} more tokens need {count} blocks of "
                f"{self.block_size} tokens ({_mib(count * self.block_bytes)}), and {free} of "
                f"{self.allocator.num_blocks} are free ({_mib(free * self.block_bytes)}). "
                "Shorten the conversation or give the cache more memory."
            )
        blocks = self.allocator.take(count, after=after, exact=exact)
        for block in blocks:
            self._filled[block] = 0
        return blocks

    def filled(self, block: int) -> int:
        """Rows of the block that belong to somebody, from its start."""
        return self._filled[block]

    def set_filled(self, block: int, num_rows: int) -> None:
        """Claims rows of a block, or gives claimed ones up that nobody else knows of."""
        assert 0 <= num_rows <= self.block_size
        self._filled[block] = num_rows

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block's K and V in all layers."""
        size = self.block_size
        for pair in self._kv.values():
            for rows in pair:
                rows[target * size : (target + 1) * size] = rows[source * size : (source + 1) * size]

    def write(self, layer_idx: int, runs: Runs, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes k and v ([T, Hkv, D]) at places start ... start + T of a sequence that lies in `runs`."""
        keys, values = self._kv[layer_idx]
        done = 0
        for rows in self._rows(runs, start, start + k.shape[0]):
            count = rows.stop - rows.start
            keys[rows] = k[done : done + count]
            values[rows] = v[done : done + count]
            done += count

    def read(self, layer_idx: int, runs: Runs, length: int, *, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence's tokens `start` to `length`, [n, Hkv, D]: views where they lie in one run."""
        keys, values = self._kv[layer_idx]
        rows = self._rows(runs, start, length)
        if len(rows) == 1:
            return keys[rows[0]], values[rows[0]]
        return torch.cat([keys[part] for part in rows]), torch.cat([values[part] for part in rows])

    def export(self, blocks: Sequence[int], start: int, stop: int) -> dict[str, torch.Tensor]:
        """Copies places `start` to `stop` of these blocks to host memory: k and v, [attention layers, n, Hkv, D]."""
        runs = find_runs(blocks)
        pairs = [self.read(layer_idx, runs, stop, start=start) for layer_idx in self._kv]
        return {name: stack_on_host([pair[index] for pair in pairs]) for index, name in enumerate(("k", "v"))}

    def fits(self, tensors: Mapping[str, torch.Tensor], num_tokens: int) -> bool:
        """Whether tensors are what `export` gives for that many tokens of this pool."""
        keys, _ = next(iter(self._kv.values()))
        shape = (len(self._kv), num_tokens, *keys.shape[1:])
        return set(tensors) == {"k", "v"} and all(x.shape == shape and x.dtype == keys.dtype for x in tensors.values())

    def restore(self, blocks: Sequence[int], start: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes what `export` gave at places from `start` on."""
        runs = find_runs(blocks)
        for index, layer_idx in enumerate(self._kv):
            self.write(layer_idx, runs, start, tensors["k"][index], tensors["v"][index])

    def _rows(self, runs: Runs, start: int, stop: int) -> list[slice]:
        """The pool's rows (one a token) of a sequence's places start ... stop."""
        rows, passed = [], 0
        for block, count in runs:
            first, last = max(start - passed, 0), min(stop - passed, count * self.block_size)
            if first < last:
                base = block * self.block_size
                rows.append(slice(base + first, base + last))
            passed += count * self.block_size
        return rows or [slice(0, 0)]


def find_runs(blocks: Sequence[int]) -> Runs:
    """Cuts a sequence's blocks where they stop being consecutive: (first block, number of blocks) of each run."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and block == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
