"""The operations of `cpu`, compiled if that is faster, else in torch. `reference` describes arguments and results.

They need a library that `library.find_library` finds. Unsupported tensors go to torch's operation.
"""

from qwen35mm_kernels.cpu import (
    fp8_experts,
    fp8_linear,
    integer_experts,
    integer_linear,
    moe_experts,
    moe_route,
    mrope_cos_sin,
    norm_linear,
)
from qwen35mm_kernels.cpu.native.attention_decode import paged_attention_decode
from qwen35mm_kernels.cpu.native.attention_prefill import paged_attention_prefill, vision_attention
from qwen35mm_kernels.cpu.native.conv1d import causal_conv1d
from qwen35mm_kernels.cpu.native.gdn_prefill import gated_delta_prefill
from qwen35mm_kernels.cpu.native.gdn_step import gdn_decode_step
from qwen35mm_kernels.cpu.native.norm import add_rms_norm, gated_rms_norm, rms_norm
from qwen35mm_kernels.cpu.native.rope import apply_partial_rope, qk_norm_rope_write
from qwen35mm_kernels.cpu.native.sampling import sample
from qwen35mm_kernels.cpu.native.swiglu import swiglu

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
