"""What one pass through the decoder works on: tokens, their places, and the memory that their past lies in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from qwen35mm_kernels.kv_formats import KVFormats


@dataclass(frozen=True, eq=False)
class Batch:
    """The next N tokens of one sequence (a prefill), or one token of each of N sequences (a decode step).

    What the host knows of a prefill is a plain number; of a decode step it is a tensor, so that no step waits for the
    host. A row that no sequence uses fills a decode step up: its slot and its place are -1, its length is 0.

    Attributes:
        embeds: [N, hidden], the tokens' rows, vision embeddings in place; overwritten.
        positions: [3, N] int64, of M-RoPE; after a prompt, length + rope_delta in all three rows.
        slot_mapping: [N] int64, the row of the KV pool that each token's K and V go to.
        block_table: int32, the sequence's blocks in order: [num_blocks] of a prefill, [N, max_blocks] of a step.
        lengths: cached tokens with these: of a prefill, and [N] int32 of a step.
        slots: each sequence's row in the states: of a prefill, and [N] int64 of a step.
        pools: of each layer the memory of all sequences: K and V [num_blocks * block_size, Hkv, row] of an attention
            layer, conv states [num_slots, C, kernel - 1] and recurrent states [num_slots, Hv, K, V] of another.
        block_size: tokens of a block.
        kv_formats: of K and V; None where they are plain numbers of the model's type.
    """

    embeds: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor | int
    slots: torch.Tensor | int
    pools: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    block_size: int
    kv_formats: KVFormats | None = None

    def on(self, device: torch.device) -> Batch:
        """With what layers read beside the hidden states on another device."""
        if self.block_table.device == device:
            return self
        return replace(
            self,
            slot_mapping=self.slot_mapping.to(device),
            block_table=self.block_table.to(device),
            lengths=self.lengths if isinstance(self.lengths, int) else self.lengths.to(device),
            slots=self.slots if isinstance(self.slots, int) else self.slots.to(device),
        )
