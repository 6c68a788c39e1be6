"""The causal convolution of four taps over a sequence, in one pass over the inputs."""

from __future__ import annotations

import torch

from qwen35mm_kernels.cpu import conv1d as by_torch
from qwen35mm_kernels.cpu.native.library import loaded_library
from qwen35mm_kernels.cpu.native.strided import dense_rows, is_known

_TAPS = 4


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if not is_known(x, weight, initial_state) or weight.shape[1] != _TAPS:
        return by_torch.causal_conv1d(x, weight, initial_state)
    x, weight, initial_state = dense_rows(x), weight.contiguous(), dense_rows(initial_state)
    out = torch.empty(x.shape, dtype=x.dtype)
    final_state = torch.empty(initial_state.shape, dtype=x.dtype)
    inputs = x, x.stride(0), len(x), weight, initial_state, initial_state.stride(0), x.shape[1]
    is_bf16 = x.dtype == torch.bfloat16
    loaded_library()("qwen_conv1d", *inputs, out, final_state, is_bf16, torch.get_num_threads())
    return out, final_state
