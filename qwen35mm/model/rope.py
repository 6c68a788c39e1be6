"""Rotary frequencies: the text decoder's interleaved M-RoPE and the vision tower's two-axis rope."""

from __future__ import annotations

import torch

from qwen35mm.config import RopeConfig
from qwen35mm_kernels import select_backend


def inverse_frequencies(theta: float, dim: int, device: torch.device) -> torch.Tensor:
    """theta ** -(0, 2, 4, ... / dim): [dim / 2] float32."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / (theta**exponents)


class TextRope:
    """Turns M-RoPE positions into cosines and sines."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.inv_freq = inverse_frequencies(config.theta, config.rotary_dim, device)
        self.mrope_section = config.mrope_section
        self.ops = select_backend(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [3, N] int64 -> cos and sin, each [N, rotary_dim / 2] float32."""
        return self.ops.mrope_cos_sin(positions, self.inv_freq, self.mrope_section)


def vision_cos_sin(rows: torch.Tensor, columns: torch.Tensor, theta: float, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Cosines and sines of patches at `rows` and `columns` ([P] int64): two of [P, head_dim / 2] float32.

    The first half of the pairs turns with the row, the second with the column (Qwen3_5VisionRotaryEmbedding).
    """
    inv_freq = inverse_frequencies(theta, head_dim // 2, rows.device)
    angles = torch.cat([rows[:, None] * inv_freq, columns[:, None] * inv_freq], dim=-1)
    return angles.cos(), angles.sin()
