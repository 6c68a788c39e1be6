"""Attention with torch's kernels. Reads keys and values in place if a sequence's blocks are consecutive."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qwen35mm_kernels.cpu.norm import rms_norm
from qwen35mm_kernels.cpu.rope import apply_partial_rope
from qwen35mm_kernels.kv_formats import KVFormats, formats_of

# Of 128 to 512, torch's kernel is fastest on blocks of 256, for short and long caches.
_QUERY_BLOCK = 256
# On Hopper cards, torch would prefer cuDNN's attention, which builds a plan for every new shape: each picture size, and
# each length in decode.
_ON_CARDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
    num_kv_heads, head_dim = k_cache.shape[1], len(k_norm)
    k_format, v_format = formats_of(formats, k_cache, v_cache)
    heads = qkv.unflatten(1, (2 * num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads[:, : 2 * num_heads : 2], *heads[:, 2 * num_heads :].split(num_kv_heads, dim=1)
    q = apply_partial_rope(rms_norm(q.float(), q_norm, eps, zero_centred=True), cos, sin).to(qkv.dtype)
    k = apply_partial_rope(rms_norm(k.float(), k_norm, eps, zero_centred=True), cos, sin)
    kept = rows >= 0
    k_cache[rows[kept]], v_cache[rows[kept]] = k_format.quantise(k[kept]), v_format.quantise(v[kept])
    return q.masked_fill_(~kept[:, None, None], 0)


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
    k_format, v_format = formats = formats_of(formats, k_cache, v_cache)
    q, out = k_format.rotate(q), torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for b, length in enumerate(lengths.tolist()):
        if length:
            keys, values = _read(k_cache, v_cache, _rows(block_table[b], length, block_size), formats, q.dtype)
            out[b] = attention_decode(q[b], keys, values, scale=scale)
    return v_format.rotate_back(out).mul_(gate.sigmoid())


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
    k_format, v_format = formats = formats_of(formats, k_cache, v_cache)
    count, num_padding = int(counts), len(q) - int(counts)
    keys, values = _read(k_cache, v_cache, _rows(block_table, int(lengths), block_size), formats, q.dtype)
    attended = attention_prefill(k_format.rotate(q[:count]), keys, values, scale=scale)
    out = v_format.rotate_back(attended).mul_(gate[:count].sigmoid())
    return F.pad(out, (0, 0, 0, 0, 0, num_padding)) if num_padding else out


def _read(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: slice | torch.Tensor,
    formats: KVFormats,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some rows in `dtype`, still rotated; views of the cache if it has this type."""
    k_format, v_format = formats
    return k_format.read(k_cache[rows], dtype), v_format.read(v_cache[rows], dtype)


def _rows(block_table: torch.Tensor, length: int, block_size: int) -> slice | torch.Tensor:
    """The pool's rows of a sequence's tokens, in order: a slice if consecutive, else [length] int64."""
    used = block_table[: -(-length // block_size)]
    blocks = used.tolist()
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        return slice(blocks[0] * block_size, blocks[0] * block_size + length)
    inside = torch.arange(block_size, device=used.device)
    return (used.long()[:, None] * block_size + inside).flatten()[:length]


def attention_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Causal attention of the last T tokens, q [T, Hq, D], over k and v [L, Hkv, D]: [T, Hq, D]."""
    offset = k.shape[0] - q.shape[0]
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A block of queries sees no key after its last query. Blocks keep the mask small.
    for start in range(0, q.shape[0], _QUERY_BLOCK):
        block = queries[:, :, start : start + _QUERY_BLOCK]
        num_keys = offset + start + block.shape[2]
        mask = torch.ones(block.shape[2], num_keys, dtype=torch.bool, device=q.device).tril_(offset + start)
        attended = F.scaled_dot_product_attention(
            block, keys[:, :, :num_keys], values[:, :, :num_keys], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[start : start + _QUERY_BLOCK] = attended[0].transpose(0, 1)
    return out


def attention_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Attention of one token, q [Hq, D], over k and v [L, Hkv, D]: [Hq, D]."""
    # A group's query heads are rows against their one key head: this reads K and V once and never expands them.
    # (enable_gqa takes 3 to 12 times as long on a CPU.)
    groups = q.reshape(1, k.shape[1], -1, q.shape[1])
    with _backends(q.device):
        out = F.scaled_dot_product_attention(groups, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale)
    return out.reshape(q.shape)


def vision_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_frames: int) -> torch.Tensor:
    q, k, v = (aligned(x).unflatten(0, (num_frames, -1)).transpose(1, 2) for x in (q, k, v))
    with _backends(q.device):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, copied if needed so that a card can read 16 bytes at once: torch's kernels refuse or misread other tensors."""
    if x.device.type == "cpu":
        return x
    places = (x.storage_offset(), *x.stride()[:-1])
    if all(place * x.element_size() % 16 == 0 for place in places):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _backends(device: torch.device) -> AbstractContextManager[Any]:
    """Selects torch's attention kernels for the device."""
    return contextlib.nullcontext() if device.type == "cpu" else sdpa_kernel(_ON_CARDS)
