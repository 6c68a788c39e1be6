"""Building blocks: parameters without initialisation, linear maps, the norms.

`weights.py` fills every parameter from the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from qwen35mm.model.adapters import LinearAdapters
from qwen35mm.model.weight_formats import Factory, PlainWeight, new_weight
from qwen35mm_kernels import select_backend
from qwen35mm_kernels.backend import why_not_triton

# The most rows that `norm_linear` takes.
_FEW_ROWS = 4


def new_parameter(*shape: int, factory: Factory, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised parameter that asks for no gradient, in the factory's dtype or another one."""
    values = torch.empty(*shape, dtype=dtype or factory.dtype, device=factory.device)
    return nn.Parameter(values, requires_grad=False)


class Linear(nn.Module):
    """x @ weight.T (+ bias).

    Attributes:
        adapters: those that change it and aren't merged into the weight.
    """

    bias: nn.Parameter | None
    adapters: LinearAdapters | None

    def __init__(
        self, in_features: int, out_features: int, factory: Factory, *, bias: bool = False, exact_rows: int = 0
    ) -> None:
        """exact_rows: how many of the last output rows are never quantised."""
        super().__init__()
        self.weight = new_weight(out_features, in_features, factory, exact_rows=exact_rows)
        self.bias = new_parameter(out_features, factory=factory) if bias else None
        self.adapters = None
        self.ops = select_backend(factory.device)
        self._is_on_card = not bias and why_not_triton(factory.device.type) is None

    def forward(self, x: torch.Tensor | Unnormed, *, is_step: bool = False) -> torch.Tensor:
        """[N, in_features] -> [N, out_features]. is_step: as in `Unnormed`, for rows that need nothing before."""
        if not isinstance(x, torch.Tensor):
            return self._normed(x, swiglu=False)
        if is_step and isinstance(self.weight, PlainWeight) and self._multiplies_few(x):
            _, out = self.ops.norm_linear(x, None, None, 0.0, self.weight.values)
        else:
            out = self.weight.product(x, self.bias)
        if self.adapters is not None:
            self.adapters.add_to(out, x, self.bias)
        return out

    def swiglu(self, x: torch.Tensor | Unnormed) -> torch.Tensor:
        """silu(gate) * up of the two halves of the product: [N, in_features] -> [N, out_features / 2]."""
        if isinstance(x, torch.Tensor):
            return self.ops.swiglu(self(x))
        return self._normed(x, swiglu=True)

    def _normed(self, x: Unnormed, *, swiglu: bool) -> torch.Tensor:
        """Few rows of a decode step on a card: one launch for norm, product and SwiGLU."""
        is_changed, weight = self.adapters is not None and self.adapters.are_used, self.weight
        if x.is_step and isinstance(weight, PlainWeight) and self._multiplies_few(x.x) and not is_changed:
            norm = x.norm.weight, x.norm.eps
            x.x, out = self.ops.norm_linear(x.x, x.delta, *norm, weight.values, swiglu=swiglu)
            return out
        normed = x.rows()
        return self.swiglu(normed) if swiglu else self(normed)

    def _multiplies_few(self, x: torch.Tensor) -> bool:
        """Whether a card's kernel for few rows takes these: one launch, where cuBLAS may split sums and take two."""
        return self._is_on_card and len(x) <= _FEW_ROWS


class Embedding(nn.Module):
    """Rows of a table by index."""

    def __init__(self, num_rows: int, width: int, factory: Factory, *, is_head: bool = False) -> None:
        """is_head: the table is also the output head."""
        super().__init__()
        is_plain = factory.integers is None and not is_head
        self.weight = (PlainWeight if is_plain else new_weight)(num_rows, width, factory)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, width], a new tensor."""
        return self.weight.rows(index)


class RMSNorm(nn.Module):
    """Zero-centred RMSNorm over the last dimension: x / rms(x) * (1 + weight)."""

    def __init__(self, width: int, eps: float, factory: Factory) -> None:
        super().__init__()
        self.weight = new_parameter(width, factory=factory)
        self.eps = eps
        self.ops = select_backend(factory.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, zero_centred=True)

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Adds delta to x in place, and norms the sum."""
        return self.ops.add_rms_norm(x, delta, self.weight, self.eps)


@dataclass
class Unnormed:
    """Rows that still need an addition and a norm. Their first consumer does both; there must be only one.

    Attributes:
        norm: the norm to apply.
        x: [N, hidden], later the sum, possibly in the same memory.
        delta: [N, hidden], to be added to x.
        is_step: whether they belong to a decode step, whose time goes to launches and reading weights.
    """

    norm: RMSNorm
    x: torch.Tensor
    delta: torch.Tensor | None
    is_step: bool

    def rows(self) -> torch.Tensor:
        """[N, hidden], normed."""
        return self.norm(self.x) if self.delta is None else self.norm.add(self.x, self.delta)


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias over the last dimension (the vision tower's)."""

    def __init__(self, width: int, eps: float, factory: Factory) -> None:
        super().__init__()
        self.weight = new_parameter(width, factory=factory)
        self.bias = new_parameter(width, factory=factory)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
