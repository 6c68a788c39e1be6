"""The activation of a feed-forward network, in one pass; torch needs two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.early import starts_early, wait_for_inputs
from qwen35mm_kernels.gpu.launch import Config, cdiv, launch

# A thread reads 16 bytes of bfloat16 at a time; there is nothing to tune.
_CONFIG = Config({"BLOCK": 1024}, num_warps=4, num_stages=1)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Rows may have any stride."""
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "the last dimension must be contiguous"
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    blocks = cdiv(width, _CONFIG.blocks["BLOCK"])
    launch(
        _swiglu_kernel,
        (num_rows, blocks),
        *(gate_up, out, width, gate_up.stride(0)),
        config=_CONFIG,
        EARLY=starts_early(gate_up.device),
    )
    return out


@triton.jit
def _swiglu_kernel(gate_up, out, width, stride, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_inputs(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    gate_up += row * stride
    gate = tl.load(gate_up + column, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, mask=exists)
