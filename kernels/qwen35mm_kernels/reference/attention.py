"""Softmax attention: writing new tokens to a paged KV cache, decode and prefill over it, and the vision tower's.

A layer's k_cache and v_cache are [num_blocks * block_size, Hkv, D] of numbers, or [..., row_width] in the `formats` of
keys and of values (see `kv_formats`). Attention always reads from the cache, even a token's own keys and values. Token
t of a sequence has the row block_table[t // block_size] * block_size + t % block_size. Unused rows may contain
anything, including NaN.
"""

from __future__ import annotations

import torch

from qwen35mm_kernels.kv_formats import KVFormats, formats_of
from qwen35mm_kernels.reference.kv_formats import dequantise_all, quantise
from qwen35mm_kernels.reference.norm import rms_norm
from qwen35mm_kernels.reference.rope import apply_partial_rope


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
    """Norms and rotates a projection's queries and keys, and writes keys and values into the cache.

    Norm and rotation are float32 throughout, rounded once. The angles are an argument, since all layers of a step share
    them.

    Args:
        qkv: [N, (2 * Hq + 2 * Hkv) * D], float32 or bfloat16: query and gate of each head in turn, then keys, then
            values. `split_gate` gives the gate.
        cos, sin: [N, R / 2] float32 from `mrope_cos_sin`, R <= D.
        q_norm, k_norm: [D], zero-centred weights.
        eps: added to the mean of squares.
        k_cache, v_cache: [rows of the pool, Hkv, D], or [..., row_width]; written in place.
        rows: [N] int64, the row of each token, no row twice; -1 for padding, which writes nothing.
        num_heads: Hq.
        formats: of keys and values; None for caches of plain numbers.

    Returns:
        q: [N, Hq, D] in qkv's dtype; 0 for padding.
    """
    num_kv_heads, head_dim = k_cache.shape[1], len(k_norm)
    k_format, v_format = formats_of(formats, k_cache, v_cache)
    heads = qkv.unflatten(1, (2 * num_heads + 2 * num_kv_heads, head_dim))
    q = torch.zeros(len(qkv), num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    for n in torch.nonzero(rows >= 0).flatten().tolist():
        row = int(rows[n])
        queries, keys = heads[n : n + 1, : 2 * num_heads : 2], heads[n : n + 1, 2 * num_heads : -num_kv_heads]
        angles = cos[n : n + 1], sin[n : n + 1]
        q[n] = apply_partial_rope(rms_norm(queries.float(), q_norm, eps, zero_centred=True), *angles)[0]
        turned = apply_partial_rope(rms_norm(keys.float(), k_norm, eps, zero_centred=True), *angles)[0]
        for h in range(num_kv_heads):
            k_cache[row, h] = quantise(k_format, turned[h])
            v_cache[row, h] = quantise(v_format, heads[n, h - num_kv_heads].float())
    return q


def split_gate(qkv: torch.Tensor, num_heads: int, head_dim: int) -> torch.Tensor:
    """The output gate of a projection [N, (2 * Hq + 2 * Hkv) * D], as a view [N, Hq, D]."""
    return qkv[:, : 2 * num_heads * head_dim].unflatten(1, (num_heads, 2, head_dim))[:, :, 1]


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
    """Attention of each sequence's new token over its cached tokens, including itself.

    A sequence's result doesn't depend on the others. On CUDA it never waits for the device, so a graph can capture it.

    Args:
        q: [B, Hq, D], float32 or bfloat16.
        gate: [B, Hq, D] of q's dtype: the result is multiplied by its sigmoid.
        k_cache, v_cache: [rows of the pool, Hkv, D], or [..., row_width]; query head h reads key head h // (Hq / Hkv).
        block_table: [B, max_blocks] int32; entries after a sequence's last block are not read.
        lengths: [B] int32, cached tokens with the new one, at most max_blocks * block_size; 0 for a padding row.
        block_size: tokens of a block.
        scale: positive factor of the scores, usually D ** -0.5.
        formats: of keys and values; None for caches of plain numbers.

    Returns:
        [B, Hq, D] in q's dtype; 0 for padding rows.
    """
    out = torch.zeros_like(q)
    options = {"block_size": block_size, "scale": scale, "formats": formats}
    for b, length in enumerate(lengths.tolist()):
        if length:
            one = slice(b, b + 1)
            past = k_cache, v_cache, block_table[b], lengths[one], torch.ones(1)
            out[one] = paged_attention_prefill(q[one], gate[one], *past, **options)
    return out


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
    """Causal attention of one sequence's newest tokens over its cached tokens.

    Args:
        q: [T, Hq, D], float32 or bfloat16; query i is at cache index length - count + i.
        gate: [T, Hq, D] of q's dtype: the result is multiplied by its sigmoid.
        block_table: [max_blocks] int32; entries after the sequence's last block are not read.
        lengths: [1] int64, cached tokens including the new ones, at most max_blocks * block_size.
        counts: [1] int64, new tokens; from 0 to T.
        k_cache, v_cache, block_size, scale, formats: as in `paged_attention_decode`.

    Returns:
        [T, Hq, D] in q's dtype; 0 for padding.
    """
    length, count = int(lengths), int(counts)
    token = torch.arange(length, device=block_table.device)
    rows = block_table[token // block_size].long() * block_size + token % block_size
    k_format, v_format = formats_of(formats, k_cache, v_cache)
    k, v = dequantise_all(k_format, k_cache[rows]), dequantise_all(v_format, v_cache[rows])
    out = torch.zeros(q.shape, device=q.device)
    for i, query in enumerate(q[:count].float()):
        stop = length - count + i + 1
        out[i] = _attend(query, k[:stop], v[:stop], scale) / (1 + torch.exp(-gate[i].float()))
    return out.to(q.dtype)


def vision_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_frames: int) -> torch.Tensor:
    """Full attention inside each frame, scores scaled by D ** -0.5.

    Args:
        q, k, v: [P, H, D] of one dtype, the patches of all frames in order, P / num_frames for each frame.

    Returns:
        [P, H, D] in q's dtype.
    """
    out = torch.zeros_like(q)
    size = len(q) // num_frames
    for i in range(len(q)):
        frame = slice(i // size * size, (i // size + 1) * size)
        out[i] = _attend(q[i].float(), k[frame].float(), v[frame].float(), q.shape[-1] ** -0.5)
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One query [Hq, D] against all of k and v [L, Hkv, D]."""
    group = q.shape[0] // k.shape[1]
    heads = []
    for head in range(q.shape[0]):
        weights = torch.softmax(k[:, head // group] @ q[head] * scale, dim=0)
        heads.append(weights @ v[:, head // group])
    return torch.stack(heads)
