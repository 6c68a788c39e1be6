"""The Gated DeltaNet layer: causal convolution, gated delta rule, gated norm (arXiv:2412.06464).

Its memory of the past is a conv state (the last kernel - 1 inputs) and a recurrent state of a fixed size, always
fp32. It can't be trimmed: what a token wrote can't be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from qwen35mm.config import TextConfig
from qwen35mm.model.cache_protocol import SequenceCache, States, slot_runs
from qwen35mm.model.layers import Factory, Linear, new_parameter
from qwen35mm.model.rows import each_row, few_rows, join_rows
from qwen35mm_kernels import (
    causal_conv1d,
    causal_conv1d_step,
    gated_delta_prefill,
    gated_rms_norm,
    gdn_decode_step,
    gdn_gates,
    recurrent_gated_delta_step,
)


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
        key_dim = self.num_k_heads * self.head_k_dim
        self.qkv_split = (key_dim, key_dim, config.value_dim)
        self.in_split = (config.conv_dim, config.value_dim, self.num_v_heads, self.num_v_heads)
        self.in_proj = Linear(config.hidden_size, sum(self.in_split), factory)
        self.conv1d = new_parameter(config.conv_dim, config.linear_conv_kernel_dim, **factory)
        self.A_log = new_parameter(self.num_v_heads, dtype=torch.float32, device=factory["device"])
        self.dt_bias = new_parameter(self.num_v_heads, dtype=torch.float32, device=factory["device"])
        self.norm = new_parameter(self.head_v_dim, **factory)
        self.out_proj = Linear(config.value_dim, config.hidden_size, factory)

    def prefill(self, x: torch.Tensor, cache: SequenceCache) -> torch.Tensor:
        """Runs one sequence's next T tokens in chunks and moves its states on: [T, hidden] -> [T, hidden]."""
        mixed, z, b, a = self.in_proj(x).split(self.in_split, dim=-1)
        conv_state, recurrent_state = cache.conv_state(self.layer_idx), cache.recurrent_state(self.layer_idx)
        mixed, final_conv = causal_conv1d(mixed, self.conv1d, conv_state)
        conv_state.copy_(final_conv)
        out = gated_delta_prefill(*self._heads(mixed), a, b, self.A_log, self.dt_bias, recurrent_state)
        return self.out_proj(self._gated(out, z))

    def decode(self, x: torch.Tensor, caches: Sequence[SequenceCache], num_rows: int | None = None) -> torch.Tensor:
        """One token for each of B sequences, states updated in place: [B, hidden] -> [B, hidden]."""
        mixed, z, b, a = self.in_proj(x, num_rows).split(self.in_split, dim=-1)
        states = caches[0].states
        conv_states, recurrent_states = states.conv(self.layer_idx), states.recurrent(self.layer_idx)
        q, k, v = self._heads(
            join_rows(
                few_rows(self._conv_step, mixed[rows], conv_states[slots], num_rows=num_rows)
                for rows, slots in slot_runs(caches)
            )
        )
        g, beta = each_row(self._gates, a, b, num_rows=num_rows)
        out = join_rows(
            recurrent_gated_delta_step(q[rows], k[rows], v[rows], g[rows], beta[rows], recurrent_states[slots])
            for rows, slots in slot_runs(caches, single=num_rows is not None)
        )
        return self.out_proj(few_rows(self._gated, out, z, num_rows=num_rows), num_rows)

    def decode_step(self, x: torch.Tensor, slots: torch.Tensor, states: States) -> torch.Tensor:
        """`decode` as one operation on the device: [B, hidden] -> [B, hidden]; slots as in `DecodeInputs`."""
        out = gdn_decode_step(
            self.in_proj(x),
            self.conv1d,
            self.A_log,
            self.dt_bias,
            self.norm,
            self.eps,
            states.conv(self.layer_idx),
            states.recurrent(self.layer_idx),
            slots,
            num_k_heads=self.num_k_heads,
        )
        return self.out_proj(out)

    def _conv_step(self, mixed: torch.Tensor, conv_states: torch.Tensor) -> torch.Tensor:
        return causal_conv1d_step(mixed, self.conv1d, conv_states)

    def _gates(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gdn_gates(a, b, self.A_log, self.dt_bias)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, C] -> q, k [N, Hk, K] and v [N, Hv, V], as views."""
        q, k, v = mixed.split(self.qkv_split, dim=-1)
        return (
            q.unflatten(-1, (self.num_k_heads, self.head_k_dim)),
            k.unflatten(-1, (self.num_k_heads, self.head_k_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
        )

    def _gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        z = z.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        return gated_rms_norm(out, z, self.norm, self.eps).flatten(1)
