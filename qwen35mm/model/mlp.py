"""The feed-forward networks: SwiGLU of a dense layer, and the mixture of experts with its shared one.

As transformers' Qwen3_5MoeSparseMoeBlock: softmax over all experts in fp32, the top k renormalised to sum to one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from qwen35mm.config import MoEConfig
from qwen35mm.model.dense import linear
from qwen35mm.model.layers import Factory, Linear, new_parameter
from qwen35mm_kernels import select_backend
from qwen35mm_kernels.cpu.moe import moe_experts_by


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate and up side by side: [..., 2 * width] -> [..., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one product: [N, hidden] -> [N, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, factory: Factory) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, factory)
        self.down_proj = Linear(intermediate_size, hidden_size, factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class Experts(nn.Module):
    """The routed experts' matrices. gate_up_proj: [E, 2 * width, hidden]; down_proj: [E, hidden, width]."""

    def __init__(self, hidden_size: int, config: MoEConfig, factory: Factory) -> None:
        super().__init__()
        self.ops = select_backend(factory["device"])
        self.gate_up_proj = new_parameter(config.num_experts, 2 * config.intermediate_size, hidden_size, **factory)
        self.down_proj = new_parameter(config.num_experts, hidden_size, config.intermediate_size, **factory)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sums each token's experts.

        Args:
            x: [N, hidden].
            chosen: [N, k] int64, the experts of each token.
            weights: [N, k], their shares, in x's dtype.

        Returns:
            [N, hidden].
        """
        if x.device.type != "cpu":
            return self.ops.moe_experts(x, self.gate_up_proj, self.down_proj, chosen, weights)
        # On a CPU the products are `linear`'s, which knows CPUs without bfloat16 arithmetic.
        return moe_experts_by(linear, x, self.gate_up_proj, self.down_proj, chosen, weights)


class SparseMoE(nn.Module):
    """[N, hidden] -> [N, hidden]."""

    def __init__(self, hidden_size: int, config: MoEConfig, factory: Factory) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.ops = select_backend(factory["device"])
        self.gate = Linear(hidden_size, config.num_experts, factory)
        self.experts = Experts(hidden_size, config, factory)
        self.shared_expert = MLP(hidden_size, config.shared_intermediate_size, factory)
        self.shared_expert_gate = Linear(hidden_size, 1, factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.ops.moe_route(self.gate(x), self.top_k)
        shared = self.shared_expert(x).mul_(torch.sigmoid(self.shared_expert_gate(x)))
        return self.experts(x, chosen, weights).add_(shared)
