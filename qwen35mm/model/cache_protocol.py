"""What the decoder asks of a cache. `qwen35mm.cache` implements it; the model never imports that package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch


@dataclass(frozen=True)
class DecodeInputs:
    """One token for each of B sequences, as tensors on one device: no step waits for the host.

    A row that no sequence uses fills a fixed batch up: its slot and cache row are -1, its length is 0.

    Attributes:
        token_ids: [B] int64.
        positions: [B] int64, each token's place in all three rows of M-RoPE: length + rope_delta.
        slots: [B] int64, each sequence's row in the states.
        cache_rows: [B] int64, the row of the KV pool that each token's K and V go to.
        lengths: [B] int32, cached tokens with this one.
        block_table: [B, max_blocks] int32, each sequence's blocks in order.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cache_rows: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor

    def to(self, device: torch.device) -> DecodeInputs:
        """The same on another device, or itself."""
        if self.token_ids.device == device:
            return self
        return DecodeInputs(*(getattr(self, each.name).to(device) for each in fields(self)))


@dataclass(frozen=True)
class PrefillPlaces:
    """Where one sequence's next T tokens lie in the KV pool, as tensors on one device.

    Attributes:
        cache_rows: [T] int64, the row that each token's K and V go to.
        block_table: [num_blocks] int32, the sequence's blocks in order.
        length: cached tokens with the next T.
    """

    cache_rows: torch.Tensor
    block_table: torch.Tensor
    length: int

    def to(self, device: torch.device) -> PrefillPlaces:
        """The same on another device."""
        return PrefillPlaces(self.cache_rows.to(device), self.block_table.to(device), self.length)


class KVPool(Protocol):
    """The attention side of a pool."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all blocks, [num_blocks * block_size, Hkv, D] each."""
        ...


class Pools(Protocol):
    """The memory that sequences live in."""

    @property
    def kv(self) -> KVPool: ...

    @property
    def states(self) -> States: ...


class States(Protocol):
    """The recurrent side of a pool: tensors of all slots, one pair per linear-attention layer."""

    def conv(self, layer_idx: int) -> torch.Tensor:
        """[num_slots, C, kernel - 1]: the last inputs of the causal convolution, oldest first."""
        ...

    def recurrent(self, layer_idx: int) -> torch.Tensor:
        """[num_slots, Hv, K, V] float32."""
        ...


class SequenceCache(Protocol):
    """One sequence's hybrid cache: KV for the full-attention layers, states for the others."""

    @property
    def length(self) -> int:
        """Tokens in the cache; the cache_position of the next one."""
        ...

    @property
    def slot(self) -> int:
        """This sequence's row in `states`."""
        ...

    @property
    def states(self) -> States: ...

    @property
    def kv_pool(self) -> KVPool:
        """What its blocks are of."""
        ...

    def places(self, num_tokens: int) -> PrefillPlaces:
        """Where the next tokens go, after `prepare` of as many."""
        ...

    def prepare(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` more, or raises with nothing changed. Comes before any `append_kv`.

        Until `advance`, a second call for as many tokens finds the room of the first and changes nothing.
        """
        ...

    def append_kv(self, layer_idx: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes k and v ([T, Hkv, D]) after the cached tokens; returns all of them, the new ones included,
        as [length + T, Hkv, D]. `length` itself only moves with `advance`."""
        ...

    def conv_state(self, layer_idx: int) -> torch.Tensor:
        """[C, kernel - 1], a view that may be written to."""
        ...

    def recurrent_state(self, layer_idx: int) -> torch.Tensor:
        """[Hv, K, V] float32, a view that may be written to."""
        ...

    def advance(self, num_tokens: int) -> None:
        """Counts `num_tokens` as cached; all layers have seen them."""
        ...


def slot_runs(caches: Sequence[SequenceCache], *, single: bool = False) -> list[tuple[slice, slice]]:
    """Cuts a batch where its slots stop being consecutive: (rows of the batch, rows of the pool).

    A run's states are one view of the pool, so a decode step copies no state. A batch sorted by slot has
    the fewest runs: one where no slot between is idle.

    Args:
        single: cut everywhere, each sequence by itself.
    """
    runs: list[tuple[slice, slice]] = []
    start = 0
    for row in range(1, len(caches) + 1):
        if single or row == len(caches) or caches[row].slot != caches[row - 1].slot + 1:
            first = caches[start].slot
            runs.append((slice(start, row), slice(first, first + row - start)))
            start = row
    return runs
