"""Rotary positions, and their fusion with norms and writes to the KV cache."""

from __future__ import annotations

import ctypes

import torch

from qwen35mm_kernels.cpu import attention, rope
from qwen35mm_kernels.cpu.native.library import loaded_library
from qwen35mm_kernels.cpu.native.strided import KVRows, dense_rows, is_known, kv_rows, strided
from qwen35mm_kernels.kv_formats import KVFormats, formats_of


class _WriteHeads(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "q_norm", "k_norm", "rows", "q")),
        *((name, KVRows) for name in ("k", "v")),
        *((name, ctypes.c_long) for name in ("num_tokens", "qkv_row", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_long) for name in ("head_dim", "half", "norms_are_bf16")),
        ("eps", ctypes.c_float),
    ]


def qk_norm_rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    *,
    num_heads: int,
    formats: KVFormats | None = None,
) -> torch.Tensor:
    if not (is_known(qkv) and is_known(q_norm, k_norm) and k_cache.stride(2) == v_cache.stride(2) == 1):
        return attention.qk_norm_rope_write(
            qkv, cos, sin, q_norm, k_norm, eps, k_cache, v_cache, rows, num_heads=num_heads, formats=formats
        )
    num_kv_heads, head_dim = k_cache.shape[1], len(k_norm)
    qkv, num_tokens = dense_rows(qkv), qkv.shape[0]
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype)
    sources = tuple(x.contiguous() for x in (cos, sin, q_norm, k_norm, rows))
    heads = _WriteHeads(
        *(x.data_ptr() for x in (qkv, *sources, q)),
        *map(kv_rows, (k_cache, v_cache), formats_of(formats, k_cache, v_cache)),
        num_tokens,
        qkv.stride(0),
        num_heads,
        num_kv_heads,
        head_dim,
        cos.shape[1],
        q_norm.dtype == torch.bfloat16,
        eps,
    )
    is_bf16 = qkv.dtype == torch.bfloat16
    loaded_library()("qwen_norm_rope_write", ctypes.byref(heads), is_bf16, torch.get_num_threads())
    return q


def apply_partial_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    if not is_known(x):
        return rope.apply_partial_rope(x, cos, sin)
    x, cos, sin = dense_rows(x), cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    sizes = *x.shape, cos.shape[1], x.dtype == torch.bfloat16, torch.get_num_threads()
    loaded_library()("qwen_apply_partial_rope", ctypes.byref(strided(x)), cos, sin, out, *sizes)
    return out
