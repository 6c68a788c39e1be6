"""Causal prefill over the paged KV cache.

A tile is BLOCK_M pairs of (token, query head), with the heads of one key head adjacent. So short prompts after a long
history fill a tile, and few keys need a mask. Compute-bound for long prompts.

A warm turn has few tiles and a long history. The history is cut into parts so that the whole card works on it, and the
second kernel of decode combines them in order. The number of parts depends only on the model, the number of rows and
the number of cached tokens. The kernel reads the latter, so the grid has the most parts that there can be.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from qwen35mm_kernels import cpu
from qwen35mm_kernels.gpu.arithmetic import dot, round_to
from qwen35mm_kernels.gpu.attention_decode import MAX_SPLITS, MIN_SPLIT, checked_formats, combine_splits
from qwen35mm_kernels.gpu.kv_rows import kept_as, load_rows
from qwen35mm_kernels.gpu.launch import Config, capability, cdiv, config_for, launch, shared_bytes
from qwen35mm_kernels.kv_formats import KVFormats, formats_of

_MAX_FLASH_HEAD_DIM = 256
_FLOAT32 = Config({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=1)
# `_SMALL` is for cards with 99 KB of shared memory a program.
_LARGE = Config({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=2)
# From Blackwell on, sums come from a separate memory, and the registers have no room for wider tiles.
_BLACKWELL = Config({"BLOCK_M": 128, "BLOCK_N": 32}, num_warps=8, num_stages=3)
_SMALL = Config({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=8, num_stages=2)
# For keys and values of another type than the queries: their tiles need registers. Only one float32 tile fits into
# 99 KB beside the queries.
_LARGE_KEPT = Config({"BLOCK_M": 128, "BLOCK_N": 32}, num_warps=8, num_stages=2)
_SMALL_KEPT = Config({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=8, num_stages=1)
# _PROGRAMS programs fill a card; further parts cost more in sums than they save. A part shorter than _MIN_PART isn't
# worth its sums.
_PROGRAMS = 128
_MIN_PART = 512
_LARGE_SHARED_BYTES = 200 << 10
_IEEE = tl.constexpr("ieee")


def flash_attention_prefill(
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
    """`paged_attention_prefill` by torch's flash attention if it supports the type and the head size; no padding."""
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] > _MAX_FLASH_HEAD_DIM:
        arguments = q, gate, k_cache, v_cache, block_table, lengths, counts
        return cpu.paged_attention_prefill(*arguments, block_size=block_size, scale=scale, formats=formats)
    length = int(lengths)
    token = torch.arange(length, device=q.device)
    rows = block_table[token // block_size].long() * block_size + token % block_size
    past = zip(formats_of(formats, k_cache, v_cache), (k_cache, v_cache), strict=True)
    kept = (format.dequantise(cache[rows], q.dtype) for format, cache in past)
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, *kept))
    # Only benchmarks and tests call this, and the import loads torch's compiler: 1.4 s that a start shouldn't take.
    from torch.nn.attention.bias import causal_lower_right

    causal: Any = causal_lower_right(q.shape[0], length)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=causal, scale=scale, enable_gqa=True
        )
    return out[0].transpose(0, 1) * gate.sigmoid()


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
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    k_format, v_format = checked_formats(q, gate, k_cache, v_cache, block_size, formats)
    assert block_table.dtype == torch.int32
    assert block_table.is_contiguous()
    kept = kept_as(q.dtype, k_format, v_format)
    shape = f"D{head_dim}_{q.dtype.itemsize * 8}{kept}"
    config = config_for("paged_attention_prefill", q.device, shape, _default(q.dtype, q.device, bool(kept)))
    # A tile of keys must lie in one block.
    blocks = {**config.blocks, "BLOCK_N": math.gcd(config.blocks["BLOCK_N"], block_size)}
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_tiles = cdiv(num_rows * (num_heads // num_kv_heads), config.blocks["BLOCK_M"])
    most_parts = max(1, min(_PROGRAMS // (num_kv_heads * num_tiles), MAX_SPLITS))
    sums, maxima, weights = _workspace(q, most_parts)
    # For `combine_splits`, every token is a sequence with a split for each part.
    split_lengths = torch.empty(num_rows if most_parts > 1 else 0, dtype=torch.int32, device=q.device)
    launch(
        _prefill_kernel,
        (num_kv_heads, num_tiles, most_parts),
        *(q, gate, k_cache, v_cache, block_table, lengths, counts, out, sums, maxima, weights, split_lengths, num_rows),
        *(*q.stride()[:2], *gate.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], scale * math.log2(math.e)),
        config=Config(blocks, config.num_warps, config.num_stages),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        K_FORMAT=k_format.name,
        V_FORMAT=v_format.name,
        IN_PARTS=most_parts > 1,
        MIN_PART=_MIN_PART,
        MIN_SPLIT=MIN_SPLIT,
    )
    if most_parts > 1:
        combine_splits(sums, maxima, weights, split_lengths, gate, out)
    return out


def _workspace(q: torch.Tensor, most_parts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 buffers for the parts: sums [T, Hq, parts, D], maxima and weights without D; at most _PROGRAMS tiles."""
    num_rows, num_heads, head_dim = q.shape if most_parts > 1 else (0, 0, 0)
    sums = torch.empty(num_rows, num_heads, most_parts, head_dim, dtype=torch.float32, device=q.device)
    maxima, weights = sums.new_empty(2, num_rows, num_heads, most_parts).unbind()
    return sums, maxima, weights


def _default(dtype: torch.dtype, device: torch.device, is_kept: bool) -> Config:
    if dtype == torch.float32:
        return _FLOAT32
    if shared_bytes(device) < _LARGE_SHARED_BYTES:
        return _SMALL_KEPT if is_kept else _SMALL
    if is_kept:
        return _LARGE_KEPT
    return _BLACKWELL if capability(device) >= 100 else _LARGE


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lengths", "counts"])
def _prefill_kernel(
    q,
    gate,
    k,
    v,
    block_table,
    lengths,
    counts,
    out,
    sums,
    maxima,
    weights,
    split_lengths,
    num_rows,
    stride_q_token,
    stride_q_head,
    stride_gate_token,
    stride_gate_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    IN_PARTS: tl.constexpr,
    MIN_PART: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # q, gate: [T, Hq, D]; k, v: rows of the pool; out: [T, Hq, D], contiguous. The longest tiles run first. sums:
    # [T, Hq, parts, D], sum of exp2(score - maximum) v; maxima and weights (the sum of exp2): without D. split_lengths:
    # [T], for `combine_splits`. A row here is a token and a head.
    kv_head = tl.program_id(0)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    length, count = tl.load(lengths).to(tl.int32), tl.load(counts).to(tl.int32)
    first_place = length - count
    # Of padding nothing is read, and its results are zeros.
    is_row, exists = row[:, None] < num_rows * GROUP, row[:, None] < count * GROUP
    first = 0
    if IN_PARTS:
        most = tl.maximum(length, 1)
        part_tokens = tl.cdiv(tl.cdiv(most, tl.minimum(tl.num_programs(2), tl.cdiv(most, MIN_PART))), BLOCK_SIZE)
        part_tokens *= BLOCK_SIZE
        first = tl.program_id(2) * part_tokens
        if (kv_head == 0) & (tl.program_id(2) == 0):
            splits = tl.where(part_tokens < length, tl.cdiv(length, part_tokens) * MIN_SPLIT, -1)
            splits = tl.where(row < count * GROUP, splits, 0)
            tl.store(split_lengths + row // GROUP, splits, mask=(row % GROUP == 0) & (row < num_rows * GROUP))
        # A padding tile's zeros come from `combine_splits`.
        if (first >= length) | (first_row >= count * GROUP):
            return
    dim = tl.arange(0, HEAD_DIM)
    # One 64-bit address a tile with 32-bit offsets: less arithmetic and fewer registers.
    first_token = first_row // GROUP
    token, head = (row // GROUP - first_token)[:, None], kv_head * GROUP + (row % GROUP)[:, None]
    q += first_token.to(tl.int64) * stride_q_token
    queries_at = q + (token * stride_q_token + head * stride_q_head + dim[None, :])
    queries = tl.load(queries_at, mask=exists, other=0.0)
    k += kv_head * stride_k_head
    v += kv_head * stride_v_head
    place = first_place + row // GROUP
    # Not -inf, so that a row without visible keys in a part has sums of zero.
    maximum = tl.full([BLOCK_M], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # Every row sees the keys before `whole`; none sees one from `stop` on.
    whole = (first_place + first_row // GROUP + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum(first_place + (first_row + BLOCK_M - 1) // GROUP + 1, length)
    if IN_PARTS:
        stop = tl.minimum(stop, first + part_tokens)
        whole = tl.maximum(tl.minimum(whole, stop // BLOCK_N * BLOCK_N), first)
    elif first_row >= count * GROUP:
        whole, stop = 0, 0
    for MASKED in tl.static_range(2):  # pyright: ignore
        for start in tl.range(whole if MASKED else first, stop if MASKED else whole, BLOCK_N):  # pyright: ignore
            total, weight, maximum = _attend(
                *(queries, total, weight, maximum, k, v, block_table, start, place, stop, stride_k_row, stride_v_row),
                *(scale_log2, HEAD_DIM, BLOCK_SIZE, K_FORMAT, V_FORMAT, BLOCK_N, MASKED),
            )
    row_at = token * (NUM_KV_HEADS * GROUP) + head
    # Two conditions, since the first is the compiler's.
    if IN_PARTS:  # noqa: SIM102
        if part_tokens < length:
            num_parts = tl.num_programs(2)
            at = first_token * (NUM_KV_HEADS * GROUP) * num_parts + tl.program_id(2) + row_at * num_parts
            tl.store(maxima + at, maximum[:, None], mask=exists)
            tl.store(weights + at, weight[:, None], mask=exists)
            tl.store(sums + at * HEAD_DIM + dim[None, :], total, mask=exists)
            return
    total *= tl.where(exists, 1.0 / weight[:, None], 0.0)
    gate += first_token.to(tl.int64) * stride_gate_token
    out += first_token.to(tl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM)
    gate_at = gate + (token * stride_gate_token + head * stride_gate_head)
    out_at = out + row_at * HEAD_DIM
    # In quarters: the gate of all dimensions doesn't fit into the registers.
    QUARTER: tl.constexpr = HEAD_DIM // 4
    low, high = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, 2 * QUARTER)), (0, 2, 1)))
    for half in tl.static_range(2):  # pyright: ignore
        part = high if half else low
        first, second = tl.split(tl.permute(tl.reshape(part, (BLOCK_M, 2, QUARTER)), (0, 2, 1)))
        for quarter in tl.static_range(2):  # pyright: ignore
            column = (2 * half + quarter) * QUARTER + tl.arange(0, QUARTER)[None, :]
            result = second if quarter else first
            result *= tl.sigmoid(tl.load(gate_at + column, mask=exists, other=0.0).to(tl.float32))
            tl.store(out_at + column, result, mask=is_row)


@triton.jit
def _attend(
    queries,
    total,
    weight,
    maximum,
    k,
    v,
    block_table,
    start,
    place,
    stop,
    stride_k_row,
    stride_v_row,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    # Adds the keys from `start` on to (total, weight, maximum): the sums of exp2(score - maximum) v and of exp2.
    key = start + tl.arange(0, BLOCK_N)
    block = tl.load(block_table + start // BLOCK_SIZE).to(tl.int64)
    first_key = block * BLOCK_SIZE + start % BLOCK_SIZE
    column = tl.arange(0, BLOCK_N)[:, None]
    # Rows past the end may contain NaN: they are not read and count as zeros.
    held = key[:, None] < stop if MASKED else None
    k += first_key * stride_k_row
    v += first_key * stride_v_row
    keys = load_rows(k, column * stride_k_row, held, queries.dtype, K_FORMAT, HEAD_DIM)
    values = load_rows(v, column * stride_v_row, held, queries.dtype, V_FORMAT, HEAD_DIM)
    scores = dot(queries, tl.trans(keys), None, _IEEE)
    if MASKED:
        scores = tl.where(key[None, :] <= place[:, None], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale_log2)
    exponentials = tl.exp2(scores * scale_log2 - new_maximum[:, None])
    shrink = tl.exp2(maximum - new_maximum)
    weight = weight * shrink + tl.sum(exponentials, axis=1)
    total = dot(round_to(exponentials, values.dtype), values, total * shrink[:, None], _IEEE)
    return total, weight, new_maximum
