"""Mixture of experts: one product for each expert that some token goes to."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def moe_route(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    # A stable sort: torch.topk doesn't say which of equal logits it takes.
    scores, experts = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    # Renormalised shares are a softmax over the chosen alone.
    return torch.softmax(scores[:, :k], dim=-1).to(logits.dtype), experts[:, :k].contiguous()


def moe_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
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
    return torch.bmm(weights.unsqueeze(1), grouped.view(num_tokens, top_k, x.shape[1])).squeeze(1)
