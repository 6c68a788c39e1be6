"""RMS norms, one row at a time, so that a row stays in the cache."""

from __future__ import annotations

import torch

from qwen35mm_kernels.cpu import norm as by_torch
from qwen35mm_kernels.cpu.native.library import loaded_library
from qwen35mm_kernels.cpu.native.strided import dense_rows, is_known


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool) -> torch.Tensor:
    if not is_known(x, weight):
        return by_torch.rms_norm(x, weight, eps, zero_centred=zero_centred)
    out = torch.empty(x.shape, dtype=x.dtype)
    x, outer, inner, *strides = _rows(x)
    sizes = outer, inner, x.shape[-1]
    options = weight.contiguous(), eps, zero_centred, out, x.dtype == torch.bfloat16, torch.get_num_threads()
    loaded_library()("qwen_rms_norm", x, *strides, *sizes, *options)
    return out


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not is_known(x, z, weight):
        return by_torch.gated_rms_norm(x, z, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    x, outer, inner, *x_strides = _rows(x)
    z, _, _, *z_strides = _rows(z)
    sizes = outer, inner, x.shape[-1]
    options = weight.contiguous(), eps, out, x.dtype == torch.bfloat16, torch.get_num_threads()
    loaded_library()("qwen_gated_rms_norm", x, *x_strides, z, *z_strides, *sizes, *options)
    return out


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not is_known(x, delta, weight) or not (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)):
        return by_torch.add_rms_norm(x, delta, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    if x.dim() != 2:
        x, delta = x.view(-1, x.shape[-1]), delta.reshape(-1, x.shape[-1])
    delta = dense_rows(delta)
    sizes = x.stride(0), delta, delta.stride(0), *x.shape
    options = weight.contiguous(), eps, out, x.dtype == torch.bfloat16, torch.get_num_threads()
    loaded_library()("qwen_add_rms_norm", x, *sizes, *options)
    return out


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int]:
    """Rows as [outer, inner, D] with a dense last dimension, a view if possible; (rows, their sizes and strides)."""
    x = dense_rows(x)
    if x.dim() == 2:
        return x, x.shape[0], 1, x.stride(0), 0
    if x.dim() != 3:
        x = x.reshape(-1, 1, x.shape[-1])
    return x, x.shape[0], x.shape[1], x.stride(0), x.stride(1)
