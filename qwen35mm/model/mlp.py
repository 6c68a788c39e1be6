"""The feed-forward networks: a dense layer's SwiGLU, and the mixture of experts with its shared expert.

As in transformers' Qwen3_5MoeSparseMoeBlock: softmax over all experts in fp32, the top k renormalised to sum to one.
"""

from __future__ import annotations

import torch
from torch import nn

from qwen35mm.config import MoEConfig
from qwen35mm.model.layers import Linear, Unnormed
from qwen35mm.model.weight_formats import (
    CardWeight,
    Factory,
    Fp8Weight,
    PlainWeight,
    StackedWeight,
    StoredWeight,
    Weight,
    new_weight,
)
from qwen35mm_kernels import select_backend
from qwen35mm_kernels.backend import why_not_triton
from qwen35mm_kernels.cpu.moe import moe_experts_by


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one product: [N, hidden] -> [N, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, factory: Factory) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, factory)
        self.down_proj = Linear(intermediate_size, hidden_size, factory)

    def forward(self, x: torch.Tensor | Unnormed) -> torch.Tensor:
        is_step = isinstance(x, Unnormed) and x.is_step
        return self.down_proj(self.gate_up_proj.swiglu(x), is_step=is_step)


class Experts(nn.Module):
    """The routed experts' matrices, stacked by rows.

    gate_up_proj: [E * 2 * width, hidden]; down_proj: [E * hidden, width].

    Args:
        shared: the shared expert where it becomes expert E of the same products; see `_is_one_more`.
    """

    def __init__(self, hidden_size: int, config: MoEConfig, factory: Factory, shared: MLP | None) -> None:
        super().__init__()
        self.ops = select_backend(factory.device)
        self.num_experts, width = config.num_experts, config.intermediate_size

        def matrices(out_features: int, in_features: int, below: Weight | None) -> Weight:
            if below is None and not _are_grouped(factory.device):
                each = [new_weight(out_features, in_features, factory) for _ in range(self.num_experts)]
                return StackedWeight(each, factory)
            return new_weight(self.num_experts * out_features, in_features, factory, below=below)

        below = (None, None) if shared is None else (shared.gate_up_proj.weight, shared.down_proj.weight)
        self.gate_up_proj = matrices(2 * width, hidden_size, below[0])
        self.down_proj = matrices(hidden_size, width, below[1])

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sums each token's experts.

        Args:
            x: [N, hidden].
            chosen: [N, k] int64, each token's experts, including the shared one if it is stacked with them.
            weights: [N, k], their shares, in x's dtype.

        Returns:
            [N, hidden].
        """
        gate_up, down = _whole(self.gate_up_proj), _whole(self.down_proj)
        if isinstance(gate_up, CardWeight) and isinstance(down, CardWeight):
            formats = tuple((each.groups.bits, each.groups.width) for each in (gate_up, down))
            gate_ups, downs = (tuple(self._by_expert(each, part) for part in each.stacked) for each in (gate_up, down))
            return self.ops.integer_experts(x, gate_ups, downs, chosen, weights, formats=formats)
        if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
            return self.ops.fp8_experts(x, self._fp8_by_expert(gate_up), self._fp8_by_expert(down), chosen, weights)
        if isinstance(gate_up, PlainWeight) and isinstance(down, PlainWeight):
            floats = self._by_expert(gate_up, gate_up.stacked), self._by_expert(down, down.stacked)
            return self.ops.moe_experts(x, *floats, chosen, weights)
        assert isinstance(gate_up, StackedWeight)
        assert isinstance(down, StackedWeight)
        parts = gate_up.parts, down.parts
        return moe_experts_by(lambda rows, weight: weight.product(rows), self.ops.swiglu, x, *parts, chosen, weights)

    def _by_expert(self, weight: Weight, rows: torch.Tensor) -> torch.Tensor:
        """[experts * out, ...] -> [experts, out, ...]."""
        return rows.view(-1, weight.out_features // self.num_experts, rows.shape[1])

    def _fp8_by_expert(self, weight: Fp8Weight) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of each expert, whose rows fill whole blocks."""
        scales = weight.scales.view(self.num_experts, -1, weight.scales.shape[1])
        return self._by_expert(weight, weight.values), scales


def _are_grouped(device: torch.device) -> bool:
    """Whether a layer's experts are one matrix: a processor's library packs each apart."""
    return device.type != "cpu"


def _whole(weight: Weight) -> Weight:
    """The one part of a weight in a checkpoint's own format."""
    return weight.parts[0] if isinstance(weight, StoredWeight) else weight


class SparseMoE(nn.Module):
    """[N, hidden] -> [N, hidden].

    Attributes:
        is_joined: whether the shared expert is one more of the experts' products.
    """

    def __init__(self, hidden_size: int, config: MoEConfig, factory: Factory) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.ops = select_backend(factory.device)
        self.gate = Linear(hidden_size, config.num_experts, factory.exact())
        shared = MLP(hidden_size, config.shared_intermediate_size, factory)
        self.is_joined = _is_one_more(shared, config, factory.device)
        self.experts = Experts(hidden_size, config, factory.experts(), shared if self.is_joined else None)
        self.shared_expert = shared
        self.shared_expert_gate = Linear(hidden_size, 1, factory.exact())

    def forward(self, x: torch.Tensor | Unnormed) -> torch.Tensor:
        is_step = isinstance(x, Unnormed) and x.is_step
        # The rows go to several products.
        x = x if isinstance(x, torch.Tensor) else x.rows()
        routed, shared_gate = self.gate(x, is_step=is_step), self.shared_expert_gate(x, is_step=is_step)
        if self.is_joined:
            weights, chosen = self.ops.moe_route(routed, self.top_k, shared_gate)
            return self.experts(x, chosen, weights)
        weights, chosen = self.ops.moe_route(routed, self.top_k)
        shared = self.shared_expert(x).mul_(torch.sigmoid(shared_gate))
        return self.experts(x, chosen, weights).add_(shared)


def _is_one_more(shared: MLP, config: MoEConfig, device: torch.device) -> bool:
    """Whether the shared expert is computed as one more routed expert, which saves six launches a layer: on a card with
    grouped products, where it is as wide as the others and has a format that is known before anything is read."""
    can_stack = isinstance(shared.gate_up_proj.weight, PlainWeight | CardWeight)
    as_wide = config.shared_intermediate_size == config.intermediate_size
    return can_stack and as_wide and why_not_triton(device.type) is None
