"""The activation of a feed-forward network (Qwen3_5MLP of transformers' modeling_qwen3_5.py)."""

from __future__ import annotations

import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate_up is [gate | up].

    Args:
        gate_up: [N, 2 * width], float32 or bfloat16. The arithmetic is float32.

    Returns:
        [N, width] in gate_up's dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
