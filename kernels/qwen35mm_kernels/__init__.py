"""The arithmetic of Qwen3.5's layers on flat, unpadded tensors. Needs torch alone.

Each operation has a naive float32 twin (`naive_*`) that is its specification, and is run by the implementation that
`dispatch` chooses for the device. Inference only: the implementations work in place and give no gradients.
"""

from qwen35mm_kernels.attention import attention_decode, attention_prefill, vision_attention
from qwen35mm_kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from qwen35mm_kernels.dispatch import describe
from qwen35mm_kernels.gated_delta_rule import chunk_gated_delta_rule, gdn_gates, recurrent_gated_delta_step
from qwen35mm_kernels.gated_delta_rule.decode_step import gdn_decode_step
from qwen35mm_kernels.gated_delta_rule.prefill import gated_delta_prefill
from qwen35mm_kernels.moe import moe_experts, moe_route
from qwen35mm_kernels.norm import add_rms_norm, gated_rms_norm, rms_norm
from qwen35mm_kernels.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
    qk_norm_rope_write,
    split_gate,
)
from qwen35mm_kernels.rope import apply_partial_rope, mrope_cos_sin
from qwen35mm_kernels.sampling import SamplingRows, sample

__all__ = [
    "SamplingRows",
    "add_rms_norm",
    "apply_partial_rope",
    "attention_decode",
    "attention_prefill",
    "causal_conv1d",
    "causal_conv1d_step",
    "chunk_gated_delta_rule",
    "describe",
    "gated_delta_prefill",
    "gated_rms_norm",
    "gdn_decode_step",
    "gdn_gates",
    "moe_experts",
    "moe_route",
    "mrope_cos_sin",
    "paged_attention_decode",
    "paged_attention_prefill",
    "qk_norm_rope_write",
    "recurrent_gated_delta_step",
    "rms_norm",
    "sample",
    "split_gate",
    "vision_attention",
]
