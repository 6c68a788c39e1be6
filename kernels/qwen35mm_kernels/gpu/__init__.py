"""The operations as Triton kernels for NVIDIA cards. `qwen35mm_kernels.reference` describes arguments and results.

Importing this package needs triton. Last dimensions must be contiguous, head sizes powers of 2, and blocks of the KV
pool multiples of 16 tokens. Kernels assert their requirements. Operations without a kernel come from `cpu`. To try
another implementation of an operation, import it here instead.
"""

from qwen35mm_kernels.cpu import vision_attention
from qwen35mm_kernels.gpu.attention_decode import paged_attention_decode
from qwen35mm_kernels.gpu.attention_prefill import paged_attention_prefill
from qwen35mm_kernels.gpu.conv1d import causal_conv1d
from qwen35mm_kernels.gpu.fp8 import fp8_linear
from qwen35mm_kernels.gpu.gdn_prefill import gated_delta_prefill
from qwen35mm_kernels.gpu.gdn_step import gdn_decode_step
from qwen35mm_kernels.gpu.integers import integer_linear
from qwen35mm_kernels.gpu.moe import moe_experts, moe_route
from qwen35mm_kernels.gpu.moe_fp8 import fp8_experts
from qwen35mm_kernels.gpu.moe_integers import integer_experts
from qwen35mm_kernels.gpu.norm import add_rms_norm, gated_rms_norm, rms_norm
from qwen35mm_kernels.gpu.normed import norm_linear
from qwen35mm_kernels.gpu.rope import apply_partial_rope, mrope_cos_sin
from qwen35mm_kernels.gpu.rope_kv import qk_norm_rope_write
from qwen35mm_kernels.gpu.sampling import sample
from qwen35mm_kernels.gpu.swiglu import swiglu

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
