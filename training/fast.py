"""Replaces three slow spots of transformers' forward during training, with equal mathematics.

The patch embedding is a 3-D convolution whose stride is its kernel: one matrix product. Vision attention loops
over spans, which here have one length. Chunks of 64 are half padding for sequences of about 100 tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

_CHUNK = 32


def patch_embed(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """[patches, 1536] -> [patches, hidden]."""
    weight = self.proj.weight
    return F.linear(hidden_states.to(weight.dtype), weight.view(weight.shape[0], -1), self.proj.bias)


def vision_attention(
    self: Any,
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    max_seqlen: int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention over spans of equal length: hidden_states [spans * length, hidden]."""
    assert position_embeddings is not None
    spans = len(cu_seqlens) - 1
    qkv = self.qkv(hidden_states).reshape(hidden_states.shape[0], 3, self.num_heads, self.head_dim)
    q, k, v = qkv.unbind(1)
    q, k = qwen.apply_rotary_pos_emb_vision(q, k, *position_embeddings)
    q, k, v = (x.reshape(spans, -1, self.num_heads, self.head_dim).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, scale=self.scaling)
    return self.proj(out.transpose(1, 2).reshape(hidden_states.shape[0], -1))


@contextmanager
def fast_forward(chunk: int = _CHUNK) -> Iterator[None]:
    """Inside the block, every Qwen3.5 model of transformers runs the replacements."""
    slow_rule: Callable[..., Any] = qwen.torch_chunk_gated_delta_rule
    slow_embed, slow_attention = qwen.Qwen3_5VisionPatchEmbed.forward, qwen.Qwen3_5VisionAttention.forward
    qwen.torch_chunk_gated_delta_rule = functools.partial(slow_rule, chunk_size=chunk)
    qwen.Qwen3_5VisionPatchEmbed.forward = patch_embed
    qwen.Qwen3_5VisionAttention.forward = vision_attention
    try:
        yield
    finally:
        qwen.torch_chunk_gated_delta_rule = slow_rule
        qwen.Qwen3_5VisionPatchEmbed.forward = slow_embed
        qwen.Qwen3_5VisionAttention.forward = slow_attention
