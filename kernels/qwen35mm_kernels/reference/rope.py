"""Rotary positions: interleaved M-RoPE and the rotation of a head's first dimensions.

Source: Qwen3_5TextRotaryEmbedding and apply_rotary_pos_emb in transformers. Height has the frequency pairs 1, 4, 7, ...
below 3 * its section, width has 2, 5, 8, ... below 3 * its section, and the temporal row has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def mrope_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, mrope_section: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of interleaved M-RoPE, computed once for all layers of a step.

    Args:
        positions: [3, T] int64, the temporal, height and width position of each token.
        inv_freq: [R / 2] float32, where R is the number of rotated dimensions.
        mrope_section: pairs for (temporal, height, width); their sum is R / 2.

    Returns:
        cos, sin: [T, R / 2] float32 each.
    """
    angles = torch.zeros(positions.shape[1], inv_freq.shape[0])
    for pair in range(inv_freq.shape[0]):
        row = pair % 3
        if row > 0 and pair >= 3 * mrope_section[row]:
            row = 0
        angles[:, pair] = positions[row].float() * inv_freq[pair]
    return angles.cos(), angles.sin()


def apply_partial_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first R dimensions of every head (pairs i and i + R / 2) and leaves the others.

    Args:
        x: [T, H, D], float32 or bfloat16. The rotation is float32.
        cos, sin: [T, R / 2] float32, R <= D.

    Returns:
        [T, H, D], a new tensor of x's dtype.
    """
    half = cos.shape[1]
    out = x.float().clone()
    for pair in range(half):
        c, s = cos[:, None, pair], sin[:, None, pair]
        first, second = x[..., pair].float(), x[..., pair + half].float()
        out[..., pair] = first * c - second * s
        out[..., pair + half] = second * c + first * s
    return out.to(x.dtype)
