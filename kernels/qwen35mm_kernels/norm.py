"""RMS norms: zero-centred or plain (Qwen3_5RMSNorm in transformers), after an addition, and gated
(Qwen3_5RMSNormGated)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from qwen35mm_kernels.blocks import rows_per_block
from qwen35mm_kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from qwen35mm_kernels.dispatch import implementation, implements


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, or * (1 + weight) where the weight is zero-centred.

    Args:
        x: [..., D], float32 or bfloat16. The arithmetic is float32.
        weight: [D].
        eps: added to the mean of squares.
        zero_centred: True for every text norm of Qwen3.5 but the gated one.

    Returns:
        [..., D] in x's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_dtype("x", x, FLOAT_DTYPES)
    check_shape("weight", weight, x.shape[-1:], "[D], D the last dimension of x")
    return implementation("rms_norm", x.device)(x, weight, eps, zero_centred)


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight * silu(z): the norm after the gated delta rule. Its weight is plain, not zero-centred.

    Args:
        x: [..., V], float32 or bfloat16. The arithmetic is float32.
        z: [..., V], the gate, of x's shape.
        weight: [V].
        eps: added to the mean of squares.

    Returns:
        [..., V] in x's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_dtype("x", x, FLOAT_DTYPES)
    check_dtype("z", z, FLOAT_DTYPES)
    check_shape("z", z, x.shape, "the shape of x")
    check_shape("weight", weight, x.shape[-1:], "[V], V the last dimension of x")
    return implementation("gated_rms_norm", x.device)(x, z, weight, eps)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds delta to x in place and returns the zero-centred norm of the sum: a residual connection and what follows.

    Args:
        x: [..., D], float32 or bfloat16, the residual stream. The arithmetic is float32; the norm is of the sum as
            rounded to x's dtype, just as if the addition were a step of its own.
        delta: [..., D], of x's shape.
        weight: [D], zero-centred.
        eps: added to the mean of squares.

    Returns:
        [..., D] in x's dtype, a new tensor.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_dtype("x", x, FLOAT_DTYPES)
    check_dtype("delta", delta, FLOAT_DTYPES)
    check_shape("delta", delta, x.shape, "the shape of x")
    check_shape("weight", weight, x.shape[-1:], "[D], D the last dimension of x")
    return implementation("add_rms_norm", x.device)(x, delta, weight, eps)


def naive_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool) -> torch.Tensor:
    """The specification of `rms_norm`."""
    x32, weight32 = x.float(), weight.float()
    normed = x32 / torch.sqrt((x32**2).mean(dim=-1, keepdim=True) + eps)
    return (normed * (1 + weight32 if zero_centred else weight32)).to(x.dtype)


def naive_gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The specification of `gated_rms_norm`."""
    z32 = z.float()
    gate = z32 / (1 + torch.exp(-z32))
    return (naive_rms_norm(x.float(), weight, eps, zero_centred=False) * gate).to(x.dtype)


def naive_add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The specification of `add_rms_norm`."""
    x.copy_(x.float() + delta.float())
    return naive_rms_norm(x, weight, eps, zero_centred=True)


@implements("rms_norm", "torch")
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool) -> torch.Tensor:
    scale = weight.float() + 1.0 if zero_centred else weight.float()
    scale = scale * weight.shape[0] ** 0.5
    return _by_rows(lambda x: _l2_normalise(x, eps).mul_(scale), x)


@implements("gated_rms_norm", "torch")
def _gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    scale = weight.float() * weight.shape[0] ** 0.5
    return _by_rows(lambda x, z: _l2_normalise(x, eps).mul_(scale).mul_(F.silu(z.float())), x, z)


@implements("add_rms_norm", "torch")
def _add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _rms_norm(x.add_(delta), weight, eps, zero_centred=True)


def _l2_normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) / sqrt(D), with eps as in rms: the L2 norm needs one pass, and the weight takes the sqrt(D) up."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x * norm.square_().add_(eps * x.shape[-1]).rsqrt_()


def _by_rows(compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """compute(*inputs) in the first input's dtype, some rows at a time."""
    first = inputs[0]
    num_rows = rows_per_block(first)
    if num_rows >= len(first):
        return compute(*inputs).to(first.dtype)
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    for target, *block in zip(out.split(num_rows), *(x.split(num_rows) for x in inputs), strict=True):
        target.copy_(compute(*block))
    return out
