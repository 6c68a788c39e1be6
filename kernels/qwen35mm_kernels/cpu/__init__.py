"""The operations in torch, tuned for CPUs; they run on any device. `reference` describes arguments and results."""

from qwen35mm_kernels.cpu.attention import (
    paged_attention_decode,
    paged_attention_prefill,
    qk_norm_rope_write,
    vision_attention,
)
from qwen35mm_kernels.cpu.conv1d import causal_conv1d
from qwen35mm_kernels.cpu.fp8 import fp8_linear
from qwen35mm_kernels.cpu.gated_delta_rule import gated_delta_prefill, gdn_decode_step
from qwen35mm_kernels.cpu.moe import fp8_experts, integer_experts, moe_experts, moe_route
from qwen35mm_kernels.cpu.norm import add_rms_norm, gated_rms_norm, norm_linear, rms_norm
from qwen35mm_kernels.cpu.quantise import integer_linear
from qwen35mm_kernels.cpu.rope import apply_partial_rope, mrope_cos_sin
from qwen35mm_kernels.cpu.sampling import sample
from qwen35mm_kernels.cpu.swiglu import swiglu

__all__ = [
    "add_rms_norm",
    "apply_partial_rope",
    "causal_conv1d",
    "fp8_experts",
    "fp8_linear",
    "gated_delta_prefill",
    "gated_rms_norm",
    "gdn_decode_step",
    "integer_experts",
    "integer_linear",
    "moe_experts",
    "moe_route",
    "mrope_cos_sin",
    "norm_linear",
    "paged_attention_decode",
    "paged_attention_prefill",
    "qk_norm_rope_write",
    "rms_norm",
    "sample",
    "swiglu",
    "vision_attention",
]
