"""What the decoder asks of a cache. `qwen35mm.cache` implements it; the model never imports that package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


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
