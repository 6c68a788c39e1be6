"""Enters every Triton kernel in dispatch."""

from qwen35mm_kernels.gpu import (
    conv1d,
    decode_attention,
    gdn_prefill,
    gdn_step,
    moe,
    norms,
    prefill_attention,
    rope,
    rope_kv,
    sampling,
)

MODULES = (
    conv1d,
    decode_attention,
    gdn_prefill,
    gdn_step,
    moe,
    norms,
    prefill_attention,
    rope,
    rope_kv,
    sampling,
)
