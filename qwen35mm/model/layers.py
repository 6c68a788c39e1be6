"""Building blocks: parameters without initialisation, linear maps, the norms.

Parameters are made uninitialised, because `weights.py` fills every one of them from the checkpoint.
"""

from __future__ import annotations

from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import nn

from qwen35mm.model.dense import linear
from qwen35mm_kernels import select_backend


class Factory(TypedDict):
    """Where and in which dtype parameters are made; modules pass it on as keyword arguments."""

    dtype: torch.dtype
    device: torch.device


def new_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter that asks for no gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x @ weight.T (+ bias). weight: [out_features, in_features]."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, factory: Factory, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = new_parameter(out_features, in_features, **factory)
        self.bias = new_parameter(out_features, **factory) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in_features] -> [N, out_features]."""
        return linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of a table by index. weight: [num_rows, width]."""

    def __init__(self, num_rows: int, width: int, factory: Factory) -> None:
        super().__init__()
        self.weight = new_parameter(num_rows, width, **factory)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, self.weight)


class RMSNorm(nn.Module):
    """Zero-centred RMSNorm over the last dimension: x / rms(x) * (1 + weight)."""

    def __init__(self, width: int, eps: float, factory: Factory) -> None:
        super().__init__()
        self.weight = new_parameter(width, **factory)
        self.eps = eps
        self.ops = select_backend(factory["device"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, zero_centred=True)

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Adds delta to x in place, and norms the sum."""
        return self.ops.add_rms_norm(x, delta, self.weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias over the last dimension (the vision tower's)."""

    def __init__(self, width: int, eps: float, factory: Factory) -> None:
        super().__init__()
        self.weight = new_parameter(width, **factory)
        self.bias = new_parameter(width, **factory)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
