"""Enters every Triton kernel in dispatch."""

import importlib

_MODULES = (
    "conv1d",
    "decode_attention",
    "gdn_prefill",
    "gdn_step",
    "moe",
    "norms",
    "prefill_attention",
    "rope",
    "rope_kv",
    "sampling",
)

for _name in _MODULES:
    importlib.import_module(f"qwen35mm_kernels.gpu.{_name}")
