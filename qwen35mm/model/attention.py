"""The full-attention layer: grouped queries, per-head norms, partial rotary positions, an output gate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from qwen35mm.config import TextConfig
from qwen35mm.model.cache_protocol import SequenceCache
from qwen35mm.model.layers import Factory, Linear, RMSNorm
from qwen35mm.model.rows import few_rows
from qwen35mm_kernels import apply_partial_rope, attention_decode, attention_prefill


class GatedAttention(nn.Module):
    """Token mixer of a full-attention layer.

    Parameters: qkv_proj (rows: query and gate interleaved per head, as the checkpoint's q_proj | k | v), q_norm,
    k_norm (zero-centred, over a head), o_proj.
    """

    def __init__(self, config: TextConfig, layer_idx: int, factory: Factory) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = self.head_dim**-0.5
        kv_dim = self.num_kv_heads * self.head_dim
        self.split = (2 * self.num_heads * self.head_dim, kv_dim, kv_dim)
        self.qkv_proj = Linear(config.hidden_size, sum(self.split), factory)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, factory)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, factory)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, factory)

    def prefill(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], cache: SequenceCache) -> torch.Tensor:
        """Runs one sequence's next T tokens against its cache: [T, hidden] -> [T, hidden]."""
        q, gate, k, v = self._heads(self.qkv_proj(x), *rope)
        keys, values = cache.append_kv(self.layer_idx, k, v)
        return self.o_proj(_gated(attention_prefill(q, keys, values, scale=self.scale), gate))

    def decode(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[SequenceCache],
        num_rows: int | None = None,
    ) -> torch.Tensor:
        """One token for each of B sequences, each against its own cache: [B, hidden] -> [B, hidden]."""
        q, gate, k, v = few_rows(self._heads, self.qkv_proj(x, num_rows), *rope, num_rows=num_rows)
        out = torch.empty_like(q)
        for row, cache in enumerate(caches):
            keys, values = cache.append_kv(self.layer_idx, k[row : row + 1], v[row : row + 1])
            out[row] = attention_decode(q[row], keys, values, scale=self.scale)
        return self.o_proj(few_rows(_gated, out, gate, num_rows=num_rows), num_rows)

    def _heads(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[N, q | gate | k | v] -> q and gate [N, Hq, D], k and v [N, Hkv, D]; q and k normed and rotated."""
        q_gate, k, v = qkv.split(self.split, dim=-1)
        q, gate = q_gate.unflatten(-1, (self.num_heads, 2, self.head_dim)).unbind(-2)
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        return apply_partial_rope(self.q_norm(q), cos, sin), gate, apply_partial_rope(self.k_norm(k), cos, sin), v


def _gated(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (out * torch.sigmoid(gate)).flatten(1)
