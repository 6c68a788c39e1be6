"""The Gated DeltaNet layer: causal convolution, gated delta rule, gated norm (arXiv:2412.06464).

Its memory of the past is a conv state (the last kernel - 1 inputs) and a recurrent state of fixed size, always fp32.
It can't be trimmed: what a token wrote can't be removed.
"""

from __future__ import annotations

import torch
from torch import nn

from qwen35mm.config import TextConfig
from qwen35mm.model.batch import Batch
from qwen35mm.model.layers import Linear, Unnormed, new_parameter
from qwen35mm.model.weight_formats import Factory
from qwen35mm_kernels import select_backend


class GatedDeltaNet(nn.Module):
    """Token mixer of a linear-attention layer.

    Parameters: in_proj (rows: q | k | v | z | b | a), conv1d [C, kernel] over q | k | v, A_log and dt_bias [Hv]
    (kept in float32, where the decay is computed), norm [V] (a plain weight), out_proj.
    """

    def __init__(self, config: TextConfig, layer_idx: int, factory: Factory) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_k_heads, self.head_k_dim = config.linear_num_key_heads, config.linear_key_head_dim
        self.num_v_heads, self.head_v_dim = config.linear_num_value_heads, config.linear_value_head_dim
        self.eps = config.rms_norm_eps
        self.ops = select_backend(factory.device)
        key_dim = self.num_k_heads * self.head_k_dim
        self.qkv_split = (key_dim, key_dim, config.value_dim)
        self.in_split = (config.conv_dim, config.value_dim, self.num_v_heads, self.num_v_heads)
        self.in_proj = Linear(config.hidden_size, sum(self.in_split), factory, exact_rows=2 * self.num_v_heads)
        self.conv1d = new_parameter(config.conv_dim, config.linear_conv_kernel_dim, factory=factory)
        self.A_log = new_parameter(self.num_v_heads, factory=factory, dtype=torch.float32)
        self.dt_bias = new_parameter(self.num_v_heads, factory=factory, dtype=torch.float32)
        self.norm = new_parameter(self.head_v_dim, factory=factory)
        self.out_proj = Linear(config.value_dim, config.hidden_size, factory)

    def forward(self, x: torch.Tensor | Unnormed, batch: Batch) -> torch.Tensor:
        """Runs the tokens and updates their sequences' states in place: [N, hidden] -> [N, hidden]."""
        conv_states, recurrent_states = batch.pools[self.layer_idx]
        mixed = self.in_proj(x)
        if batch.counts is not None:
            return self.out_proj(self._prefill(mixed, conv_states, recurrent_states, batch.slots, batch.counts))
        out = self.ops.gdn_decode_step(
            mixed,
            self.conv1d,
            self.A_log,
            self.dt_bias,
            self.norm,
            self.eps,
            conv_states,
            recurrent_states,
            batch.slots,
            batch.sources,
            num_k_heads=self.num_k_heads,
        )
        return self.out_proj(out, is_step=True)

    def _prefill(
        self,
        mixed: torch.Tensor,
        conv_states: torch.Tensor,
        recurrent_states: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """One sequence's tokens, in chunks: in_proj's output [T, ...] -> out_proj's input [T, Hv * V]."""
        qkv, z, b, a = mixed.split(self.in_split, dim=-1)
        qkv = self.ops.causal_conv1d(qkv, self.conv1d, conv_states, slots, counts)
        q, k, v = qkv.split(self.qkv_split, dim=-1)
        out = self.ops.gated_delta_prefill(
            q.unflatten(-1, (self.num_k_heads, self.head_k_dim)),
            k.unflatten(-1, (self.num_k_heads, self.head_k_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
            a,
            b,
            self.A_log,
            self.dt_bias,
            recurrent_states,
            slots,
            counts,
        )
        z = z.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        return self.ops.gated_rms_norm(out, z, self.norm, self.eps).flatten(1)
