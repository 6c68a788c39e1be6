"""SwiGLU in one pass."""

from __future__ import annotations

import torch

from qwen35mm_kernels.cpu import swiglu as by_torch
from qwen35mm_kernels.cpu.native.library import loaded_library
from qwen35mm_kernels.cpu.native.strided import dense_rows, is_known


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    if not is_known(gate_up) or gate_up.dim() != 2:
        return by_torch.swiglu(gate_up)
    gate_up = dense_rows(gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype)
    is_bf16 = gate_up.dtype == torch.bfloat16
    sizes = gate_up.stride(0), num_rows, width
    loaded_library()("qwen_swiglu", gate_up, *sizes, out, is_bf16, torch.get_num_threads())
    return out
