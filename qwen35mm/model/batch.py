"""The input of one pass through the decoder: tokens, their positions, and the pools that hold their past."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from qwen35mm.model.adapters import Groups
from qwen35mm_kernels.backend import runs_triton
from qwen35mm_kernels.kv_formats import KVFormats

# Called in an attention layer with its index, its inputs [N, hidden] and its queries [N, heads, head_dim].
Watch = Callable[[int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class Batch:
    """The next tokens of one sequence (a prefill), or rows of several sequences (a decode step): N rows.

    A row of a decode step is a sequence's next token or, in the rows after it, one that was drafted behind it. All
    numbers are tensors, so that nothing waits for the host. Unused rows pad a decode step: their slots are -1 and their
    length is 0. A prefill is padded at its end, with rows whose `slot_mapping` is -1.

    Attributes:
        embeds: [N, hidden], token embeddings with the vision embeddings in place; overwritten.
        positions: [3, N] int64, of M-RoPE; after a prompt, length + rope_delta in all three rows.
        slot_mapping: [N] int64, the row of the KV pool for each token's K and V; -1 for padding.
        block_table: int32, the sequence's blocks in order: prefill [num_blocks], decode step [N, max_blocks].
        lengths: cached tokens, including these and those of earlier rows: prefill [1] int64, decode step [N] int32.
        slots: where the states after these tokens go in the state pools: prefill [1], decode step [N], int64.
        pools: by layer, the memory of all sequences. Attention layers: K and V [num_blocks * block_size, Hkv, row].
            GDN layers: conv states [num_slots, C, kernel - 1] and recurrent states [num_slots, Hv, K, V].
        block_size: tokens in a block.
        counts: [1] int64, a prefill's tokens; None in a decode step.
        kv_formats: formats of K and V; None where they have the model's dtype.
        sources: [N] int64, the slot that each row of a decode step continues from; None for its own.
        adapters: the rows that have one.
        watch: sees a prefill's attention layers, in order.
    """

    embeds: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    pools: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    block_size: int
    counts: torch.Tensor | None = None
    kv_formats: KVFormats | None = None
    sources: torch.Tensor | None = None
    adapters: Groups = ()
    watch: Watch | None = None

    @property
    def is_prefill(self) -> bool:
        return self.counts is not None

    def on(self, device: torch.device) -> Batch:
        """The same batch with all that layers read, except the hidden states, on another device."""
        if self.block_table.device == device:
            return self
        # Where a prefill's numbers are read on the host, they stay there.
        stays = self.counts is not None and self.counts.device.type == "cpu" and not runs_triton(device)
        numbers = self.lengths, self.slots, self.counts
        lengths, slots, counts = numbers if stays else (x if x is None else x.to(device) for x in numbers)
        assert lengths is not None
        assert slots is not None
        return replace(
            self,
            slot_mapping=self.slot_mapping.to(device),
            block_table=self.block_table.to(device),
            lengths=lengths,
            slots=slots,
            counts=counts,
            sources=None if self.sources is None else self.sources.to(device),
        )
