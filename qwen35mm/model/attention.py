"""The full-attention layer: grouped queries, per-head norms, partial rotary positions, an output gate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from qwen35mm.config import TextConfig
from qwen35mm.model.cache_protocol import DecodeInputs, KVPool, PrefillPlaces, SequenceCache
from qwen35mm.model.layers import Factory, Linear, RMSNorm
from qwen35mm.model.rows import few_rows
from qwen35mm_kernels import (
    apply_partial_rope,
    attention_decode,
    attention_prefill,
    paged_attention_decode,
    paged_attention_prefill,
    qk_norm_rope_write,
    split_gate,
)


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

    def prefill(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: SequenceCache,
        places: PrefillPlaces | None = None,
    ) -> torch.Tensor:
        """Runs one sequence's next T tokens against its cache: [T, hidden] -> [T, hidden].

        Args:
            places: where the tokens go, for kernels that find their way through a block table. None: the cache gives
                keys and values as one tensor, which is quicker on a CPU.
        """
        qkv = self.qkv_proj(x)
        if places is not None:
            k_cache, v_cache = cache.kv_pool.layer(self.layer_idx)
            q = self._write(qkv, rope, k_cache, v_cache, places.cache_rows)
            out = paged_attention_prefill(
                q,
                split_gate(qkv, self.num_heads, self.head_dim),
                k_cache,
                v_cache,
                places.block_table,
                places.length,
                block_size=cache.kv_pool.block_size,
                scale=self.scale,
            )
            return self.o_proj(out.flatten(1))
        q, gate, k, v = self._heads(qkv, *rope)
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

    def decode_step(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], inputs: DecodeInputs, kv: KVPool
    ) -> torch.Tensor:
        """`decode` on the device, straight from the pool's blocks: [B, hidden] -> [B, hidden]."""
        qkv = self.qkv_proj(x)
        k_cache, v_cache = kv.layer(self.layer_idx)
        q = self._write(qkv, rope, k_cache, v_cache, inputs.cache_rows)
        out = paged_attention_decode(
            q,
            split_gate(qkv, self.num_heads, self.head_dim),
            k_cache,
            v_cache,
            inputs.block_table,
            inputs.lengths,
            block_size=kv.block_size,
            scale=self.scale,
        )
        return self.o_proj(out.flatten(1))

    def _write(
        self,
        qkv: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Writes [N, q | gate | k | v]'s keys and values into the pool; its queries [N, Hq, D], normed and rotated."""
        norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        return qk_norm_rope_write(qkv, *rope, *norms, k_cache, v_cache, cache_rows, num_heads=self.num_heads)

    def _heads(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[N, q | gate | k | v] -> q and gate [N, Hq, D], k and v [N, Hkv, D]; q and k normed and rotated."""
        q_gate, k, v = qkv.split(self.split, dim=-1)
        q, gate = q_gate.unflatten(-1, (self.num_heads, 2, self.head_dim)).unbind(-2)
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        return apply_partial_rope(self.q_norm(q), cos, sin), gate, apply_partial_rope(self.k_norm(k), cos, sin), v


def _gated(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (out * torch.sigmoid(gate)).flatten(1)
