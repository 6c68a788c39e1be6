"""One decode step of a batch over the paged KV cache: splits each sequence and combines the splits' results.

The splits depend only on the sequence's own length and are summed in order, so that its result has the same bits alone
and in any batch. Any program may process any split: a fixed grid of programs works through one list of all sequences'
splits. Memory-bound: K and V are read once for all heads of a group.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import dot, round_to
from qwen35mm_kernels.gpu.early import starts_early, wait_for_inputs
from qwen35mm_kernels.gpu.kv_rows import kept_as, known_formats, load_rows
from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, launch, next_power_of_2, num_multiprocessors
from qwen35mm_kernels.kv_formats import KVFormats

# Splits have 128 tokens up to a length of 8,192, so that a single conversation keeps a card busy. Beyond, they grow in
# steps of 64 tokens, so that there are never more than 64 to combine.
MIN_SPLIT = 128
SPLIT_STEP = 64
MAX_SPLITS = 64
# More programs than run at once, which balances splits of unequal length.
_PROGRAMS_PER_MULTIPROCESSOR = 8

# The first two of five stages load entries of the block table, so two tiles of keys and values are in flight.
_DEFAULT = {
    torch.bfloat16: Config({"BLOCK_N": 32}, num_warps=4, num_stages=5),
    torch.float32: Config({"BLOCK_N": 16}, num_warps=4, num_stages=2),
}
# For keys and values of another type than the queries: codes of 32 tokens would leave room for two programs, not three.
_KEPT = Config({"BLOCK_N": 16}, num_warps=4, num_stages=2)
_IEEE = tl.constexpr("ieee")
_COMBINE = Config({"BLOCK_D": 64}, num_warps=4)


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
    """Allocates q's size times up to MAX_SPLITS in float32 for the splits. The size depends only on shapes."""
    batch_size, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    k_format, v_format = checked_formats(q, gate, k_cache, v_cache, block_size, formats)
    assert block_table.shape[0] == lengths.shape[0] == batch_size
    assert block_table.stride(1) == lengths.stride(0) == 1
    assert block_table.dtype == lengths.dtype == torch.int32
    max_splits = min(MAX_SPLITS, cdiv(block_table.shape[1] * block_size, MIN_SPLIT))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.empty(batch_size, num_heads, max_splits, head_dim, dtype=torch.float32, device=q.device)
    maxima, weights = sums.new_empty(2, batch_size, num_heads, max_splits).unbind()
    kept = kept_as(q.dtype, k_format, v_format)
    shape = f"G{num_heads // num_kv_heads}_D{head_dim}_{q.dtype.itemsize * 8}{kept}"
    config = config_for("paged_attention_decode", q.device, shape, _KEPT if kept else _DEFAULT[q.dtype])
    assert SPLIT_STEP % config.blocks["BLOCK_N"] == 0, "a tile of keys must lie in one block, wherever a split starts"
    num_programs = min(
        batch_size * max_splits * num_kv_heads, _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(q.device)
    )
    launch(
        _decode_splits_kernel,
        (num_programs,),
        *(q, k_cache, v_cache, block_table, lengths, sums, maxima, weights, batch_size, max_splits),
        *(*q.stride()[:2], *k_cache.stride()[:2], *v_cache.stride()[:2], block_table.stride(0)),
        scale * math.log2(math.e),
        config=config,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_B=max(16, next_power_of_2(batch_size)),
        BLOCK_G=max(16, next_power_of_2(num_heads // num_kv_heads)),
        K_FORMAT=k_format.name,
        V_FORMAT=v_format.name,
        MIN_SPLIT=MIN_SPLIT,
        SPLIT_STEP=SPLIT_STEP,
        MAX_SPLITS=MAX_SPLITS,
        EARLY=starts_early(q.device),
    )
    combine_splits(sums, maxima, weights, lengths, gate, out)
    return out


def combine_splits(
    sums: torch.Tensor,
    maxima: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Combines the splits of sequences of these lengths [B] in order, applies the gate, and writes out [B, Hq, D].

    Leaves those with a length of -1 as they are.

    Args:
        sums: [B, Hq, max_splits, D] float32, sums of exp2(score - maximum) v; maxima and weights have no D.
    """
    batch_size, num_heads, max_splits, head_dim = sums.shape
    config = config_for("paged_attention_combine", sums.device, f"D{head_dim}", _COMBINE)
    block_dims = min(config.blocks["BLOCK_D"], head_dim)
    launch(
        _combine_splits_kernel,
        (head_dim // block_dims, num_heads, batch_size),
        *(sums, maxima, weights, lengths, gate, out, num_heads, max_splits, *gate.stride()[:2]),
        config=Config({"BLOCK_D": block_dims}, config.num_warps, config.num_stages),
        HEAD_DIM=head_dim,
        MIN_SPLIT=MIN_SPLIT,
        SPLIT_STEP=SPLIT_STEP,
        MAX_SPLITS=MAX_SPLITS,
        EARLY=starts_early(sums.device),
    )


def checked_formats(
    q: torch.Tensor,
    gate: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_size: int,
    formats: KVFormats | None,
) -> KVFormats:
    """The caches' formats. Asserts the shapes and strides without which both paged kernels would leave their memory."""
    _, num_heads, head_dim = q.shape
    assert head_dim >= 16, head_dim
    assert head_dim & (head_dim - 1) == 0, f"a head's size must be a power of 2, got {head_dim}"
    assert block_size % 16 == k_cache.shape[0] % block_size == 0, block_size
    assert gate.shape == q.shape
    assert num_heads % k_cache.shape[1] == 0
    assert q.dtype == gate.dtype
    assert q.stride(2) == gate.stride(2) == 1, "the last dimension must be contiguous"
    return known_formats(formats, k_cache, v_cache, head_dim)


@triton.jit
def _split_tokens(length, MIN_SPLIT: tl.constexpr, SPLIT_STEP: tl.constexpr, MAX_SPLITS: tl.constexpr):
    return tl.maximum(MIN_SPLIT, SPLIT_STEP * tl.cdiv(length, SPLIT_STEP * MAX_SPLITS))


@triton.jit(do_not_specialize=["batch_size", "max_splits", "stride_table"])
def _decode_splits_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    lengths,
    sums,
    maxima,
    weights,
    batch_size,
    max_splits,
    stride_q_sequence,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_table,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLIT_STEP: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    # sums: [B, Hq, max_splits, D], sum of exp2(score - maximum) v; maxima and weights (the sum of exp2): without D.
    every = tl.arange(0, BLOCK_B)
    every_length = tl.load(lengths + every, mask=every < batch_size, other=0)
    ends = tl.cumsum(tl.cdiv(every_length, _split_tokens(every_length, MIN_SPLIT, SPLIT_STEP, MAX_SPLITS)), axis=0)
    dim = tl.arange(0, HEAD_DIM)
    group = tl.arange(0, BLOCK_G)
    column = tl.arange(0, BLOCK_N)
    wait_for_inputs(EARLY)
    # Heads of the same split are adjacent, since their keys are neighbours in memory.
    for item in tl.range(tl.program_id(0), tl.max(ends, axis=0) * NUM_KV_HEADS, tl.num_programs(0)):  # pyright: ignore
        kv_head, place = item % NUM_KV_HEADS, item // NUM_KV_HEADS
        before = ends <= place
        sequence = tl.sum(before.to(tl.int32), axis=0)
        split = place - tl.max(tl.where(before, ends, 0), axis=0)
        length = tl.load(lengths + sequence)
        split_tokens = _split_tokens(length, MIN_SPLIT, SPLIT_STEP, MAX_SPLITS)
        first = split * split_tokens
        stop = tl.minimum(first + split_tokens, length)
        sequence = sequence.to(tl.int64)
        head = kv_head * GROUP + group
        queries = tl.load(
            q + sequence * stride_q_sequence + head[:, None] * stride_q_head + dim[None, :],
            mask=group[:, None] < GROUP,
            other=0.0,
        )
        k_head, v_head = k_cache + kv_head * stride_k_head, v_cache + kv_head * stride_v_head
        maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_G], tl.float32)
        total = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
        for start in tl.range(first, stop, BLOCK_N):  # pyright: ignore
            block = tl.load(block_table + sequence * stride_table + start // BLOCK_SIZE).to(tl.int64)
            row = (block * BLOCK_SIZE + start % BLOCK_SIZE + column)[:, None]
            # Rows past the end may contain NaN: they are not read and count as zeros.
            held = start + column < stop
            keys = load_rows(k_head + row * stride_k_row, 0, held[:, None], queries.dtype, K_FORMAT, HEAD_DIM)
            values = load_rows(v_head + row * stride_v_row, 0, held[:, None], queries.dtype, V_FORMAT, HEAD_DIM)
            scores = dot(queries, tl.trans(keys), None, _IEEE) * scale_log2
            scores = tl.where(held[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            exponentials = tl.exp2(scores - new_maximum[:, None])
            shrink = tl.exp2(maximum - new_maximum)
            weight = weight * shrink + tl.sum(exponentials, axis=1)
            total = dot(round_to(exponentials, values.dtype), values, total * shrink[:, None], _IEEE)
            maximum = new_maximum
        place = (sequence * (NUM_KV_HEADS * GROUP) + head) * max_splits + split
        tl.store(sums + place[:, None] * HEAD_DIM + dim[None, :], total, mask=group[:, None] < GROUP)
        tl.store(maxima + place, maximum, mask=group < GROUP)
        tl.store(weights + place, weight, mask=group < GROUP)


@triton.jit(do_not_specialize=["max_splits"])
def _combine_splits_kernel(
    sums,
    maxima,
    weights,
    lengths,
    gate,
    out,
    num_heads,
    max_splits,
    stride_gate_sequence,
    stride_gate_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLIT_STEP: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    # Always MAX_SPLITS rows with missing ones masked: the order of the sum depends neither on the batch nor the table.
    dim = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + sequence)
    if length < 0:
        return
    split = tl.arange(0, MAX_SPLITS)
    exists = split < tl.cdiv(length, _split_tokens(length, MIN_SPLIT, SPLIT_STEP, MAX_SPLITS))
    place = (sequence * num_heads + head) * max_splits + split
    maximum = tl.load(maxima + place, mask=exists, other=float("-inf"))
    weight = tl.load(weights + place, mask=exists, other=0.0)
    total = tl.load(sums + place[:, None] * HEAD_DIM + dim[None, :], mask=exists[:, None], other=0.0)
    opened = tl.load(gate + sequence * stride_gate_sequence + head * stride_gate_head + dim).to(tl.float32)
    # A padding row has no split and gives 0, whatever its gate is.
    factor = tl.exp2(maximum - tl.where(length > 0, tl.max(maximum, axis=0), 0.0))
    weight = tl.where(length > 0, tl.sum(weight * factor, axis=0), 1.0)
    result = tl.sum(total * factor[:, None], axis=0) / weight * tl.sigmoid(opened)
    tl.store(out + (sequence * num_heads + head) * HEAD_DIM + dim, tl.where(length > 0, result, 0.0))
