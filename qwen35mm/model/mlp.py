"""The gated feed-forward network (SwiGLU) of a dense layer and of the shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from qwen35mm.model.layers import Factory, Linear
from qwen35mm.model.rows import few_rows


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate and up side by side: [..., 2 * width] -> [..., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one product: [N, hidden] -> [N, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, factory: Factory) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, factory)
        self.down_proj = Linear(intermediate_size, hidden_size, factory)

    def forward(self, x: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        inner = few_rows(swiglu, self.gate_up_proj(x, num_rows), num_rows=num_rows)
        return self.down_proj(inner, num_rows)
