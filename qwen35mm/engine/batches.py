"""Batches for the model: a chunk of a prompt, or a decode step of several replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.model import Batch
from qwen35mm.model.adapters import Groups
from qwen35mm.model.batch import Watch
from qwen35mm_kernels.backend import runs_triton

# Rows of a step's numbers; every column is a sequence. So each row is dense.
_TOKEN, _POSITION, _SLOT, _SOURCE, _PLACE, _LENGTH, _STEP, _TABLE = range(8)
_UNUSED = (0, 0, -1, -1, -1, 0, 0, -1)
_FROM_SAMPLER = -1


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on a device, without waiting for the device's pending work.

    A copy from pageable memory waits for all of a GPU's pending work, and then the GPU waits for the host. A copy from
    pinned memory is queued like a launch.
    """
    return for_upload(values, device).to(device, non_blocking=device.type == "cuda")


def for_upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy in host memory, pinned for a GPU."""
    tensor = torch.tensor(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


@dataclass(frozen=True)
class PieceInputs:
    """A piece of a prompt: what the model reads besides embeddings, in one tensor, which is one copy to a device.

    Attributes:
        packed: int64. [5, num_rows]: token ids, positions in three rows, rows of the KV pool. Then the numbers of new
            and of cached tokens, the slot, and a zero. Then the block table, int32.
        num_rows: of the model's batch.
        num_tokens: the first rows; the others are padding.
        on_host: the four numbers, for a device whose operations read them on the host: it would be waited for.
    """

    packed: torch.Tensor
    num_rows: int
    num_tokens: int
    on_host: torch.Tensor | None = None

    @classmethod
    def of(cls, cache: SequenceCache, token_ids: np.ndarray, positions: np.ndarray, num_rows: int) -> PieceInputs:
        """A sequence's next tokens, for which it has room (`SequenceCache.prepare`).

        Args:
            token_ids: [T].
            positions: [3, T].
        """
        count, size = len(token_ids), cache.block_size
        blocks, places = np.array(cache.block_table, dtype=np.int32), np.arange(cache.length, cache.length + count)
        made = cls(torch.empty(_packed_size(num_rows, len(blocks)), dtype=torch.int64), num_rows, count)
        made.packed.numpy().fill(0)
        numbers, ends, table = (x.numpy() for x in made._parts())
        numbers[0, :count], numbers[1:4, :count], numbers[4] = token_ids, positions, -1
        numbers[4, :count] = blocks[places // size].astype(np.int64) * size + places % size
        ends[:3] = count, cache.length + count, cache.slot
        table[: len(blocks)] = blocks
        return made

    @classmethod
    def unused(cls, num_rows: int, max_blocks: int, device: torch.device) -> PieceInputs:
        """No token: the model changes nothing."""
        made = cls(torch.zeros(_packed_size(num_rows, max_blocks), dtype=torch.int64, device=device), num_rows, 0)
        made._parts()[0][4] = -1
        return made

    @property
    def token_ids(self) -> torch.Tensor:
        """[num_rows] int64."""
        return self._parts()[0][0]

    def to(self, device: torch.device) -> PieceInputs:
        """A copy on a device, without waiting for the device's pending work."""
        on_host = None if runs_triton(device) else self._parts()[1]
        return replace(self, packed=self._staged(device).to(device, non_blocking=True), on_host=on_host)

    def take(self, other: PieceInputs) -> None:
        """Copies another piece of as many rows from the host."""
        self.packed[: len(other.packed)].copy_(other._staged(self.packed.device), non_blocking=True)

    def batch(
        self,
        pools: CachePools | SequenceCache,
        embeds: torch.Tensor,
        adapters: Groups = (),
        watch: Watch | None = None,
    ) -> Batch:
        """The model's batch for the rows' embeddings [num_rows, hidden], which it overwrites.

        Args:
            adapters: the sequence's.
            watch: see `Batch`; sees the tokens alone.
        """
        numbers, ends, block_table = self._parts()
        ends = ends if self.on_host is None else self.on_host
        count = self.num_tokens

        def watch_tokens(layer_idx: int, x: torch.Tensor, q: torch.Tensor) -> None:
            assert watch is not None
            watch(layer_idx, x[:count], q[:count])

        return Batch(
            embeds,
            numbers[1:4],
            slot_mapping=numbers[4],
            block_table=block_table,
            lengths=ends[1:2],
            slots=ends[2:3],
            counts=ends[:1],
            pools=pools.layers,
            block_size=pools.block_size,
            kv_formats=pools.kv_formats,
            adapters=adapters,
            watch=watch and watch_tokens,
        )

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views: [5, num_rows], [4], and the block table."""
        numbers, ends, table = self.packed.split([5 * self.num_rows, 4, len(self.packed) - 5 * self.num_rows - 4])
        return numbers.view(5, -1), ends, table.view(torch.int32)

    def _staged(self, device: torch.device) -> torch.Tensor:
        """A copy from pageable memory waits for all of a GPU's pending work, and then the GPU waits for the host. A
        copy from pinned memory is queued like a launch."""
        return self.packed.pin_memory() if device.type == "cuda" else self.packed


def _packed_size(num_rows: int, num_blocks: int) -> int:
    return 5 * num_rows + 4 + -(-num_blocks // 2)


def prefill_batch(cache: SequenceCache, embeds: torch.Tensor, positions: torch.Tensor, adapters: Groups = ()) -> Batch:
    """A sequence's next tokens without padding, outside an engine.

    Args:
        embeds: [T, hidden]; the model overwrites it.
        positions: [3, T] int64.
        adapters: the sequence's.
    """
    token_ids = np.zeros(len(embeds), dtype=np.int64)
    piece = PieceInputs.of(cache, token_ids, positions.cpu().numpy(), len(embeds))
    return piece.to(embeds.device).batch(cache, embeds, adapters)


@dataclass(frozen=True)
class StepInputs:
    """A decode step's inputs, written by the host.

    Attributes:
        numbers: [8, B] int64.
        block_table: [B, max_blocks] int32.
        table_keys: [B], identifies each row's block table; a reply gets a new table every 64 tokens.
    """

    numbers: torch.Tensor
    block_table: torch.Tensor
    table_keys: list[object]

    @classmethod
    def unused(cls, size: int, max_blocks: int) -> StepInputs:
        """`size` unused rows."""
        table = torch.zeros(size, max_blocks, dtype=torch.int32)
        return cls(torch.tensor(_UNUSED)[:, None].repeat(1, size), table, [None] * size)

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> StepInputs:
        """A copy with its tensors moved by `move`."""
        return StepInputs(move(self.numbers), move(self.block_table), [*self.table_keys])

    def take(self, other: StepInputs) -> None:
        """Copies another's numbers, and its block tables from the first to the last changed used row."""
        self.numbers.copy_(other.numbers, non_blocking=True)
        keys = zip(other.numbers[_SLOT].tolist(), self.table_keys, other.table_keys, strict=True)
        changed = [row for row, (slot, old, new) in enumerate(keys) if slot >= 0 and new is not old]
        if changed:
            rows = slice(changed[0], changed[-1] + 1)
            self.block_table[rows].copy_(other.block_table[rows], non_blocking=True)
            self.table_keys[rows] = other.table_keys[rows]

    def set(
        self,
        row: int,
        cache: SequenceCache,
        *,
        token_id: int | None,
        ahead: int = 0,
        step: int = 0,
        table: int | None = None,
    ) -> None:
        """Enters a token of a sequence, which has room for it.

        Args:
            token_id: the input token; None if only the sampler knows it yet.
            ahead: the number of tokens before it in this step.
            step: the number of the token to choose, in its reply.
            table: the reply's row in the sampler's tables; None if the host chooses the token.
        """
        place, slots = cache.length + ahead, (cache.slot, *cache.draft_slots)
        self.numbers[:, row] = torch.tensor(
            [
                _FROM_SAMPLER if token_id is None else token_id,
                cache.next_position + ahead,
                slots[ahead],
                slots[max(ahead - 1, 0)],
                cache.row(place),
                place + 1,
                step,
                -1 if table is None else table,
            ]
        )
        if self.table_keys[row] is not cache.table_key:
            blocks = cache.block_table
            self.block_table[row, : len(blocks)] = torch.from_numpy(np.asarray(blocks))
            self.table_keys[row] = cache.table_key

    def token_ids(self, newest: torch.Tensor) -> torch.Tensor:
        """[B] int64, each row's input token; from the sampler's `newest` [num_rows + 1] if need be."""
        token_ids, tables = self.numbers[_TOKEN], self.numbers[_TABLE]
        return torch.where(token_ids == _FROM_SAMPLER, newest[tables], token_ids)

    def positions(self) -> torch.Tensor:
        """[3, B] int64, as of `Batch`."""
        return self.numbers[_POSITION].expand(3, -1)

    def sampled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[B] int64 each: rows of the sampler's tables, -1 where the host chooses, and the tokens' numbers."""
        return self.numbers[_TABLE], self.numbers[_STEP]

    def batch(
        self, pools: CachePools, embeds: torch.Tensor, *, has_drafts: bool = False, adapters: Groups = ()
    ) -> Batch:
        """The model's batch for the tokens' embeddings [B, hidden].

        Args:
            has_drafts: whether a sequence may have several rows.
            adapters: of the rows.
        """
        return Batch(
            embeds,
            self.positions(),
            slot_mapping=self.numbers[_PLACE],
            block_table=self.block_table,
            lengths=self.numbers[_LENGTH].to(torch.int32),
            slots=self.numbers[_SLOT],
            pools=pools.layers,
            block_size=pools.kv.block_size,
            kv_formats=pools.kv.formats,
            sources=self.numbers[_SOURCE] if has_drafts else None,
            adapters=adapters,
        )
