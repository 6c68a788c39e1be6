"""Mixture of experts: routing of tokens, and the experts' matrices.

Source: Qwen3_5MoeTopKRouter and Qwen3_5MoeExperts of transformers' modeling_qwen3_5_moe.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qwen35mm_kernels.reference.fp8 import fp8_linear
from qwen35mm_kernels.reference.integers import integer_matrix


def moe_route(logits: torch.Tensor, k: int, shared: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's k likeliest experts and their weights, renormalised to sum to one.

    Args:
        logits: [N, E], float32 or bfloat16. The softmax is float32.
        k: experts of a token, from 1 to E.
        shared: [N, 1] in the logits' dtype: routes every token also to expert E, with the sigmoid of this as weight.

    Returns:
        weights: [N, k] in the logits' dtype, the likeliest first; with `shared` [N, k + 1], the shared expert's last.
        chosen: [N, k] or [N, k + 1] int64, distinct in a row. For equal logits, the lower expert comes first.
    """
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
    weights = weights / weights.sum(dim=-1, keepdim=True)
    if shared is not None:
        weights = torch.cat([weights, 1 / (1 + torch.exp(-shared.float()))], dim=1)
        chosen = torch.cat([chosen, torch.full((len(chosen), 1), logits.shape[1])], dim=1)
    return weights.to(logits.dtype), chosen


def moe_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The sum over a token's experts of weight * down(silu(gate(x)) * up(x)), in the order of `chosen`.

    Args:
        x: [N, hidden], float32 or bfloat16.
        gate_up: [E, 2 * width, hidden] of x's dtype: an expert's gate rows, then its up rows.
        down: [E, hidden, width] of x's dtype.
        chosen: [N, k] int64, the experts of each token, distinct in a row and below E.
        weights: [N, k] in x's dtype, their weights.

    Returns:
        [N, hidden] in x's dtype.
    """
    width = down.shape[2]
    out = torch.zeros(x.shape)
    for token, row in enumerate(x.float()):
        for expert, weight in zip(chosen[token].tolist(), weights[token].float(), strict=True):
            gate, up = (gate_up[expert].float() @ row).split(width)
            out[token] += weight * (down[expert].float() @ (gate / (1 + torch.exp(-gate)) * up))
    return out.to(x.dtype)


def integer_experts(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, ...],
    down: tuple[torch.Tensor, ...],
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    formats: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """`moe_experts` with integer matrices.

    Args:
        gate_up: words, scales and perhaps minima of `integer_linear`, each with a dimension for experts in front.
        down: the same.
        formats: bits and width of gate_up and of down.

    Returns:
        [N, hidden] in x's dtype.
    """
    hidden, width = x.shape[1], gate_up[0].shape[1] // 2
    matrices = []
    for parts, num_in, (bits, group) in zip((gate_up, down), (hidden, width), formats, strict=True):
        experts = zip(*parts, strict=True)
        matrices.append(torch.stack([integer_matrix(*each, num_in=num_in, bits=bits, width=group) for each in experts]))
    return moe_experts(x, matrices[0], matrices[1], chosen, weights)


def fp8_experts(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """`moe_experts` with matrices of eight-bit floats, whose products are those of `fp8_linear`.

    Args:
        gate_up: values and scales of `fp8_linear`, each with a dimension for experts in front.
        down: the same.

    Returns:
        [N, hidden] in x's dtype. What SwiGLU gives is rounded to x's dtype before it is to e4m3.
    """
    out = torch.zeros(x.shape)
    for token, row in enumerate(x):
        for expert, weight in zip(chosen[token].tolist(), weights[token].float(), strict=True):
            gate, up = fp8_linear(row[None].float(), gate_up[0][expert], gate_up[1][expert])[0].chunk(2)
            inner = (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)
            out[token] += weight * fp8_linear(inner[None].float(), down[0][expert], down[1][expert])[0]
    return out.to(x.dtype)
