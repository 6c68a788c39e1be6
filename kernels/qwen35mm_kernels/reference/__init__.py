"""The specification: every operation works on one row, token, head or expert at a time and rounds once at the end.

Docstrings here describe arguments and results; `cpu` and `gpu` have the same functions with the same signatures.

A prompt's piece is T rows. `counts` [1] says how many of them are tokens; the others are padding at the end. What
padding holds reaches no token and no state, and its results are 0. Like `slots` and `lengths`, `counts` is a tensor
on the device: Triton's kernels read it there, so that a CUDA graph can run pieces of any length. Torch reads it on the
host.
"""

from qwen35mm_kernels.reference.attention import (
    paged_attention_decode,
    paged_attention_prefill,
    qk_norm_rope_write,
    vision_attention,
)
from qwen35mm_kernels.reference.conv1d import causal_conv1d
from qwen35mm_kernels.reference.fp8 import fp8_linear
from qwen35mm_kernels.reference.gated_delta_rule import gated_delta_prefill, gdn_decode_step
from qwen35mm_kernels.reference.integers import integer_linear
from qwen35mm_kernels.reference.moe import fp8_experts, integer_experts, moe_experts, moe_route
from qwen35mm_kernels.reference.norm import add_rms_norm, gated_rms_norm, norm_linear, rms_norm
from qwen35mm_kernels.reference.rope import apply_partial_rope, mrope_cos_sin
from qwen35mm_kernels.reference.sampling import sample
from qwen35mm_kernels.reference.swiglu import swiglu

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
