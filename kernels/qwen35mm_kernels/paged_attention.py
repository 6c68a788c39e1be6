"""Attention over a paged KV cache: norm, rotate and write the new tokens; one decode step of a batch; a prefill.

A layer's k_cache and v_cache are [num_blocks * block_size, Hkv, D]. A sequence's token t lies in the row
block_table[t // block_size] * block_size + t % block_size. Rows that no sequence holds may hold anything, NaN too.
"""

from __future__ import annotations

import torch

from qwen35mm_kernels.attention import _attention_decode, _attention_prefill, naive_attention_prefill
from qwen35mm_kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from qwen35mm_kernels.dispatch import implementation, implements
from qwen35mm_kernels.norm import _rms_norm, naive_rms_norm
from qwen35mm_kernels.rope import _apply_partial_rope, naive_apply_partial_rope


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
) -> torch.Tensor:
    """Norms and rotates a projection's queries and keys, and writes keys and values into the cache.

    Norm and rotation are float32 throughout, rounded once. The angles are an argument, because every layer of a step
    turns by the same ones.

    Args:
        qkv: [N, (2 * Hq + 2 * Hkv) * D], float32 or bfloat16: query and gate of each head in turn, then keys, then
            values. `split_gate` gives the gate.
        cos, sin: [N, R / 2] float32, as `mrope_cos_sin` makes them, R <= D.
        q_norm, k_norm: [D], zero-centred weights.
        eps: added to the mean of squares.
        k_cache, v_cache: [rows of the pool, Hkv, D] of qkv's dtype; written in place.
        rows: [N] int64, the row of each token, no row twice; -1 for padding, which writes nothing.
        num_heads: Hq.

    Returns:
        q: [N, Hq, D] in qkv's dtype; 0 for padding.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_dtype("qkv", qkv, FLOAT_DTYPES)
    check_shape("k_cache", k_cache, (None, None, None), "[rows of the pool, Hkv, D]")
    _check_pool(k_cache, v_cache, qkv.dtype, num_heads)
    head_dim = k_cache.shape[2]
    check_shape("qkv", qkv, (None, 2 * (num_heads + k_cache.shape[1]) * head_dim), "[N, (2 * Hq + 2 * Hkv) * D]")
    check_shape("rows", rows, qkv.shape[:1], "[N]")
    check_dtype("rows", rows, (torch.int64,))
    check_dtype("cos", cos, (torch.float32,))
    check_dtype("sin", sin, (torch.float32,))
    check_shape("cos", cos, (qkv.shape[0], None), "[N, R / 2]")
    check_shape("sin", sin, cos.shape, "the shape of cos")
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"cos and sin turn {2 * cos.shape[1]} dimensions, but heads have {head_dim}; pass R <= D.")
    check_shape("q_norm", q_norm, (head_dim,), "[D]")
    check_shape("k_norm", k_norm, (head_dim,), "[D]")
    run = implementation("qk_norm_rope_write", qkv.device)
    return run(qkv, cos, sin, q_norm, k_norm, eps, k_cache, v_cache, rows, num_heads)


def split_gate(qkv: torch.Tensor, num_heads: int, head_dim: int) -> torch.Tensor:
    """The output gate in a projection [N, (2 * Hq + 2 * Hkv) * D]: a view [N, Hq, D]."""
    return qkv[:, : 2 * num_heads * head_dim].unflatten(1, (num_heads, 2, head_dim))[:, :, 1]


def paged_attention_decode(
    q: torch.Tensor,
    gate: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """Attention of one new token of each sequence over its cached tokens, its own included.

    A sequence's result doesn't depend on the others. On CUDA nothing is read back: it can be captured in a graph.

    Args:
        q: [B, Hq, D], float32 or bfloat16.
        gate: [B, Hq, D] of q's dtype: the result is multiplied by its sigmoid. None: no gate.
        k_cache, v_cache: [rows of the pool, Hkv, D] of q's dtype; Hq is a multiple of Hkv.
        block_table: [B, max_blocks] int32; entries after a sequence's last block are not read.
        lengths: [B] int32, cached tokens with the new one, at most max_blocks * block_size; 0 for a padding row.
        block_size: tokens of a block.
        scale: positive factor of the scores, usually D ** -0.5.

    Returns:
        [B, Hq, D] in q's dtype; 0 for padding rows.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_shape("q", q, (None, None, None), "[B, Hq, D]")
    _check_attention(q, gate, k_cache, v_cache, block_size)
    check_shape("block_table", block_table, (q.shape[0], None), "[B, max_blocks]")
    check_dtype("block_table", block_table, (torch.int32,))
    check_shape("lengths", lengths, (q.shape[0],), "[B]")
    check_dtype("lengths", lengths, (torch.int32,))
    run = implementation("paged_attention_decode", q.device)
    return run(q, gate, k_cache, v_cache, block_table, lengths, block_size, scale)


def paged_attention_prefill(
    q: torch.Tensor,
    gate: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    *,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention of the last T tokens of one sequence over its cached tokens.

    Args:
        q: [T, Hq, D], float32 or bfloat16; query i sits at cache index length - T + i.
        gate: [T, Hq, D] of q's dtype: the result is multiplied by its sigmoid. None: no gate.
        block_table: [max_blocks] int32; entries after the sequence's last block are not read.
        length: cached tokens, the new ones included; from T to max_blocks * block_size.
        k_cache, v_cache, block_size, scale: as in `paged_attention_decode`.

    Returns:
        [T, Hq, D] in q's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_shape("q", q, (None, None, None), "[T, Hq, D]")
    _check_attention(q, gate, k_cache, v_cache, block_size)
    check_shape("block_table", block_table, (None,), "[max_blocks]")
    check_dtype("block_table", block_table, (torch.int32,))
    if not 1 <= q.shape[0] <= length <= block_table.shape[0] * block_size:
        raise ValueError(
            f"paged_attention_prefill needs 1 <= T <= length <= max_blocks * block_size, got T = {q.shape[0]}, length "
            f"= {length}, {block_table.shape[0]} blocks of {block_size}; write the new tokens' k and v before the call."
        )
    run = implementation("paged_attention_prefill", q.device)
    return run(q, gate, k_cache, v_cache, block_table, length, block_size, scale)


def _check_attention(
    q: torch.Tensor, gate: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor, block_size: int
) -> None:
    check_dtype("q", q, FLOAT_DTYPES)
    check_shape("k_cache", k_cache, (None, None, q.shape[2]), "[rows of the pool, Hkv, D]")
    _check_pool(k_cache, v_cache, q.dtype, q.shape[1])
    if gate is not None:
        check_dtype("gate", gate, (q.dtype,))
        check_shape("gate", gate, q.shape, "the shape of q")
    if block_size < 1 or k_cache.shape[0] % block_size:
        raise ValueError(f"the pool's {k_cache.shape[0]} rows must be whole blocks of block_size = {block_size}.")


def _check_pool(k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype, num_heads: int) -> None:
    check_dtype("k_cache", k_cache, (dtype,))
    check_dtype("v_cache", v_cache, (dtype,))
    check_shape("v_cache", v_cache, k_cache.shape, "the shape of k_cache")
    num_kv_heads = k_cache.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"query heads must be a multiple of key heads, got Hq = {num_heads} and Hkv = {num_kv_heads}.")


def naive_qk_norm_rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """The specification of `qk_norm_rope_write`."""
    num_kv_heads, head_dim = k_cache.shape[1:]
    heads = qkv.unflatten(1, (2 * num_heads + 2 * num_kv_heads, head_dim))
    q = torch.zeros(len(qkv), num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    for n in torch.nonzero(rows >= 0).flatten().tolist():
        row = int(rows[n])
        queries, keys = heads[n : n + 1, : 2 * num_heads : 2], heads[n : n + 1, 2 * num_heads : -num_kv_heads]
        for x, weight, target in ((queries, q_norm, q[n]), (keys, k_norm, k_cache[row])):
            normed = naive_rms_norm(x.float(), weight, eps, zero_centred=True)
            target.copy_(naive_apply_partial_rope(normed, cos[n : n + 1], sin[n : n + 1])[0])
        v_cache[row] = heads[n, -num_kv_heads:]
    return q


def naive_paged_attention_decode(
    q: torch.Tensor,
    gate: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """The specification of `paged_attention_decode`."""
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths.tolist()):
        if length:
            one = slice(b, b + 1)
            arguments = k_cache, v_cache, block_table[b], length, block_size, scale
            out[one] = naive_paged_attention_prefill(q[one], None if gate is None else gate[one], *arguments)
    return out


def naive_paged_attention_prefill(
    q: torch.Tensor,
    gate: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """The specification of `paged_attention_prefill`."""
    rows = _rows(block_table, length, block_size)
    out = naive_attention_prefill(q.float(), k_cache[rows].float(), v_cache[rows].float(), scale)
    return (out if gate is None else out / (1 + torch.exp(-gate.float()))).to(q.dtype)


def _rows(block_table: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """The rows of the pool that hold a sequence's tokens, in order: [length] int64."""
    token = torch.arange(length, device=block_table.device)
    return block_table[token // block_size].long() * block_size + token % block_size


def _pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, length: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's keys and values, [length, Hkv, D] each: on a CPU views where its blocks lie side by side."""
    rows = _rows(block_table, length, block_size)
    if rows.device.type == "cpu" and int(rows[-1]) - int(rows[0]) == length - 1 and bool((rows.diff() == 1).all()):
        first = int(rows[0])
        return k_cache[first : first + length], v_cache[first : first + length]
    return k_cache[rows], v_cache[rows]


@implements("qk_norm_rope_write", "torch")
def _qk_norm_rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    num_kv_heads, head_dim = k_cache.shape[1:]
    heads = qkv.unflatten(1, (2 * num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads[:, : 2 * num_heads : 2], *heads[:, 2 * num_heads :].split(num_kv_heads, dim=1)
    q = _apply_partial_rope(_rms_norm(q.float(), q_norm, eps, True), cos, sin).to(qkv.dtype)
    k = _apply_partial_rope(_rms_norm(k.float(), k_norm, eps, True), cos, sin).to(qkv.dtype)
    kept = rows >= 0
    k_cache[rows[kept]], v_cache[rows[kept]] = k[kept], v[kept]
    return q.masked_fill_(~kept[:, None, None], 0)


@implements("paged_attention_decode", "torch")
def _paged_attention_decode(
    q: torch.Tensor,
    gate: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for b, length in enumerate(lengths.tolist()):
        if length:
            out[b] = _attention_decode(q[b], *_pages(k_cache, v_cache, block_table[b], length, block_size), scale)
    return out if gate is None else out.mul_(gate.sigmoid())


@implements("paged_attention_prefill", "torch")
def _paged_attention_prefill(
    q: torch.Tensor,
    gate: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    out = _attention_prefill(q, *_pages(k_cache, v_cache, block_table, length, block_size), scale)
    return out if gate is None else out.mul_(gate.sigmoid())
