"""RMS norms, in blocks of rows so that temporaries stay in a CPU's cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from qwen35mm_kernels.cpu.blocks import rows_per_block
from qwen35mm_kernels.cpu.swiglu import swiglu as activate


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool) -> torch.Tensor:
    scale = weight.float() + 1.0 if zero_centred else weight.float()
    scale = scale * weight.shape[0] ** 0.5
    return _by_rows(lambda x: _l2_normalise(x, eps).mul_(scale), x)


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    scale = weight.float() * weight.shape[0] ** 0.5
    return _by_rows(lambda x, z: _l2_normalise(x, eps).mul_(scale).mul_(F.silu(z.float())), x, z)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x.add_(delta), weight, eps, zero_centred=True)


def norm_linear(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    matrix: torch.Tensor,
    *,
    swiglu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if delta is None else x + delta
    normed = total if norm_weight is None else rms_norm(total, norm_weight, eps, zero_centred=True)
    out = F.linear(normed, matrix)
    return total, activate(out) if swiglu else out


def _l2_normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) / sqrt(D), with eps as in rms. The L2 norm needs one pass, and the weight includes the sqrt(D)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x * norm.square_().add_(eps * x.shape[-1]).rsqrt_()


def _by_rows(compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """compute(*inputs) in the first input's dtype, in blocks of rows."""
    first = inputs[0]
    num_rows = rows_per_block(first)
    if num_rows >= len(first):
        return compute(*inputs).to(first.dtype)
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    for target, *block in zip(out.split(num_rows), *(x.split(num_rows) for x in inputs), strict=True):
        target.copy_(compute(*block))
    return out
