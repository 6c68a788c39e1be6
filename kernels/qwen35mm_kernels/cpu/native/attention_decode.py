"""Attention of one token of each sequence over a paged KV cache."""

from __future__ import annotations

import ctypes

import torch

from qwen35mm_kernels.cpu import attention as by_torch
from qwen35mm_kernels.cpu.native.library import loaded_library
from qwen35mm_kernels.cpu.native.strided import KVRows, Strided, dense_rows, is_known, kv_rows, strided
from qwen35mm_kernels.kv_formats import KVFormats, formats_of


class _DecodeAttention(ctypes.Structure):
    _fields_ = [
        *((name, Strided) for name in ("q", "gate")),
        *((name, KVRows) for name in ("k", "v")),
        *((name, ctypes.c_void_p) for name in ("block_table", "lengths", "out")),
        *((name, ctypes.c_long) for name in ("num_sequences", "table_row")),
        *((name, ctypes.c_long) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size")),
        ("scale", ctypes.c_float),
    ]


def paged_attention_decode(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    formats: KVFormats | None = None,
) -> torch.Tensor:
    if not is_known(q, gate):
        past = k_cache, v_cache, block_table, lengths
        options = {"block_size": block_size, "scale": scale, "formats": formats}
        return by_torch.paged_attention_decode(q, gate, *past, **options)
    q, gate, k_cache, v_cache = (dense_rows(x) for x in (q, gate, k_cache, v_cache))
    block_table, lengths = dense_rows(block_table), lengths.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    attention = _DecodeAttention(
        *(strided(x) for x in (q, gate)),
        *map(kv_rows, (k_cache, v_cache), formats_of(formats, k_cache, v_cache)),
        block_table.data_ptr(),
        lengths.data_ptr(),
        out.data_ptr(),
        q.shape[0],
        block_table.stride(0),
        q.shape[1],
        k_cache.shape[1],
        q.shape[2],
        block_size,
        scale,
    )
    is_bf16 = q.dtype == torch.bfloat16
    loaded_library()("qwen_paged_attention_decode", ctypes.byref(attention), is_bf16, torch.get_num_threads())
    return out
