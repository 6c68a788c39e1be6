"""KV of the full-attention layers in blocks that sequences share by reference."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from qwen35mm.cache.eviction import EvictedRows, key_scores, standard
from qwen35mm.cache.kv_files import map_tensors
from qwen35mm.cache.placement import Devices, layer_devices, mib, moved, stack, to_device
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ContextTooLongError
from qwen35mm_kernels.kv_formats import KVFormats

DEFAULT_BLOCK_SIZE = 64
# Bytes per transfer to a GPU: the memory that torch pins for it stays pinned.
STAGED_BYTES = 64 << 20


class OutOfBlocksError(ContextTooLongError):
    """The KV pool hasn't enough free blocks; the message has the arithmetic. Nothing has changed."""


class BlockAllocator:
    """Counts the holders of `num_blocks` blocks: pure bookkeeping, no tensors.

    Consecutive blocks matter: a sequence with adjacent blocks is read as one view of the pool, without a copy.
    """

    def __init__(self, num_blocks: int) -> None:
        self._counts = array("i", bytes(4 * num_blocks))
        self._num_free = num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return self._num_free

    def count(self, block: int) -> int:
        """How many holders this block has; 0 is free."""
        return self._counts[block]

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one holder to each block; the blocks must be in use."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is free and can't be shared"
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes one holder from each block; a block without holders is free."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is released more often than it was taken"
            self._counts[block] -= 1
            self._num_free += self._counts[block] == 0

    def take(self, count: int, *, after: int | None = None) -> list[int]:
        """Takes `count` free blocks, adjacent if possible.

        First choice: directly after the block `after`, so that a growing sequence stays in one run. Next, the middle of
        the largest run that holds them all, which leaves room to grow for this sequence and the one before it. Last,
        the largest runs.

        Args:
            after: the sequence's last block so far.
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
            start, length = self._largest_free_run()
            wanted = min(wanted, length)
            # At the pool's start no other sequence grows towards this one.
            start += 0 if start == 0 else (length - wanted) // 2
            for chosen in range(start, start + wanted):
                self._counts[chosen] = 1
                taken.append(chosen)
        self._num_free -= count
        return taken

    def _largest_free_run(self) -> tuple[int, int]:
        """(start, length) of the first of the longest runs of free blocks."""
        held = np.flatnonzero(np.frombuffer(self._counts, dtype=np.int32))
        bounds = np.concatenate([[-1], held, [self.num_blocks]])
        lengths = np.diff(bounds) - 1
        longest = int(lengths.argmax())
        return int(bounds[longest]) + 1, int(lengths[longest])

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Asserts that the counts are exactly `holders` (block -> how many sequences and cached segments list it)."""
        expected = array("i", bytes(4 * self.num_blocks))
        for block, count in holders.items():
            expected[block] = count
        if self._counts != expected:  # compare block by block only if something is wrong
            wrong = [
                f"block {block} is counted {count} times and held {held} times"
                for block, (count, held) in enumerate(zip(self._counts, expected, strict=True))
                if count != held
            ]
            raise AssertionError("; ".join(wrong[:8]))
        assert self._num_free == self._counts.count(0), "the number of free blocks is off"


class KVBlockPool:
    """K and V of every full-attention layer, [num_blocks * block_size, Hkv, row_width] each, and their blocks' holders.

    A row contains codes and their scales (see `KVFormat`), so everything here moves rows as they are.

    A block index means the same block in every layer. On a CPU memory is only used once blocks are written.

    A partly filled block may be shared: `filled` says how many of its rows are in use. Only a sequence that ends
    exactly there may continue in place, so a conversation that grows from turn to turn stays in one run of blocks; any
    other sequence copies the block first.

    Args:
        num_blocks, block_size: capacity; a block holds `block_size` tokens.
        formats: of K and V.
        device: of all layers, or of each.
        directory: the folder of a file that holds everything instead of memory, on a CPU.

    Raises:
        ConfigError: the folder can't hold that file.

    Attributes:
        layers: K and V of all blocks of each layer.
        formats: of K and V.
        filled: for each block, how many rows from its start are in use.
        reclaim: called with the number of missing blocks before `take` fails.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        formats: KVFormats,
        device: Devices = "cpu",
        directory: Path | None = None,
    ) -> None:
        assert min(num_blocks, block_size) >= 1
        text = config.text
        self.formats = formats
        self.block_size = block_size
        self.block_bytes = block_size * config.kv_bytes_per_token(*formats)
        self.allocator = BlockAllocator(num_blocks)
        self.reclaim: Callable[[int], None] | None = None
        self.filled = [0] * num_blocks
        on = layer_devices(text, device)

        heads, rows = text.num_key_value_heads, num_blocks * block_size
        wanted = [((rows, heads, format.row_width(text.head_dim)), format.dtype) for format in formats]
        if directory is not None:
            made = iter(map_tensors(directory, wanted * len(text.attention_layers)))
        else:
            made = (
                torch.empty(shape, dtype=dtype, device=on[layer_idx])
                for layer_idx in text.attention_layers
                for shape, dtype in wanted
            )
        self.layers = {layer_idx: (next(made), next(made)) for layer_idx in text.attention_layers}
        # For each device, the indices of its layers in `layers`.
        self._by_device: dict[torch.device, list[int]] = {}
        for place, (keys, _) in enumerate(self.layers.values()):
            self._by_device.setdefault(keys.device, []).append(place)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return self.block_bytes // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int, *, after: int | None = None) -> list[int]:
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
                f"{self.block_size} tokens ({mib(count * self.block_bytes)}), and {free} of "
                f"{self.allocator.num_blocks} are free ({mib(free * self.block_bytes)}). "
                "Shorten the conversation or give the cache more memory."
            )
        blocks = self.allocator.take(count, after=after)
        for block in blocks:
            self.filled[block] = 0
        return blocks

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block's K and V in all layers."""
        size = self.block_size
        for pair in self.layers.values():
            for rows in pair:
                rows[target * size : (target + 1) * size] = rows[source * size : (source + 1) * size]

    def export(self, blocks: Sequence[int], start: int, stop: int) -> dict[str, torch.Tensor]:
        """Copies places `start` to `stop` of these blocks to host memory: k and v, [attention layers, n, Hkv, row]."""
        rows = self._rows(blocks, start, stop)
        there = {device: moved(rows, device) for device in self._by_device}
        pairs = [[each.index_select(0, there[each.device]) for each in pair] for pair in self.layers.values()]
        return {name: stack([pair[index] for pair in pairs]).to("cpu") for index, name in enumerate(("k", "v"))}

    def fits(self, tensors: Mapping[str, torch.Tensor], num_tokens: int) -> bool:
        """Whether tensors have the form of `export` for `num_tokens` tokens of this pool, and finite values."""
        if set(tensors) != {"k", "v"}:
            return False
        pair = next(iter(self.layers.values()))
        return all(
            x.shape == (len(self.layers), num_tokens, *rows.shape[1:]) and x.dtype == rows.dtype and format.is_finite(x)
            for x, rows, format in zip((tensors["k"], tensors["v"]), pair, self.formats, strict=True)
        )

    def restore(self, blocks: Sequence[int], start: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes tensors of `export` at places from `start` on; each transfer to a GPU has many layers and tokens."""
        rows = self._rows(blocks, start, start + tensors["k"].shape[1])
        pairs = list(self.layers.values())
        for device, layers in self._by_device.items():
            size = max(len(rows), 1) if device.type == "cpu" else max(STAGED_BYTES // self.token_bytes, 1)
            for at in range(0, len(rows), size):
                part = {
                    f"{name}{index}": tensors[name][index, at : at + size] for name in ("k", "v") for index in layers
                }
                part["rows"] = rows[at : at + size]
                if device.type != "cpu":
                    part = to_device(part, device)
                for index in layers:
                    for each, name in zip(pairs[index], ("k", "v"), strict=True):
                        each.index_copy_(0, part["rows"], part[f"{name}{index}"])

    def keep(
        self, blocks: Sequence[int], start: int, stop: int, kept: EvictedRows, scores: Mapping[int, torch.Tensor]
    ) -> None:
        """Moves the rows that each head keeps of places `start` to `stop` to the first of these places, in order.

        Args:
            scores: by layer, [stop - start, Hkv] float32, of gates; they add to the keys' scores.
        """
        rows = self._rows(blocks, start, stop)
        there = {device: moved(rows, device) for device in self._by_device}
        for layer_idx, pair in self.layers.items():
            places = there[pair[0].device]
            k, v = (each.index_select(0, places) for each in pair)
            found = key_scores(self.formats[0].dequantise(k, torch.float32))
            if layer_idx in scores:
                found += standard(scores[layer_idx])
            chosen = kept.choose(found)[..., None]
            for rows_of, each in zip(pair, (k, v), strict=True):
                rows_of.index_copy_(0, places[: len(chosen)], each.gather(0, chosen.expand(-1, -1, each.shape[-1])))

    def _rows(self, blocks: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """The pool's rows (one per token) for places `start` to `stop` of these blocks."""
        first = start // self.block_size
        used = torch.tensor(blocks[first : self.blocks_for(stop)], dtype=torch.int64)
        places = torch.arange(start, stop)
        return used[places // self.block_size - first] * self.block_size + places % self.block_size
