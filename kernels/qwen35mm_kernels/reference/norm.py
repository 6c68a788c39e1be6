"""RMS norms: zero-centred, plain, after an addition (Qwen3_5RMSNorm in transformers), gated (Qwen3_5RMSNormGated)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, or * (1 + weight) if the weight is zero-centred.

    Args:
        x: [..., D], float32 or bfloat16. The arithmetic is float32.
        weight: [D].
        eps: added to the mean of squares.
        zero_centred: True for every text norm of Qwen3.5 except the gated one.

    Returns:
        [..., D] in x's dtype.
    """
    x32, weight32 = x.float(), weight.float()
    normed = x32 / torch.sqrt((x32**2).mean(dim=-1, keepdim=True) + eps)
    return (normed * (1 + weight32 if zero_centred else weight32)).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight * silu(z): the norm after the gated delta rule. Its weight is plain, not zero-centred.

    Args:
        x: [..., V], float32 or bfloat16. The arithmetic is float32.
        z: [..., V], the gate, of x's shape.
        weight: [V].
        eps: added to the mean of squares.

    Returns:
        [..., V] in x's dtype.
    """
    z32 = z.float()
    gate = z32 / (1 + torch.exp(-z32))
    return (rms_norm(x.float(), weight, eps, zero_centred=False) * gate).to(x.dtype)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds delta to x in place and returns the zero-centred norm of the sum: a residual connection and its norm.

    Args:
        x: [..., D], float32 or bfloat16, the residual stream. The arithmetic is float32; the norm uses the sum rounded
            to x's dtype, as if the addition were a separate step.
        delta: [..., D], of x's shape.
        weight: [D], zero-centred.
        eps: added to the mean of squares.

    Returns:
        [..., D] in x's dtype, a new tensor.
    """
    x.copy_(x.float() + delta.float())
    return rms_norm(x, weight, eps, zero_centred=True)


def norm_linear(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    matrix: torch.Tensor,
    *,
    swiglu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds, norms and multiplies a few rows, for a decode step.

    Args:
        x: [N, D], N from 1 to 4, float32 or bfloat16. The arithmetic is float32; the norm uses the sum rounded to x's
            dtype.
        delta: [N, D], added to x; None adds nothing.
        norm_weight: [D], zero-centred; None norms nothing.
        eps: added to the mean of squares.
        matrix: [M, D] in x's dtype.
        swiglu: the first half of the matrix's rows are gates; the result is silu(gate) * up.

    Returns:
        The sum [N, D], or x itself without delta; and [N, M], or [N, M / 2] with `swiglu`, both in x's dtype.
    """
    total = x if delta is None else (x.float() + delta.float()).to(x.dtype)
    normed = total.float() if norm_weight is None else rms_norm(total.float(), norm_weight, eps, zero_centred=True)
    out = normed @ matrix.float().T
    if swiglu:
        gate, up = out.chunk(2, dim=-1)
        out = gate / (1 + torch.exp(-gate)) * up
    return total, out.to(x.dtype)
