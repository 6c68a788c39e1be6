"""One layer of the decoder: a token mixer and a feed-forward network, each behind a norm."""

from __future__ import annotations

import torch
from torch import nn

from qwen35mm.config import TextConfig
from qwen35mm.model.attention import GatedAttention
from qwen35mm.model.batch import Batch
from qwen35mm.model.gated_delta_net import GatedDeltaNet
from qwen35mm.model.layers import RMSNorm, Unnormed
from qwen35mm.model.mlp import MLP, SparseMoE
from qwen35mm.model.weight_formats import Factory


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is `linear_attn` or `self_attn`."""

    def __init__(self, config: TextConfig, layer_idx: int, factory: Factory) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, factory)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, factory)
        self.linear_attn, self.self_attn = None, None
        if layer_idx in config.attention_layers:
            self.self_attn = GatedAttention(config, layer_idx, factory)
        else:
            self.linear_attn = GatedDeltaNet(config, layer_idx, factory)
        if config.moe is not None:
            self.mlp = SparseMoE(config.hidden_size, config.moe, factory)
        else:
            assert config.intermediate_size is not None
            self.mlp = MLP(config.hidden_size, config.intermediate_size, factory)

    @property
    def attention(self) -> GatedAttention:
        """The mixer of a full-attention layer."""
        assert self.self_attn is not None
        return self.self_attn

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, rope: tuple[torch.Tensor, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leaves this layer's output to be added to `x` by the next norm, in one pass over both.

        Args:
            x: [N, hidden], overwritten.
            delta: [N, hidden], the previous layer's output, not yet added to x.
            rope: cosines and sines of the tokens' positions.

        Returns:
            [N, hidden] each: the sum so far (possibly in x's memory), and this layer's output.
        """
        is_step = not batch.is_prefill
        rows = Unnormed(self.input_layernorm, x, delta, is_step)
        mixed = self.attention(rows, rope, batch) if self.linear_attn is None else self.linear_attn(rows, batch)
        rows = Unnormed(self.post_attention_layernorm, rows.x, mixed, is_step)
        added = self.mlp(rows)
        return rows.x, added
