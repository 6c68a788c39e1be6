"""The stateless half of the chunked gated delta rule, for all chunks of all heads at once.

cpu/gated_delta_rule.py has the mathematics and its names. The matrix units multiply raw keys and queries, which are
exact. Their inverse norms rk and rq (rq includes the scale K ** -0.5) are factors of rows and columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import dot, round_to, softplus
from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, configured, launch

CHUNK = 64
# For float32, three passes of the matrix units have an error of about 3e-7. "ieee" doesn't use them and would take tens
# of thousands of instructions and thousands of spilled bytes. bfloat16's few float32 products take one pass.
PRECISION = {torch.float32: "tf32x3", torch.bfloat16: "tf32"}


class Prepared(NamedTuple):
    """The scan's inputs for each chunk that has tokens. Rows after the last token are zero or never read.

    Attributes:
        solve: [chunks, Hv, 64, 64] in q's dtype, (I + M)^-1 with its columns multiplied by beta.
        attend: [chunks, Hv, 64, 64] in q's dtype, A.
        factors: [chunks, Hv, 3, 64] float32, of rows: rk exp(c), rq exp(c), rk exp(c_C - c).
        decay: [chunks, Hv] float32, exp(c_C), the factor of the state over the chunk.
    """

    solve: torch.Tensor
    attend: torch.Tensor
    factors: torch.Tensor
    decay: torch.Tensor


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    counts: torch.Tensor,
) -> Prepared:
    """Computes the scan's inputs for each chunk; arguments as in `gated_delta_prefill`."""
    num_rows, num_k_heads, k_dim = q.shape
    num_v_heads = a.shape[1]
    num_chunks = cdiv(num_rows, CHUNK)
    prepared = Prepared(
        q.new_empty(num_chunks, num_v_heads, CHUNK, CHUNK),
        q.new_empty(num_chunks, num_v_heads, CHUNK, CHUNK),
        q.new_empty(num_chunks, num_v_heads, 3, CHUNK, dtype=torch.float32),
        q.new_empty(num_chunks, num_v_heads, dtype=torch.float32),
    )
    config = _config(num_k_heads, num_v_heads, k_dim, q.dtype, q.device)
    launch(
        _prepare_kernel,
        (num_chunks, num_v_heads // config.blocks["HEADS"]),
        *(q, k, a, b, A_log, dt_bias, counts, *prepared),
        *(*q.stride()[:2], *k.stride()[:2], a.stride(0), b.stride(0)),
        config=config,
        K=k_dim,
        GROUP=num_v_heads // num_k_heads,
        PRECISION=PRECISION[q.dtype],
        CHUNK=CHUNK,
    )
    return prepared


@configured
def _config(num_k_heads: int, num_v_heads: int, k_dim: int, dtype: torch.dtype, device: torch.device) -> Config:
    # With one value head a program, each head of a group computes k k^T again. But a loop over them would keep two more
    # matrices in registers, so fewer programs would run in parallel.
    default = Config({"HEADS": 1}, num_warps=4, num_stages=1)
    shape = f"Hk{num_k_heads}_Hv{num_v_heads}_K{k_dim}_{dtype.itemsize * 8}"
    return config_for("gdn_prepare", device, shape, default)


@triton.jit(do_not_specialize_on_alignment=["counts"])
def _prepare_kernel(
    q_ptr,
    k_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    counts,
    solve_ptr,
    attend_ptr,
    factors_ptr,
    decay_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    a_token,
    b_token,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of HEADS value heads that share a key head. Layouts: `prepare` and `Prepared`."""
    chunk, first_head = tl.program_id(0), tl.program_id(1) * HEADS
    key_head = first_head // GROUP
    first = chunk * CHUNK
    num_rows = tl.load(counts).to(tl.int32) - first
    if num_rows <= 0:
        return
    rows = tl.arange(0, CHUNK)
    columns = tl.arange(0, K)
    present = rows < num_rows
    first = first.to(tl.int64)
    q_tile = q_ptr + first * q_token + key_head * q_head + rows[:, None] * q_token + columns[None, :]
    k_tile = k_ptr + first * k_token + key_head * k_head + rows[:, None] * k_token + columns[None, :]
    q = tl.load(q_tile, mask=present[:, None], other=0.0)
    k = tl.load(k_tile, mask=present[:, None], other=0.0)
    q32, k32 = q.to(tl.float32), k.to(tl.float32)
    rq = tl.rsqrt(tl.sum(q32 * q32, axis=1) + 1e-6) * (K**-0.5)
    rk = tl.rsqrt(tl.sum(k32 * k32, axis=1) + 1e-6)
    kk = dot(k, tl.trans(k), None, PRECISION) * rk[:, None] * rk[None, :]
    qk = dot(q, tl.trans(k), None, PRECISION) * rq[:, None] * rk[None, :]

    square = rows[:, None] * CHUNK + rows[None, :]
    for member in range(HEADS):
        head = first_head + member
        gate_rows = first + rows
        step = tl.load(a_ptr + gate_rows * a_token + head, mask=present, other=0.0).to(tl.float32)
        step = softplus(step + tl.load(dt_bias_ptr + head).to(tl.float32))
        g = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32)) * step
        beta = tl.load(b_ptr + gate_rows * b_token + head, mask=present, other=0.0).to(tl.float32)
        beta = 1 / (1 + tl.exp(-beta))
        # After the last token, nothing decays and nothing is written.
        g = tl.where(present, g, 0.0)
        beta = tl.where(present, beta, 0.0)
        # beta passes through unchanged: otherwise Triton loads it and computes its sigmoid 16 times in a matrix layout.
        c, beta = tl.associative_scan((g, beta), 0, _add_first)
        total = tl.sum(g, axis=0)
        # Mask future tokens before exp, since their exponents may overflow.
        past = rows[:, None] >= rows[None, :]
        decays = tl.exp(tl.where(past, c[:, None] - c[None, :], float("-inf")))
        index = chunk.to(tl.int64) * (tl.num_programs(1) * HEADS) + head
        tl.store(attend_ptr + index * (CHUNK * CHUNK) + square, round_to(qk * decays, k.dtype))
        factor_rows = factors_ptr + index * (3 * CHUNK) + rows
        tl.store(factor_rows, rk * tl.exp(c))
        tl.store(factor_rows + CHUNK, rq * tl.exp(c))
        # total is summed in another order than c, so it may exceed c's last entry by a rounding. That is harmless here.
        tl.store(factor_rows + 2 * CHUNK, rk * tl.exp(total - c))
        tl.store(decay_ptr + index, tl.exp(total))
        system = tl.where(rows[:, None] > rows[None, :], kk * decays * beta[:, None], 0.0)
        solve = _inverse(system, CHUNK, CHUNK // 4, PRECISION) * beta[None, :]
        tl.store(solve_ptr + index * (CHUNK * CHUNK) + square, round_to(solve, k.dtype))


@triton.jit
def _add_first(first, second, next_first, next_second):
    return first + next_first, next_second


@triton.jit
def _inverse(system, CHUNK: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + system)^-1 of a strictly lower triangular [64, 64], SIZE 16.

    Inverts four diagonal blocks of 16 by forward substitution, then computes (I + X)^-1 D, where D holds the blocks'
    inverses, X = D N, and N are the blocks below. X^4 is zero, so few products of blocks suffice and don't grow. Powers
    of the whole matrix do grow if keys resemble each other, until no digit is correct.
    """
    block = tl.arange(0, CHUNK // SIZE)
    inner = tl.arange(0, SIZE)
    same_block = (block[:, None, None, None] == block[None, None, :, None]) & (inner[None, :, None, None] >= 0)
    blocks = tl.sum(tl.where(same_block, tl.reshape(system, (CHUNK // SIZE, SIZE, CHUNK // SIZE, SIZE)), 0.0), axis=2)
    inverses = tl.where(inner[None, :, None] == inner[None, None, :], 1.0, tl.zeros_like(blocks))
    # Row i of the inverses is final after subtracting rows 0 to i - 1.
    for i in tl.static_range(SIZE - 1):  # pyright: ignore[reportGeneralTypeIssues]
        row = tl.sum(tl.where(inner[None, :, None] == i, inverses, 0.0), axis=1)
        column = tl.sum(tl.where(inner[None, None, :] == i, blocks, 0.0), axis=2)
        inverses -= tl.expand_dims(column, 2) * tl.expand_dims(row, 1)
    diagonal = tl.reshape(tl.where(same_block, inverses[:, :, None, :], 0.0), (CHUNK, CHUNK))

    rows = tl.arange(0, CHUNK)
    below = tl.where(rows[:, None] // SIZE > rows[None, :] // SIZE, system, 0.0)
    x = tl.dot(diagonal, below, input_precision=PRECISION)
    x2 = tl.dot(x, x, input_precision=PRECISION)
    even = diagonal + tl.dot(x2, diagonal, input_precision=PRECISION)
    return even - tl.dot(x, even, input_precision=PRECISION)
