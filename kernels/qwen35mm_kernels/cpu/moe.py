"""Mixture of experts: one product for each expert with tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F

from qwen35mm_kernels.cpu.fp8 import fp8_linear
from qwen35mm_kernels.cpu.quantise import integer_linear
from qwen35mm_kernels.cpu.swiglu import swiglu

Matrix = TypeVar("Matrix")


def moe_route(logits: torch.Tensor, k: int, shared: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    # A stable sort: torch.topk doesn't define the order of equal logits.
    scores, experts = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    # Renormalised weights are a softmax over the chosen experts only.
    weights, chosen = torch.softmax(scores[:, :k], dim=-1).to(logits.dtype), experts[:, :k].contiguous()
    if shared is None:
        return weights, chosen
    last = chosen.new_full((len(chosen), 1), logits.shape[1])
    return torch.cat([weights, torch.sigmoid(shared)], dim=1), torch.cat([chosen, last], dim=1)


def moe_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return moe_experts_by(F.linear, swiglu, x, list(gate_up), list(down), chosen, weights)


def integer_experts(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, ...],
    down: tuple[torch.Tensor, ...],
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    formats: Sequence[tuple[int, int]],
) -> torch.Tensor:
    def linear(rows: torch.Tensor, matrix: tuple[tuple[torch.Tensor, ...], tuple[int, int]]) -> torch.Tensor:
        parts, (bits, width) = matrix
        return integer_linear(rows, *parts, bits=bits, width=width)

    gate_ups, downs = (
        [(parts, how) for parts in zip(*matrices, strict=True)]
        for matrices, how in zip((gate_up, down), formats, strict=True)
    )
    return moe_experts_by(linear, swiglu, x, gate_ups, downs, chosen, weights)


def fp8_experts(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    def linear(rows: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return fp8_linear(rows.float(), *parts)

    def activation(gate_up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate_up).to(x.dtype)

    gate_ups, downs = (list(zip(*parts, strict=True)) for parts in (gate_up, down))
    return moe_experts_by(linear, activation, x, gate_ups, downs, chosen, weights)


def moe_experts_by(
    linear: Callable[[torch.Tensor, Matrix], torch.Tensor],
    activation: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    gate_up: Collection[Matrix],
    down: Collection[Matrix],
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """`moe_experts` on matrices of any kind, one for each expert: linear(x [N, in], matrix [out, in]) -> [N, out].

    The activation is a `swiglu`.
    """
    num_tokens, top_k = chosen.shape
    order = torch.argsort(chosen.flatten(), stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(gate_up)).tolist()
    grouped = x[order // top_k]
    outputs = torch.empty_like(grouped)
    parts = zip(grouped.split(counts), outputs.split(counts), gate_up, down, strict=True)
    for rows, target, expert_gate_up, expert_down in parts:
        if len(rows):
            target.copy_(linear(activation(linear(rows, expert_gate_up)), expert_down))
    # Restore the tokens' order, so that the sum over a token's experts doesn't depend on other tokens.
    grouped[order] = outputs
    return torch.bmm(weights.unsqueeze(1), grouped.view(num_tokens, top_k, x.shape[1])).squeeze(1)
