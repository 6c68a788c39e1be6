"""A pool of KV blocks, and a projection to write into one. What no sequence holds is NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.kernels.compare import sliced

BLOCK_SIZE = 64
EPS = 1e-6


class Pool:
    """Sequences of the given lengths; a block's rest and other blocks are NaN.

    Entries of the block table past a sequence's end are no block at all.

    Args:
        in_order: a sequence's blocks follow each other; else they are picked at random.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        max_blocks: int = 0,
        in_order: bool = False,
    ) -> None:
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        total = sum(num_blocks) + 3
        free = (torch.arange(total) if in_order else torch.randperm(total)).to(torch.int32)
        self.block_table = torch.full((len(lengths), max(max_blocks, *num_blocks, 1)), 1 << 30, dtype=torch.int32)
        shape = (total * BLOCK_SIZE, num_kv_heads, head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        for b, (count, length) in enumerate(zip(num_blocks, lengths, strict=True)):
            self.block_table[b, :count], free = free[:count], free[count:]
            for cache in (self.k_cache, self.v_cache):
                cache[self.rows(b)] = torch.randn(length, num_kv_heads, head_dim).to(dtype)

    def past(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """The first sequence's past and numbers, as `paged_attention_prefill` takes them for its last tokens."""
        return self.k_cache, self.v_cache, self.block_table[0], self.lengths[:1].long(), torch.tensor([num_tokens])

    def rows(self, b: int) -> torch.Tensor:
        """Where a sequence's tokens lie."""
        token = torch.arange(int(self.lengths[b]))
        return self.block_table[b].long()[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE


def projection(
    num_tokens: int, *, num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, dtype: torch.dtype
) -> list[torch.Tensor | float]:
    """The arguments of `qk_norm_rope_write`: qkv as a slice of wider rows, caches of NaN, rows in disorder."""
    angles = torch.randn(num_tokens, rotated // 2)
    num_rows = -(-(num_tokens + 10) // BLOCK_SIZE) * BLOCK_SIZE
    caches = [torch.full((num_rows, num_kv_heads, head_dim), float("nan"), dtype=dtype) for _ in "kv"]
    qkv = sliced(num_tokens, 2 * (num_heads + num_kv_heads) * head_dim, dtype=dtype)
    norms = 0.3 * torch.randn(head_dim), 0.3 * torch.randn(head_dim)
    return [qkv, angles.cos(), angles.sin(), *norms, EPS, *caches, torch.randperm(num_rows)[:num_tokens]]
