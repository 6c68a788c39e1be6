"""Mixture of experts: routed experts, grouped by expert, and a shared expert with its own gate.

As transformers' Qwen3_5MoeSparseMoeBlock: softmax over all experts in fp32, the top k renormalised to sum to one.
"""

from __future__ import annotations

import torch
from torch import nn

from qwen35mm.config import MoEConfig
from qwen35mm.model.dense import linear
from qwen35mm.model.layers import Factory, Linear, new_parameter
from qwen35mm.model.mlp import MLP, swiglu
from qwen35mm.model.rows import each_row, few_rows
from qwen35mm_kernels import moe_experts, moe_route


class Experts(nn.Module):
    """The routed experts' matrices. gate_up_proj: [E, 2 * width, hidden]; down_proj: [E, hidden, width]."""

    def __init__(self, hidden_size: int, config: MoEConfig, factory: Factory) -> None:
        super().__init__()
        self.gate_up_proj = new_parameter(config.num_experts, 2 * config.intermediate_size, hidden_size, **factory)
        self.down_proj = new_parameter(config.num_experts, hidden_size, config.intermediate_size, **factory)

    def forward(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, num_rows: int | None = None
    ) -> torch.Tensor:
        """Sums each token's experts.

        Args:
            x: [N, hidden].
            chosen: [N, k] int64, the experts of each token.
            weights: [N, k], their shares, in x's dtype.

        Returns:
            [N, hidden].
        """
        if x.device.type != "cpu":
            return moe_experts(x, self.gate_up_proj, self.down_proj, chosen, weights)
        # On a CPU the products are `linear`'s, which knows CPUs without bfloat16 arithmetic.
        num_tokens, top_k = chosen.shape
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.gate_up_proj.shape[0]).tolist()
        grouped = x[order // top_k]
        outputs = torch.empty_like(grouped)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            rows = slice(start, start + count)
            # No expert has more rows than there are tokens: num_rows is enough here, too.
            gate_up = linear(grouped[rows], self.gate_up_proj[expert], num_rows=num_rows)
            inner = few_rows(swiglu, gate_up, num_rows=num_rows)
            outputs[rows] = linear(inner, self.down_proj[expert], num_rows=num_rows)
            start += count
        # Back in the tokens' own order, so that the sum over a token's experts never depends on its company.
        grouped[order] = outputs
        return each_row(_weighted_sum, weights, grouped.view(num_tokens, top_k, -1), num_rows=num_rows)


class SparseMoE(nn.Module):
    """[N, hidden] -> [N, hidden]."""

    def __init__(self, hidden_size: int, config: MoEConfig, factory: Factory) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = Linear(hidden_size, config.num_experts, factory)
        self.experts = Experts(hidden_size, config, factory)
        self.shared_expert = MLP(hidden_size, config.shared_intermediate_size, factory)
        self.shared_expert_gate = Linear(hidden_size, 1, factory)

    def forward(self, x: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        weights, chosen = each_row(self._route, self.gate(x, num_rows), num_rows=num_rows)
        gate = each_row(torch.sigmoid, self.shared_expert_gate(x, num_rows), num_rows=num_rows)
        shared = self.shared_expert(x, num_rows).mul_(gate)
        return self.experts(x, chosen, weights, num_rows).add_(shared)

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, E] -> shares in the logits' dtype and experts, [N, k] each."""
        return moe_route(logits, self.top_k)


def _weighted_sum(weights: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """[N, k] and [N, k, hidden] -> [N, hidden]."""
    return torch.bmm(weights.unsqueeze(1), outputs).squeeze(1)
