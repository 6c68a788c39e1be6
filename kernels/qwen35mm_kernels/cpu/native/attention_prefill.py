"""Attention of many queries: over a paged KV cache, and inside frames of the vision tower.

With AMX, torch's attention runs instead, since it uses AMX's tiles.
"""

from __future__ import annotations

import ctypes

import torch

from qwen35mm_kernels.cpu import attention as by_torch
from qwen35mm_kernels.cpu.native.library import find_library, loaded_library
from qwen35mm_kernels.cpu.native.strided import KVRows, Strided, dense_rows, is_known, kv_rows, strided
from qwen35mm_kernels.kv_formats import KVFormats, formats_of


class _Attention(ctypes.Structure):
    _fields_ = [
        ("q", Strided),
        *((name, KVRows) for name in ("k", "v")),
        ("gate", Strided),
        *((name, ctypes.c_void_p) for name in ("block_table", "out")),
        *((name, ctypes.c_long) for name in ("num_tokens", "num_keys", "num_frames")),
        *((name, ctypes.c_long) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "is_causal")),
        ("scale", ctypes.c_float),
    ]


def paged_attention_prefill(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    formats: KVFormats | None = None,
) -> torch.Tensor:
    if not _is_ours(q, gate):
        past = k_cache, v_cache, block_table, lengths, counts
        options = {"block_size": block_size, "scale": scale, "formats": formats}
        return by_torch.paged_attention_prefill(q, gate, *past, **options)
    q, gate, k_cache, v_cache = map(dense_rows, (q, gate, k_cache, v_cache))
    block_table = block_table.contiguous()
    out, count = torch.empty(q.shape, dtype=q.dtype), int(counts)
    out[count:] = 0
    past = map(kv_rows, (k_cache, v_cache), formats_of(formats, k_cache, v_cache))
    places = (strided(q), *past, strided(gate), block_table.data_ptr(), out.data_ptr())
    heads = q.shape[1], k_cache.shape[1], q.shape[2]
    _run(q, _Attention(*places, count, int(lengths), 1, *heads, block_size, True, scale))
    return out


def vision_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_frames: int) -> torch.Tensor:
    if not _is_ours(q, k, v):
        return by_torch.vision_attention(q, k, v, num_frames)
    q, k, v = map(dense_rows, (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype)
    num_patches, num_heads, head_dim = q.shape
    size = num_patches // num_frames
    places = (strided(q), kv_rows(k), kv_rows(v), Strided(), None, out.data_ptr())
    heads = num_heads, num_heads, head_dim
    _run(q, _Attention(*places, size, size, num_frames, *heads, 1, False, head_dim**-0.5))
    return out


def uses_tiles(dtype: torch.dtype) -> bool:
    """Whether this package leaves queries of this dtype to torch, which computes on AMX's tiles."""
    library = find_library()
    return library is not None and library.name == "amx" and dtype == torch.bfloat16


def _is_ours(*tensors: torch.Tensor) -> bool:
    return is_known(*tensors) and not uses_tiles(tensors[0].dtype)


def _run(q: torch.Tensor, attention: _Attention) -> None:
    is_bf16 = q.dtype == torch.bfloat16
    loaded_library()("qwen_flash_attention", ctypes.byref(attention), is_bf16, torch.get_num_threads())
