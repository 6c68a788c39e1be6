"""KV of the full-attention layers, in blocks that sequences share by reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from qwen35mm.cache.placement import Devices, layer_devices, stack_on_host
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ContextTooLongError

# Runs of consecutive blocks: (first block, number of blocks).
Runs = tuple[tuple[int, int], ...]


class OutOfBlocksError(ContextTooLongError):
    """The KV pool hasn't enough free blocks; the message has the arithmetic. Nothing was changed."""


class BlockAllocator:
    """Which of `num_blocks` blocks are in use and by how many: pure bookkeeping, no tensors.

    Consecutive blocks matter: a sequence whose blocks lie side by side is read as one view of the pool, without a copy.
    """

    def __init__(self, num_blocks: int) -> None:
        self._counts = [0] * num_blocks
        self._num_free = num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return self._num_free

    def count(self, block: int) -> int:
        """How many hold this block; 0 is free."""
        return self._counts[block]

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one holder to each block; they must be in use."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is free and can't be shared"
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one holder from each block; a block without holders is free."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is released more often than it was taken"
            self._counts[block] -= 1
            self._num_free += self._counts[block] == 0

    def take(self, count: int, *, after: int | None = None, exact: bool = False) -> list[int]:
        """Takes `count` free blocks, side by side where that can be.

        First choice: right behind the block `after`, so that a growing sequence stays in one run. Next, one run
        that holds them all: the smallest that fits where the size is final (`exact`), else in the middle of the
        largest, which leaves room to grow to this sequence and to the one before it. Last, the largest runs.

        Args:
            after: the sequence's last block so far.
            exact: the sequence won't grow beyond these blocks.
        """
        assert 0 < count <= self._num_free, f"take({count}) with {self._num_free} free blocks"
        taken: list[int] = []
        block = self.num_blocks if after is None else after + 1
        while len(taken) < count and block < self.num_blocks and self._counts[block] == 0:
            taken.append(block)
            block += 1
        for chosen in taken:
            self._counts[chosen] = 1
        while len(taken) < count:
            wanted = count - len(taken)
            runs = self._free_runs()
            fitting = [run for run in runs if run[1] >= wanted]
            if fitting and exact:
                start, _ = min(fitting, key=lambda run: run[1])
            elif fitting:
                start, length = max(fitting, key=lambda run: run[1])
                # At the pool's very start nobody else grows towards us.
                start += 0 if start == 0 else (length - wanted) // 2
            else:
                start, wanted = max(runs, key=lambda run: run[1])
            for chosen in range(start, start + wanted):
                self._counts[chosen] = 1
                taken.append(chosen)
        self._num_free -= count
        return taken

    def _free_runs(self) -> list[tuple[int, int]]:
        """(start, length) of every run of free blocks."""
        runs: list[tuple[int, int]] = []
        start = None
        for block, count in enumerate([*self._counts, 1]):
            if count == 0 and start is None:
                start = block
            elif count != 0 and start is not None:
                runs.append((start, block - start))
                start = None
        return runs

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Asserts that the counts are exactly `holders` (block -> how many sequences and cached segments list it)."""
        expected = [0] * self.num_blocks
        for block, count in holders.items():
            expected[block] = count
        if self._counts != expected:  # told block by block only where something is wrong
            wrong = [
                f"block {block} is counted {count} times and held {held} times"
                for block, (count, held) in enumerate(zip(self._counts, expected, strict=True))
                if count != held
            ]
            raise AssertionError("; ".join(wrong[:8]))
        assert self._num_free == self._counts.count(0), "the number of free blocks is off"


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

    @property
    def layers(self) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
        """K and V of all blocks of each layer, [num_blocks * block_size, Hkv, D] each."""
        return self._kv

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
