"""The half of the chunked gated delta rule that carries the state: chunk after chunk, a program to a slice of V.

The columns of the state [K, V] never meet: each program carries BLOCK_V of them through its segment of a sequence, in
float32 and in registers. A segment is the whole sequence unless `gdn_segments` cuts it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import dot, round_to
from qwen35mm_kernels.gpu.gdn_prepare import CHUNK, PRECISION, Prepared
from qwen35mm_kernels.gpu.launch import Config, config_for, launch, shared_bytes

# What blocks of 64 need: Hopper and data centre Blackwell have it.
_ROOMY_SHARED_BYTES = 200 << 10


class Segments(NamedTuple):
    """How the sequences are cut for the scan.

    Attributes:
        table: [count, 5] int32: first token, stop, first chunk, sequence, and 1 for the last of its sequence; None: one
            sequence, cut every `num_tokens` tokens.
        count: of all sequences.
        num_tokens: to a segment, a multiple of 64.
        bounds: [N + 1] int32, the first segment of each sequence; None where table is.
    """

    table: torch.Tensor | None
    count: int
    num_tokens: int
    bounds: torch.Tensor | None


def scan_config(v: torch.Tensor, k_dim: int) -> Config:
    """The measured configuration of the scan, else one with programs for about every multiprocessor.

    It depends on no length and on no number of sequences, so that these can't decide how a sequence is rounded.
    """
    num_v_heads, v_dim = v.shape[1:]
    widest = min(v_dim, k_dim)
    if v.dtype == torch.float32:
        default = Config({"BLOCK_V": min(widest, 32)}, num_warps=4, num_stages=1)
    elif shared_bytes(v.device) < _ROOMY_SHARED_BYTES:
        default = Config({"BLOCK_V": min(widest, 32)}, num_warps=8, num_stages=3)
    elif num_v_heads * v_dim >= 4096:
        # Programs of one head load the same tiles: where heads fill the card, wide blocks spare its second-level cache.
        default = Config({"BLOCK_V": min(widest, 64)}, num_warps=8, num_stages=3)
    else:
        default = Config({"BLOCK_V": min(widest, 32)}, num_warps=4, num_stages=3)
    return config_for("gdn_scan", v.device, f"Hv{num_v_heads}_K{k_dim}_V{v_dim}_{v.dtype.itemsize * 8}", default)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    prepared: Prepared,
    segments: Segments,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor,
    out: torch.Tensor | None,
    config: Config,
) -> None:
    """Runs every segment.

    Args:
        v: None stands for zeros, and the state then starts as the identity.
        initial_state: [segments, Hv, K, V], the state before each segment; None: zeros.
        final_state: with `out` [N, Hv, K, V], written after each sequence; it may be initial_state where every sequence
            is one segment. Without, [segments, Hv, K, V], written after every segment but the last of a sequence.
        out: [T, Hv, V], written; None: only the states are wanted.
    """
    values, output, before = (x if x is not None else y for x, y in ((v, k), (out, k), (initial_state, final_state)))
    launch(
        _scan_kernel,
        (final_state.shape[3] // config.blocks["BLOCK_V"], final_state.shape[1], segments.count),
        q,
        k,
        values,
        *prepared,
        before,
        final_state,
        output,
        segments.table,
        *q.stride()[:2],
        *k.stride()[:2],
        *values.stride()[:2],
        *before.stride()[:3],
        *final_state.stride()[:3],
        *output.stride()[:2],
        k.shape[0],
        segments.num_tokens,
        config=config,
        K=k.shape[2],
        GROUP=final_state.shape[1] // k.shape[1],
        GIVEN_STATE=initial_state is not None,
        WITH_VALUES=v is not None,
        WITH_OUTPUT=out is not None,
        PACKED=segments.table is not None,
        PRECISION=PRECISION[k.dtype],
        CHUNK=CHUNK,
    )


@triton.jit(do_not_specialize=["num_tokens", "segment_tokens"])
def _scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    solve_ptr,
    attend_ptr,
    factors_ptr,
    decay_ptr,
    initial_ptr,
    final_ptr,
    out_ptr,
    segments_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    initial_row,
    initial_head,
    initial_k,
    final_row,
    final_head,
    final_k,
    out_token,
    out_head,
    num_tokens,
    segment_tokens,
    K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
    GIVEN_STATE: tl.constexpr,
    WITH_VALUES: tl.constexpr,
    WITH_OUTPUT: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """BLOCK_V columns of one value head's state through one segment. Layouts: `scan`, `Prepared`, `Segments`."""
    column, head, segment = tl.program_id(0) * BLOCK_V, tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    if PACKED:
        first = tl.load(segments_ptr + 5 * segment)
        stop = tl.load(segments_ptr + 5 * segment + 1)
        first_chunk = tl.load(segments_ptr + 5 * segment + 2)
        sequence = tl.load(segments_ptr + 5 * segment + 3)
        is_last = tl.load(segments_ptr + 5 * segment + 4) != 0
    else:
        first = segment * segment_tokens
        stop = tl.minimum(first + segment_tokens, num_tokens)
        first_chunk = first // CHUNK
        sequence = segment * 0
        is_last = stop == num_tokens
    # The state after a sequence's last segment comes from the run that writes the output.
    if is_last and not WITH_OUTPUT:
        return

    rows = tl.arange(0, CHUNK)
    k_range = tl.arange(0, K)
    v_range = tl.arange(0, BLOCK_V)
    key_head = head // GROUP
    # Offsets inside a tile fit 32 bits; where the tile starts may not.
    q_tile = rows[:, None] * q_token + k_range[None, :]
    k_tile = rows[:, None] * k_token + k_range[None, :]
    v_tile = rows[:, None] * v_token + v_range[None, :]
    out_tile = rows[:, None] * out_token + v_range[None, :]
    square = rows[:, None] * CHUNK + rows[None, :]
    first64, first_chunk64 = first.to(tl.int64), first_chunk.to(tl.int64)

    if GIVEN_STATE:
        state_at = initial_ptr + segment.to(tl.int64) * initial_row + head.to(tl.int64) * initial_head + column
        state = tl.load(state_at + k_range[:, None].to(tl.int64) * initial_k + v_range[None, :])
    elif WITH_VALUES:
        state = tl.zeros((K, BLOCK_V), dtype=tl.float32)
    else:
        state = tl.where(k_range[:, None] == column + v_range[None, :], 1.0, 0.0)

    # Triton's pipelining loads the tiles ahead, but not what no matrix product takes: the factors are, by hand.
    index = first_chunk64 * num_heads + head
    factor_rows = factors_ptr + rows
    read_k = tl.load(factor_rows + index * (3 * CHUNK))
    read_q = tl.load(factor_rows + index * (3 * CHUNK) + CHUNK)
    write_k = tl.load(factor_rows + index * (3 * CHUNK) + 2 * CHUNK)
    decay = tl.load(decay_ptr + index)
    num_chunks = tl.cdiv(stop - first, CHUNK)
    for i in range(num_chunks):
        token = first64 + i * CHUNK
        index = (first_chunk64 + i) * num_heads + head
        ahead = (first_chunk64 + tl.minimum(i + 1, num_chunks - 1)) * num_heads + head
        next_read_k = tl.load(factor_rows + ahead * (3 * CHUNK))
        next_read_q = tl.load(factor_rows + ahead * (3 * CHUNK) + CHUNK)
        next_write_k = tl.load(factor_rows + ahead * (3 * CHUNK) + 2 * CHUNK)
        next_decay = tl.load(decay_ptr + ahead)
        present = (rows < stop - first - i * CHUNK)[:, None]
        k = tl.load(k_ptr + (token * k_token + key_head * k_head) + k_tile, mask=present, other=0.0)
        solve = tl.load(solve_ptr + index * (CHUNK * CHUNK) + square)
        rounded = round_to(state, k.dtype)
        unseen = -dot(k, rounded, None, PRECISION) * read_k[:, None]
        if WITH_VALUES:
            v_start = token * v_token + (head * v_head + column)
            unseen += tl.load(v_ptr + v_start + v_tile, mask=present, other=0.0)
        if WITH_OUTPUT:
            q = tl.load(q_ptr + (token * q_token + key_head * q_head) + q_tile, mask=present, other=0.0)
            out = dot(q, rounded, None, PRECISION) * read_q[:, None]
        written = dot(solve, round_to(unseen, k.dtype), None, PRECISION)
        kept = round_to(written * write_k[:, None], k.dtype)
        state = dot(tl.trans(k), kept, state * decay, PRECISION)
        if WITH_OUTPUT:
            attend = tl.load(attend_ptr + index * (CHUNK * CHUNK) + square)
            out = dot(attend, round_to(written, k.dtype), out, PRECISION)
            out_start = token * out_token + (head * out_head + column)
            tl.store(out_ptr + out_start + out_tile, round_to(out, k.dtype), mask=present)
        read_k, read_q, write_k, decay = next_read_k, next_read_q, next_write_k, next_decay

    final_tile = final_ptr + head.to(tl.int64) * final_head + column
    final_tile += k_range[:, None].to(tl.int64) * final_k + v_range[None, :]
    if WITH_OUTPUT:
        if is_last:
            tl.store(final_tile + sequence.to(tl.int64) * final_row, state)
    else:
        tl.store(final_tile + segment.to(tl.int64) * final_row, state)
