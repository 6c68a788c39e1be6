"""What the gated delta rule is tested on, by torch and by Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.kernels.compare import moved, sliced


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def rows(self, start: int, stop: int | None) -> Inputs:
        return Inputs(*(x[start:stop] for x in self))

    def to(self, device: torch.device) -> Inputs:
        return Inputs(*(moved(x, device) for x in self))


def make_inputs(
    num_tokens: int,
    heads: tuple[int, int] = (2, 4),
    dtype: torch.dtype = torch.float32,
    *,
    dims: tuple[int, int],
) -> tuple[Inputs, torch.Tensor]:
    """Inputs as the layer makes them, views of one q | k | v row, decays mostly 0.9 to 0.999; and a state."""
    num_k_heads, num_v_heads = heads
    k_dim, v_dim = dims
    parts = [num_k_heads * k_dim, num_k_heads * k_dim, num_v_heads * v_dim]
    q, k, v = sliced(num_tokens, sum(parts), dtype=dtype).split(parts, dim=-1)
    shape = num_tokens, num_v_heads
    inputs = Inputs(
        q.unflatten(-1, (num_k_heads, k_dim)),
        k.unflatten(-1, (num_k_heads, k_dim)),
        v.unflatten(-1, (num_v_heads, v_dim)),
        -torch.exp(torch.empty(shape).uniform_(-7, -2)),
        torch.rand(shape).to(dtype),
    )
    return inputs, torch.randn(num_v_heads, k_dim, v_dim)
