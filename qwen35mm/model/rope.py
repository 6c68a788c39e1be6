"""Rotary frequencies: the text decoder's interleaved M-RoPE and the vision tower's two-axis rope."""

from __future__ import annotations

import math

import torch

from qwen35mm.config import RopeConfig
from qwen35mm_kernels import select_backend


def periods(theta: float, dim: int, device: torch.device) -> torch.Tensor:
    """theta ** (0, 2, 4, ... / dim), positions per radian: [dim / 2] float32."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return theta**exponents


def text_frequencies(config: RopeConfig, device: torch.device) -> torch.Tensor:
    """The text decoder's frequencies, scaled as its config says: [rotary_dim / 2] float32.

    Rounded as in transformers: at position 100,000 the last bit of a frequency is 0.01 of a radian.
    """
    dim, yarn, trained = config.rotary_dim, config.yarn, periods(config.theta, config.rotary_dim, device)
    if yarn is None:
        return 1.0 / trained / config.linear_factor

    def pair(num_turns: float) -> float:
        """The (fractional) pair that makes `num_turns` turns within the original positions."""
        turns = yarn.original_positions / (num_turns * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / width).clamp(0, 1)
    return 1.0 / (yarn.factor * trained) * (1 - kept) + 1.0 / trained * kept


class TextRope:
    """Turns M-RoPE positions into cosines and sines."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.inv_freq = text_frequencies(config, device)
        self.attention_factor = 1.0 if config.yarn is None else config.yarn.attention_factor
        self.mrope_section = config.mrope_section
        self.ops = select_backend(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [3, N] int64 -> cos and sin, each [N, rotary_dim / 2] float32."""
        cos, sin = self.ops.mrope_cos_sin(positions, self.inv_freq, self.mrope_section)
        if self.attention_factor == 1.0:
            return cos, sin
        return cos * self.attention_factor, sin * self.attention_factor


def vision_cos_sin(rows: torch.Tensor, columns: torch.Tensor, theta: float, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Cosines and sines of patches at `rows` and `columns` ([P] int64): two of [P, head_dim / 2] float32.

    The first half of the pairs turns with the row, the second with the column (Qwen3_5VisionRotaryEmbedding).
    """
    inv_freq = 1.0 / periods(theta, head_dim // 2, rows.device)
    angles = torch.cat([rows[:, None] * inv_freq, columns[:, None] * inv_freq], dim=-1)
    return angles.cos(), angles.sin()
