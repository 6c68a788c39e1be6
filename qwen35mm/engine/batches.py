"""Batches for the model: a chunk of a prompt, or a decode step of several replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.model import Batch
from qwen35mm.model.adapters import Groups
from qwen35mm.model.batch import Watch

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


def prefill_batch(
    cache: SequenceCache,
    embeds: torch.Tensor,
    positions: torch.Tensor,
    adapters: Groups = (),
    watch: Watch | None = None,
) -> Batch:
    """A sequence's next tokens; it must have room for them (`SequenceCache.prepare`).

    Args:
        embeds: [T, hidden]; the model overwrites it.
        positions: [3, T] int64.
        adapters: the sequence's.
        watch: see `Batch`.
    """
    size, stop, device = cache.block_size, cache.length + len(embeds), embeds.device
    blocks, places = np.array(cache.block_table, dtype=np.int32), np.arange(cache.length, stop)
    rows = blocks[places // size].astype(np.int64) * size + places % size
    return Batch(
        embeds,
        positions,
        slot_mapping=upload(rows, device),
        block_table=upload(blocks, device),
        lengths=stop,
        slots=cache.slot,
        pools=cache.layers,
        block_size=size,
        kv_formats=cache.kv_formats,
        adapters=adapters,
        watch=watch,
    )


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
