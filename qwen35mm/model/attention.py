"""The full-attention layer: grouped queries, per-head norms, partial rotary positions, an output gate."""

from __future__ import annotations

import torch
from torch import nn

from qwen35mm.config import TextConfig
from qwen35mm.model.batch import Batch
from qwen35mm.model.layers import Linear, RMSNorm, Unnormed
from qwen35mm.model.weight_formats import Factory
from qwen35mm_kernels import select_backend, split_gate


class GatedAttention(nn.Module):
    """Token mixer of a full-attention layer.

    Parameters: qkv_proj (rows: query and gate interleaved per head, as the checkpoint's q_proj | k | v), q_norm,
    k_norm (zero-centred, over a head), o_proj.
    """

    def __init__(self, config: TextConfig, layer_idx: int, factory: Factory) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.scale = self.head_dim**-0.5
        self.ops = select_backend(factory.device)
        width = 2 * (self.num_heads + config.num_key_value_heads) * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, factory)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, factory)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, factory)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, factory)

    def forward(
        self, x: torch.Tensor | Unnormed, rope: tuple[torch.Tensor, torch.Tensor], batch: Batch
    ) -> torch.Tensor:
        """Writes the tokens' keys and values into the pool, then attends to all cached ones: [N, hidden] -> same."""
        return self.attend(*self.write(x, rope, batch), batch)

    def write(
        self, x: torch.Tensor | Unnormed, rope: tuple[torch.Tensor, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the tokens' keys and values into the pool.

        Returns:
            queries and their gates, [N, heads, head_dim] each.
        """
        if batch.watch is not None and not isinstance(x, torch.Tensor):
            x = x.rows()
        qkv = self.qkv_proj(x)
        k_cache, v_cache = batch.pools[self.layer_idx]
        norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        pool = k_cache, v_cache, batch.slot_mapping
        q = self.ops.qk_norm_rope_write(qkv, *rope, *norms, *pool, num_heads=self.num_heads, formats=batch.kv_formats)
        if batch.watch is not None and isinstance(x, torch.Tensor):
            batch.watch(self.layer_idx, x, q)
        return q, split_gate(qkv, self.num_heads, self.head_dim)

    def attend(self, q: torch.Tensor, gate: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Attends to all cached tokens with the results of `write`: [N, hidden]."""
        k_cache, v_cache = batch.pools[self.layer_idx]
        past = k_cache, v_cache, batch.block_table
        options = {"block_size": batch.block_size, "scale": self.scale, "formats": batch.kv_formats}
        if batch.counts is not None:
            out = self.ops.paged_attention_prefill(q, gate, *past, batch.lengths, batch.counts, **options)
        else:
            out = self.ops.paged_attention_decode(q, gate, *past, batch.lengths, **options)
        return self.o_proj(out.flatten(1), is_step=batch.counts is None)
