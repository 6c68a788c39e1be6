"""Softmax attention: causal prefill over a cache, one decode step, and the vision tower's attention inside frames."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qwen35mm_kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from qwen35mm_kernels.dispatch import implementation, implements

# Measured 128 to 512: torch's kernel is fastest on blocks of 256, at short and long caches.
_QUERY_BLOCK = 256
# On Hopper cards torch itself would prefer cuDNN's attention, which builds a plan for every new shape: each size of
# picture, and in decoding each length.
_ON_CARDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Causal attention of the last T tokens of a sequence over its L cached tokens, grouped queries.

    Args:
        q: [T, Hq, D], float32 or bfloat16; query i sits at cache index L - T + i.
        k, v: [L, Hkv, D] of q's dtype, the new tokens included; L >= T and Hq is a multiple of Hkv.
        scale: factor of the scores, usually D ** -0.5.

    Returns:
        [T, Hq, D] in q's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_shape("q", q, (None, None, None), "[T, Hq, D]")
    _check_keys_values(q, k, v, num_heads=q.shape[1])
    if not 1 <= q.shape[0] <= k.shape[0]:
        raise ValueError(
            f"attention_prefill needs 1 <= T <= L, got T = {q.shape[0]} queries and L = {k.shape[0]} keys; "
            "append the new tokens' k and v before the call."
        )
    return implementation("attention_prefill", q.device)(q, k, v, scale)


def attention_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Attention of one new token of one sequence over its L cached tokens, its own included.

    Args:
        q: [Hq, D], float32 or bfloat16.
        k, v: [L, Hkv, D] of q's dtype; Hq is a multiple of Hkv.
        scale: factor of the scores, usually D ** -0.5.

    Returns:
        [Hq, D] in q's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_shape("q", q, (None, None), "[Hq, D]")
    _check_keys_values(q, k, v, num_heads=q.shape[0])
    if k.shape[0] == 0:
        raise ValueError("k must hold at least one token, got L = 0; append the new token's k and v before the call.")
    return implementation("attention_decode", q.device)(q, k, v, scale)


def vision_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """Full attention inside each frame, scores scaled by D ** -0.5.

    Args:
        q, k, v: [P, H, D] of one dtype, the patches of all frames in order.
        cu_seqlens: [frames + 1] integers, best on the CPU, where each frame starts: from 0, rising, the last one is P.

    Returns:
        [P, H, D] in q's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit, or cu_seqlens that don't partition the patches.
    """
    check_dtype("q", q, FLOAT_DTYPES)
    check_shape("q", q, (None, None, None), "[P, H, D]")
    for name, tensor in (("k", k), ("v", v)):
        check_dtype(name, tensor, (q.dtype,))
        check_shape(name, tensor, q.shape, "the shape of q")
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != q.shape[0] or any(map(int.__ge__, bounds, bounds[1:])):
        raise ValueError(
            f"cu_seqlens must rise from 0 to P = {q.shape[0]}, one bound more than there are frames; got {bounds}."
        )
    return implementation("vision_attention", q.device)(q, k, v, bounds)


def _check_keys_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_heads: int) -> None:
    check_dtype("q", q, FLOAT_DTYPES)
    check_dtype("k", k, (q.dtype,))
    check_dtype("v", v, (q.dtype,))
    check_shape("k", k, (None, None, q.shape[-1]), "[L, Hkv, D]")
    check_shape("v", v, k.shape, "the shape of k")
    if k.shape[1] == 0 or num_heads % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads, got Hq = {num_heads} and Hkv = {k.shape[1]}.")


def naive_attention_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The specification of `attention_prefill`: each query against the keys up to its own."""
    offset = k.shape[0] - q.shape[0]
    rows = [naive_attention_decode(query, k[: offset + i + 1], v[: offset + i + 1], scale) for i, query in enumerate(q)]
    return torch.stack(rows)


def naive_attention_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The specification of `attention_decode`: query head h reads key head h // (Hq / Hkv)."""
    group = q.shape[0] // k.shape[1]
    heads = []
    for head in range(q.shape[0]):
        keys, values = k[:, head // group].float(), v[:, head // group].float()
        heads.append(torch.softmax(keys @ q[head].float() * scale, dim=0) @ values)
    return torch.stack(heads).to(q.dtype)


def naive_vision_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """The specification of `vision_attention`."""
    out = torch.zeros_like(q)
    for start, stop in itertools.pairwise(bounds):
        for i in range(start, stop):
            out[i] = naive_attention_decode(q[i], k[start:stop], v[start:stop], q.shape[-1] ** -0.5)
    return out


def _backends(device: torch.device) -> AbstractContextManager[Any]:
    """Which of torch's attentions may run."""
    return contextlib.nullcontext() if device.type == "cpu" else sdpa_kernel(_ON_CARDS)


@implements("attention_prefill", "torch")
def _attention_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    offset = k.shape[0] - q.shape[0]
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A block of queries sees no key after its last one; its mask stays small however long the cache is.
    for start in range(0, q.shape[0], _QUERY_BLOCK):
        block = queries[:, :, start : start + _QUERY_BLOCK]
        num_keys = offset + start + block.shape[2]
        mask = torch.ones(block.shape[2], num_keys, dtype=torch.bool, device=q.device).tril_(offset + start)
        attended = F.scaled_dot_product_attention(
            block, keys[:, :, :num_keys], values[:, :, :num_keys], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[start : start + _QUERY_BLOCK] = attended[0].transpose(0, 1)
    return out


@implements("attention_decode", "torch")
def _attention_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    # A group's query heads stand as rows against their one key head: K and V are read once, never expanded.
    # (enable_gqa takes 3 to 12 times as long on a CPU.)
    groups = q.reshape(1, k.shape[1], -1, q.shape[1])
    with _backends(q.device):
        out = F.scaled_dot_product_attention(groups, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=scale)
    return out.reshape(q.shape)


@implements("vision_attention", "torch")
def _vision_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if len(set(lengths)) > 1:
        frames = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([_vision_attention(*frame, [0, len(frame[0])]) for frame in frames])
    q, k, v = (x.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for x in (q, k, v))
    with _backends(q.device):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
