"""From a projection to the cache: norms and rotates queries and keys, and writes keys and values, in one kernel.

Bound by memory: each of q, k and v is read once and written once; the gate isn't touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, launch, next_power_of_2
from qwen35mm_kernels.kv_formats import KVFormats

# At D = 256 a warp has two heads whole, so that a head is summed in the same order for one token and for thousands.
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
    """The last dimensions contiguous, and a row of the caches as a whole; they hold plain numbers of qkv's type."""
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_cache.shape[1:]
    assert head_dim & (head_dim - 1) == 0, f"a head's size must be a power of 2, got {head_dim}"
    assert qkv.shape[1] == 2 * (num_heads + num_kv_heads) * head_dim
    assert len(cos) == len(sin) == len(rows) == num_tokens
    assert 2 * cos.shape[1] <= head_dim
    assert rows.dtype == torch.int64
    assert k_cache.dtype == v_cache.dtype == qkv.dtype
    assert k_cache.stride()[1:] == v_cache.stride()[1:] == (head_dim, 1)
    assert qkv.stride(1) == cos.stride(1) == sin.stride(1) == 1
    assert q_norm.stride() == k_norm.stride() == rows.stride() == (1,)
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    num_pairs = cos.shape[1]
    config = config_for("qk_norm_rope_write", qkv.device, f"D{head_dim}", _DEFAULT)
    launch(
        _qk_norm_rope_write_kernel,
        # The heads of a token side by side: they lie in one row of qkv.
        (num_heads + num_kv_heads, cdiv(num_tokens, config.blocks["BLOCK_T"])),
        *(qkv, cos, sin, q_norm, k_norm, eps, q, k_cache, v_cache, rows, num_tokens),
        *(x.stride(0) for x in (qkv, cos, sin, k_cache, v_cache)),
        config=config,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=num_pairs,
        BLOCK_PAIRS=next_power_of_2(max(1, num_pairs)),
    )
    return q


# A decode step's rows are a row of a table, which starts anywhere.
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
    BLOCK_T: tl.constexpr,
):
    # qkv: [N, query and gate of each head | k | v]; a program has one query head, or one key head with its values.
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    row = tl.load(rows + token, mask=token < num_tokens, other=-1)
    kept = row >= 0
    qkv += token * stride_qkv
    cos += token * stride_cos
    sin += token * stride_sin
    if head < NUM_HEADS:
        # Padding is never read: its zeros stay zeros through norm and rotation.
        x = qkv + head * (2 * HEAD_DIM)
        out = q + (token * NUM_HEADS + head) * HEAD_DIM
        _norm_rotate(x, q_norm, eps, cos, sin, out, kept, token < num_tokens, HEAD_DIM, NUM_PAIRS, BLOCK_PAIRS)
    else:
        kv_head = head - NUM_HEADS
        dim = tl.arange(0, HEAD_DIM)[None, :]
        x = qkv + (2 * NUM_HEADS + kv_head) * HEAD_DIM
        v = tl.load(x + NUM_KV_HEADS * HEAD_DIM + dim, mask=kept)
        tl.store(v_cache + row * stride_v + kv_head * HEAD_DIM + dim, v, mask=kept)
        out = k_cache + row * stride_k + kv_head * HEAD_DIM
        _norm_rotate(x, k_norm, eps, cos, sin, out, kept, kept, HEAD_DIM, NUM_PAIRS, BLOCK_PAIRS)


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
    # The pairs once more, out of the L1 cache: that costs less than to bring partners together between threads.
    first = tl.load(x + pair, mask=read & turned, other=0.0).to(tl.float32)
    second = tl.load(x + NUM_PAIRS + pair, mask=read & turned, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=read & turned, other=0.0)
    s = tl.load(sin + pair, mask=read & turned, other=0.0)
    rms = tl.rsqrt(tl.sum(head * head, axis=1, keep_dims=True) / HEAD_DIM + eps)
    head *= rms * (1.0 + tl.load(weight + dim).to(tl.float32))
    first *= rms * (1.0 + tl.load(weight + pair, mask=turned, other=0.0).to(tl.float32))
    second *= rms * (1.0 + tl.load(weight + NUM_PAIRS + pair, mask=turned, other=0.0).to(tl.float32))
    tl.store(out + dim, head, mask=write & (dim >= 2 * NUM_PAIRS))
    tl.store(out + pair, first * c - second * s, mask=write & turned)
    tl.store(out + NUM_PAIRS + pair, second * c + first * s, mask=write & turned)
