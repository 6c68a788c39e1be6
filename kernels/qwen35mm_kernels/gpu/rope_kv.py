"""Norms and rotates a projection's queries and keys, and writes keys and values to the cache, in one kernel.

Memory-bound: q, k and v are each read once and written once. The gate isn't touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import round_to
from qwen35mm_kernels.gpu.early import starts_early, wait_for_inputs
from qwen35mm_kernels.gpu.kv_rows import kept_as, known_formats, store_rows
from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, launch, next_power_of_2
from qwen35mm_kernels.kv_formats import KVFormats

# At D = 256, a warp has two whole heads, so that a head's sum has the same order for one token and for thousands.
_DEFAULT = Config({"BLOCK_T": 8}, num_warps=4)


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
    """Last dimensions must be contiguous, and rows of the caches as a whole."""
    num_tokens, head_dim = qkv.shape[0], len(k_norm)
    num_kv_heads = k_cache.shape[1]
    k_format, v_format = known_formats(formats, k_cache, v_cache, head_dim)
    assert head_dim & (head_dim - 1) == 0, f"a head's size must be a power of 2, got {head_dim}"
    assert qkv.shape[1] == 2 * (num_heads + num_kv_heads) * head_dim
    assert len(cos) == len(sin) == len(rows) == num_tokens
    assert 2 * cos.shape[1] <= head_dim
    assert rows.dtype == torch.int64
    assert all(cache.stride(1) == cache.shape[2] for cache in (k_cache, v_cache))
    assert qkv.stride(1) == cos.stride(1) == sin.stride(1) == 1
    assert q_norm.stride() == k_norm.stride() == rows.stride() == (1,)
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    num_pairs = cos.shape[1]
    kept = kept_as(qkv.dtype, k_format, v_format)
    config = config_for("qk_norm_rope_write", qkv.device, f"D{head_dim}{kept}", _DEFAULT)
    launch(
        _qk_norm_rope_write_kernel,
        # Heads of a token are adjacent, as in a row of qkv.
        (num_heads + num_kv_heads, cdiv(num_tokens, config.blocks["BLOCK_T"])),
        *(qkv, cos, sin, q_norm, k_norm, eps, q, k_cache, v_cache, rows, num_tokens),
        *(x.stride(0) for x in (qkv, cos, sin, k_cache, v_cache)),
        config=config,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=num_pairs,
        BLOCK_PAIRS=next_power_of_2(max(1, num_pairs)),
        K_FORMAT=k_format.name,
        V_FORMAT=v_format.name,
        K_WIDTH=k_cache.shape[2],
        V_WIDTH=v_cache.shape[2],
        EARLY=starts_early(qkv.device),
    )
    return q


# In a decode step, `rows` is a row of a table, with any alignment.
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["rows"])
def _qk_norm_rope_write_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    q,
    k_cache,
    v_cache,
    rows,
    num_tokens,
    stride_qkv,
    stride_cos,
    stride_sin,
    stride_k,
    stride_v,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # qkv: [N, query and gate of each head | k | v]; a program has one query head, or one key head with its values.
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    row = tl.load(rows + token, mask=token < num_tokens, other=-1)
    kept = row >= 0
    wait_for_inputs(EARLY)
    qkv += token * stride_qkv
    cos += token * stride_cos
    sin += token * stride_sin
    if head < NUM_HEADS:
        # Padding is not read and stays zero through norm and rotation.
        x = qkv + head * (2 * HEAD_DIM)
        out = q + (token * NUM_HEADS + head) * HEAD_DIM
        _norm_rotate(x, q_norm, eps, cos, sin, out, kept, token < num_tokens, HEAD_DIM, NUM_PAIRS, BLOCK_PAIRS)
    else:
        kv_head = head - NUM_HEADS
        dim = tl.arange(0, HEAD_DIM)[None, :]
        x = qkv + (2 * NUM_HEADS + kv_head) * HEAD_DIM
        v = tl.load(x + NUM_KV_HEADS * HEAD_DIM + dim, mask=kept)
        v_out = v_cache + row * stride_v + kv_head * V_WIDTH
        if v_cache.dtype == qkv.dtype.scalar:
            tl.store(v_out + dim, v, mask=kept)
        else:
            store_rows(v_out, v.to(tl.float32), kept, V_FORMAT, HEAD_DIM)
        k_out = k_cache + row * stride_k + kv_head * K_WIDTH
        if k_cache.dtype == qkv.dtype.scalar:
            _norm_rotate(x, k_norm, eps, cos, sin, k_out, kept, kept, HEAD_DIM, NUM_PAIRS, BLOCK_PAIRS)
        else:
            turned = _normed_and_rotated(x, k_norm, eps, cos, sin, kept, HEAD_DIM, NUM_PAIRS)
            store_rows(k_out, turned, kept, K_FORMAT, HEAD_DIM)


@triton.jit
def _norm_rotate(
    x,
    weight,
    eps,
    cos,
    sin,
    out,
    read,
    write,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    # x, cos, sin, out: [BLOCK_T, 1] pointers to rows; read, write: [BLOCK_T, 1] masks.
    dim = tl.arange(0, HEAD_DIM)[None, :]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    turned = pair < NUM_PAIRS
    head = tl.load(x + dim, mask=read, other=0.0).to(tl.float32)
    # Load the pairs again from the L1 cache: cheaper than exchanging partners between threads.
    first = tl.load(x + pair, mask=read & turned, other=0.0).to(tl.float32)
    second = tl.load(x + NUM_PAIRS + pair, mask=read & turned, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=read & turned, other=0.0)
    s = tl.load(sin + pair, mask=read & turned, other=0.0)
    rms = tl.rsqrt(tl.sum(head * head, axis=1, keep_dims=True) / HEAD_DIM + eps)
    head *= rms * (1.0 + tl.load(weight + dim).to(tl.float32))
    first *= rms * (1.0 + tl.load(weight + pair, mask=turned, other=0.0).to(tl.float32))
    second *= rms * (1.0 + tl.load(weight + NUM_PAIRS + pair, mask=turned, other=0.0).to(tl.float32))
    dtype: tl.constexpr = out.dtype.scalar.element_ty
    tl.store(out + dim, round_to(head, dtype), mask=write & (dim >= 2 * NUM_PAIRS))
    tl.store(out + pair, round_to(first * c - second * s, dtype), mask=write & turned)
    tl.store(out + NUM_PAIRS + pair, round_to(second * c + first * s, dtype), mask=write & turned)


@triton.jit
def _normed_and_rotated(x, weight, eps, cos, sin, read, HEAD_DIM: tl.constexpr, NUM_PAIRS: tl.constexpr):
    """The result of `_norm_rotate` as whole float32 rows [BLOCK_T, HEAD_DIM], since scales depend on all neighbours."""
    dim = tl.arange(0, HEAD_DIM)[None, :]
    is_first, is_turned = dim < NUM_PAIRS, dim < 2 * NUM_PAIRS
    pair, partner = tl.where(is_first, dim, dim - NUM_PAIRS), tl.where(is_first, dim + NUM_PAIRS, dim - NUM_PAIRS)
    head = tl.load(x + dim, mask=read, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=read & is_turned, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=read & is_turned, other=1.0)
    s = tl.load(sin + pair, mask=read & is_turned, other=0.0)
    rms = tl.rsqrt(tl.sum(head * head, axis=1, keep_dims=True) / HEAD_DIM + eps)
    head *= rms * (1.0 + tl.load(weight + dim).to(tl.float32))
    other *= rms * (1.0 + tl.load(weight + partner, mask=is_turned, other=0.0).to(tl.float32))
    return tl.where(is_turned, tl.where(is_first, head * c - other * s, head * c + other * s), head)
