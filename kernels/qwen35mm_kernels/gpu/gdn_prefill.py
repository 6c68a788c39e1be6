"""The gated delta rule over a sequence: `gdn_prepare` for all chunks at once, then a scan that carries the state.

The columns of the state [K, V] are independent: each program of the scan carries BLOCK_V of them through the sequence,
in float32 registers. Chunks of 64 tokens start at the call's first token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.cpu.attention import aligned
from qwen35mm_kernels.gpu.arithmetic import dot, round_to
from qwen35mm_kernels.gpu.gdn_prepare import CHUNK, PRECISION, prepare
from qwen35mm_kernels.gpu.launch import Config, config_for, configured, launch, num_multiprocessors

_DIMS = (16, 32, 64, 128)


def gated_delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """K and V must be 16, 32, 64 or 128. Last dimensions must be contiguous; other strides are free."""
    num_rows, num_v_heads, v_dim = v.shape
    k_dim = q.shape[2]
    assert k_dim in _DIMS, k_dim
    assert v_dim in _DIMS, v_dim
    assert q.shape == k.shape
    assert q.dtype == k.dtype == v.dtype
    assert num_v_heads % q.shape[1] == 0
    assert a.shape == b.shape == (num_rows, num_v_heads)
    assert A_log.shape == dt_bias.shape == (num_v_heads,)
    assert states.shape[1:] == (num_v_heads, k_dim, v_dim)
    assert states.dtype == torch.float32
    assert all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (q, k, v, a, b, A_log, dt_bias, states))
    if q.dtype != torch.float32:
        # Triton prefetches only tensors that it can read 16 bytes at a time. Without prefetch, Triton 3.6 compiles a
        # scan for Hopper cards with wrong sums and reads past its shared memory (docs/decisions.md).
        q, k, v = (aligned(x) for x in (q, k, v))
    prepared = prepare(q, k, a, b, A_log, dt_bias, counts)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    config = _scan_config(num_v_heads, k_dim, v_dim, v.dtype, v.device)
    launch(
        _scan_kernel,
        (v_dim // config.blocks["BLOCK_V"], num_v_heads),
        *(q, k, v, *prepared, states, slots, counts, out),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *states.stride()[:3], *out.stride()[:2], num_rows),
        config=config,
        K=k_dim,
        GROUP=num_v_heads // k.shape[1],
        PRECISION=PRECISION[k.dtype],
        CHUNK=CHUNK,
    )
    return out


@configured
def _scan_config(num_v_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> Config:
    """The measured configuration of the scan, else one that fills a card and computes no product twice.

    Independent of lengths and the number of sequences, so that these can't change how a sequence is rounded.
    """
    block_v = min(v_dim, k_dim, 32)
    if dtype == torch.float32:
        default = Config({"BLOCK_V": block_v}, num_warps=4, num_stages=1)
    else:
        # Each warp computes 16 of the 64 rows of a chunk: 8 warps would compute most products twice. With two stages,
        # two programs fit on a multiprocessor.
        fits_once = num_v_heads * (v_dim // block_v) <= num_multiprocessors(device)
        default = Config({"BLOCK_V": block_v}, num_warps=4, num_stages=3 if fits_once else 2)
    config = config_for("gdn_scan", device, f"Hv{num_v_heads}_K{k_dim}_V{v_dim}_{dtype.itemsize * 8}", default)
    # One stage prefetches nothing: see `gated_delta_prefill`.
    assert dtype == torch.float32 or config.num_stages >= 2, f"gdn_scan needs two stages at least, got {config}"
    return config


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "counts"])
def _scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    solve_ptr,
    attend_ptr,
    factors_ptr,
    decay_ptr,
    states_ptr,
    slots,
    counts,
    out_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    state_slot,
    state_head,
    state_k,
    out_token,
    out_head,
    num_rows,
    K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Carries BLOCK_V columns of a value head's state through the sequence (see `gated_delta_prefill`, `Prepared`)."""
    column, head = tl.program_id(0) * BLOCK_V, tl.program_id(1)
    num_heads = tl.num_programs(1)
    rows = tl.arange(0, CHUNK)
    k_range = tl.arange(0, K)
    v_range = tl.arange(0, BLOCK_V)
    key_head = head // GROUP
    # Offsets inside a tile fit into 32 bits; a tile's start may not.
    q_tile = rows[:, None] * q_token + k_range[None, :]
    k_tile = rows[:, None] * k_token + k_range[None, :]
    v_tile = rows[:, None] * v_token + v_range[None, :]
    out_tile = rows[:, None] * out_token + v_range[None, :]
    square = rows[:, None] * CHUNK + rows[None, :]
    state_tile = states_ptr + tl.load(slots).to(tl.int64) * state_slot + head.to(tl.int64) * state_head + column
    state_tile += k_range[:, None].to(tl.int64) * state_k + v_range[None, :]
    state = tl.load(state_tile)

    # Triton's pipelining prefetches only operands of matrix products. The factors are prefetched by hand.
    factor_rows = factors_ptr + rows
    read_k = tl.load(factor_rows + head * (3 * CHUNK))
    read_q = tl.load(factor_rows + head * (3 * CHUNK) + CHUNK)
    write_k = tl.load(factor_rows + head * (3 * CHUNK) + 2 * CHUNK)
    decay = tl.load(decay_ptr + head)
    count = tl.load(counts).to(tl.int32)
    num_chunks = tl.cdiv(count, CHUNK)
    for i in range(num_chunks):
        chunk = tl.cast(i, tl.int64)
        token = chunk * CHUNK
        index = chunk * num_heads + head
        ahead = tl.minimum(chunk + 1, num_chunks - 1) * num_heads + head
        next_read_k = tl.load(factor_rows + ahead * (3 * CHUNK))
        next_read_q = tl.load(factor_rows + ahead * (3 * CHUNK) + CHUNK)
        next_write_k = tl.load(factor_rows + ahead * (3 * CHUNK) + 2 * CHUNK)
        next_decay = tl.load(decay_ptr + ahead)
        present = (rows < count - i * CHUNK)[:, None]
        k = tl.load(k_ptr + (token * k_token + key_head * k_head) + k_tile, mask=present, other=0.0)
        solve = tl.load(solve_ptr + index * (CHUNK * CHUNK) + square)
        rounded = round_to(state, k.dtype)
        unseen = -dot(k, rounded, None, PRECISION) * read_k[:, None]
        v_start = token * v_token + (head * v_head + column)
        unseen += tl.load(v_ptr + v_start + v_tile, mask=present, other=0.0)
        q = tl.load(q_ptr + (token * q_token + key_head * q_head) + q_tile, mask=present, other=0.0)
        out = dot(q, rounded, None, PRECISION) * read_q[:, None]
        written = dot(solve, round_to(unseen, k.dtype), None, PRECISION)
        kept = round_to(written * write_k[:, None], k.dtype)
        state = dot(tl.trans(k), kept, state * decay, PRECISION)
        attend = tl.load(attend_ptr + index * (CHUNK * CHUNK) + square)
        out = dot(attend, round_to(written, k.dtype), out, PRECISION)
        out_start = token * out_token + (head * out_head + column)
        # Padding has no queries, which gives zeros.
        tl.store(out_ptr + out_start + out_tile, round_to(out, k.dtype), mask=(rows < num_rows - i * CHUNK)[:, None])
        read_k, read_q, write_k, decay = next_read_k, next_read_q, next_write_k, next_decay

    tl.store(state_tile, state)
    for i in range(num_chunks, tl.cdiv(num_rows, CHUNK)):
        out_start = tl.cast(i, tl.int64) * CHUNK * out_token + (head * out_head + column)
        zeros = tl.zeros([CHUNK, BLOCK_V], out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_start + out_tile, zeros, mask=(rows < num_rows - i * CHUNK)[:, None])
