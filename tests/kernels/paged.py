"""A pool of KV blocks in disorder, and a projection to write into one. What no sequence holds is NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tests.kernels.compare import moved, sliced

BLOCK_SIZE = 64
EPS = 1e-6


class Pool:
    """Sequences of the given lengths in blocks picked at random; a block's rest and other blocks are NaN.

    Entries of the block table past a sequence's end are no block at all.
    """

    def __init__(
        self, lengths: Sequence[int], *, num_kv_heads: int, head_dim: int, dtype: torch.dtype, max_blocks: int = 0
    ) -> None:
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        free = torch.randperm(sum(num_blocks) + 3).to(torch.int32)
        self.block_table = torch.full((len(lengths), max(max_blocks, *num_blocks, 1)), 1 << 30, dtype=torch.int32)
        shape = (len(free) * BLOCK_SIZE, num_kv_heads, head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        for b, (count, length) in enumerate(zip(num_blocks, lengths, strict=True)):
            self.block_table[b, :count], free = free[:count], free[count:]
            for cache in (self.k_cache, self.v_cache):
                cache[self.rows(b)] = torch.randn(length, num_kv_heads, head_dim).to(dtype)

    def rows(self, b: int) -> torch.Tensor:
        token = torch.arange(int(self.lengths[b]))
        return self.block_table[b].long()[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE

    def sequence(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A sequence's keys and values in one piece."""
        return self.k_cache[self.rows(b)], self.v_cache[self.rows(b)]


@dataclass
class Projection:
    """Arguments of `qk_norm_rope_write`."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    rows: torch.Tensor
    num_heads: int
    cache_shape: tuple[int, int, int]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def run(self, function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q and the caches that `function` makes of caches full of NaN, on the CPU."""
        caches = [torch.full(self.cache_shape, float("nan"), dtype=self.qkv.dtype, device=self.device) for _ in "kv"]
        arguments = [moved(x, self.device) for x in (self.qkv, self.cos, self.sin, self.q_norm, self.k_norm)]
        q = function(*arguments, EPS, *caches, self.rows.to(self.device), num_heads=self.num_heads)
        return q.cpu(), caches[0].cpu(), caches[1].cpu()


def projection(
    num_tokens: int, *, num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, dtype: torch.dtype
) -> Projection:
    """A projection as a slice of wider rows, with rows of the pool in disorder."""
    angles = torch.randn(num_tokens, rotated // 2)
    num_rows = -(-(num_tokens + 10) // BLOCK_SIZE) * BLOCK_SIZE
    return Projection(
        qkv=sliced(num_tokens, 2 * (num_heads + num_kv_heads) * head_dim, dtype=dtype),
        cos=angles.cos(),
        sin=angles.sin(),
        q_norm=0.3 * torch.randn(head_dim),
        k_norm=0.3 * torch.randn(head_dim),
        rows=torch.randperm(num_rows)[:num_tokens],
        num_heads=num_heads,
        cache_shape=(num_rows, num_kv_heads, head_dim),
    )
