"""The causal convolution of four taps over a sequence, in one pass over the inputs."""

from __future__ import annotations

import torch

from qwen35mm_kernels.cpu import conv1d as by_torch
from qwen35mm_kernels.cpu.native.library import loaded_library
from qwen35mm_kernels.cpu.native.strided import dense_rows, is_known

_TAPS = 4


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    if not is_known(x, weight, states) or weight.shape[1] != _TAPS:
        return by_torch.causal_conv1d(x, weight, states, slots, counts)
    num_tokens, state = int(counts), states[int(slots)]
    x, weight, initial_state = dense_rows(x), weight.contiguous(), dense_rows(state)
    out = torch.empty(x.shape, dtype=x.dtype)
    out[num_tokens:] = 0
    final_state = torch.empty(state.shape, dtype=x.dtype)
    inputs = x, x.stride(0), num_tokens, weight, initial_state, initial_state.stride(0), x.shape[1]
    is_bf16 = x.dtype == torch.bfloat16
    loaded_library()("qwen_conv1d", *inputs, out, final_state, is_bf16, torch.get_num_threads())
    state.copy_(final_state)
    return out
