"""Mixture of experts: which experts a token goes to, and the routed experts' matrices.

Source: Qwen3_5MoeTopKRouter and Qwen3_5MoeExperts of transformers' modeling_qwen3_5_moe.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qwen35mm_kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from qwen35mm_kernels.dispatch import implementation, implements


def moe_route(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's k likeliest experts and their shares, renormalised to sum to one.

    Args:
        logits: [N, E], float32 or bfloat16. The softmax is float32.
        k: experts of a token, from 1 to E.

    Returns:
        weights: [N, k] in the logits' dtype, the likeliest first.
        chosen: [N, k] int64, distinct in a row. Of equal logits the lower expert comes first.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_dtype("logits", logits, FLOAT_DTYPES)
    check_shape("logits", logits, (None, None), "[N, E]")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be from 1 to E = {logits.shape[1]} experts, got {k}; take it from config.json.")
    return implementation("moe_route", logits.device)(logits, k)


def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    block_m: int | None = None,
) -> torch.Tensor:
    """The sum over a token's experts of weight * down(silu(gate(x)) * up(x)), in the order of `chosen`.

    Args:
        x: [N, hidden], float32 or bfloat16.
        gate_up: [E, 2 * width, hidden] of x's dtype: an expert's gate rows, then its up rows.
        down: [E, hidden, width] of x's dtype.
        chosen: [N, k] int64, the experts of each token, distinct in a row and below E (neither is checked: that would
            wait for the device).
        weights: [N, k] in x's dtype, their shares.
        block_m: 16, 64 or 128 rows of a tile on a card; None chooses by N. With one block_m a token's result has the
            same bits whatever N is. An implementation without tiles ignores it.

    Returns:
        [N, hidden] in x's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit, or another block_m.
    """
    check_dtype("x", x, FLOAT_DTYPES)
    check_shape("x", x, (None, None), "[N, hidden]")
    for name, tensor in (("gate_up", gate_up), ("down", down), ("weights", weights)):
        check_dtype(name, tensor, (x.dtype,))
    check_shape("down", down, (None, x.shape[1], None), "[E, hidden, width]")
    num_experts, hidden, width = down.shape
    check_shape("gate_up", gate_up, (num_experts, 2 * width, hidden), "[E, 2 * width, hidden]")
    check_dtype("chosen", chosen, (torch.int64,))
    check_shape("chosen", chosen, (x.shape[0], None), "[N, k]")
    check_shape("weights", weights, chosen.shape, "the shape of chosen")
    if block_m not in (None, 16, 64, 128):
        raise ValueError(f"block_m must be 16, 64, 128 or None, got {block_m}; None chooses by the number of tokens.")
    return implementation("moe_experts", x.device)(x, gate_up, down, chosen, weights, block_m)


def naive_moe_route(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `moe_route`: softmax over all experts, the k largest one after the other, sum one."""
    weights = torch.zeros(logits.shape[0], k)
    chosen = torch.zeros(logits.shape[0], k, dtype=torch.int64)
    for row, scores in enumerate(logits.float()):
        shares = torch.exp(scores - scores.max())
        shares = shares / shares.sum()
        left = set(range(len(scores)))
        for choice in range(k):
            expert = min(left, key=lambda expert: (-scores[expert].item(), expert))
            left.remove(expert)
            weights[row, choice], chosen[row, choice] = shares[expert], expert
    return (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype), chosen


def naive_moe_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The specification of `moe_experts`: one token and one expert after the other, in float32."""
    width = down.shape[2]
    out = torch.zeros(x.shape)
    for token, row in enumerate(x.float()):
        for expert, weight in zip(chosen[token].tolist(), weights[token].float(), strict=True):
            gate, up = (gate_up[expert].float() @ row).split(width)
            out[token] += weight * (down[expert].float() @ (gate / (1 + torch.exp(-gate)) * up))
    return out.to(x.dtype)


@implements("moe_route", "torch")
def _moe_route(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    # A stable sort: torch.topk doesn't say which of equal logits it takes.
    scores, experts = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    # Renormalised shares are a softmax over the chosen alone.
    return torch.softmax(scores[:, :k], dim=-1).to(logits.dtype), experts[:, :k].contiguous()


@implements("moe_experts", "torch")
def _moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    block_m: int | None,
) -> torch.Tensor:
    num_tokens, top_k = chosen.shape
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    grouped = x[order // top_k]
    outputs = torch.empty_like(grouped)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            gate, up = F.linear(grouped[rows], gate_up[expert]).chunk(2, dim=-1)
            outputs[rows] = F.linear(F.silu(gate).mul_(up), down[expert])
            start += count
    # Back in the tokens' own order, so that the sum over a token's experts never depends on its company.
    grouped[order] = outputs
    return torch.bmm(weights.unsqueeze(1), grouped.view(num_tokens, top_k, -1)).squeeze(1)
