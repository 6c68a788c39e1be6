"""Rotary positions: interleaved M-RoPE and the rotation of a head's first dimensions.

Source: Qwen3_5TextRotaryEmbedding and apply_rotary_pos_emb in transformers. Of the frequency pairs, height takes
1, 4, 7, ... below 3 * its section and width 2, 5, 8, ... below 3 * its own; the temporal row has the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from qwen35mm_kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from qwen35mm_kernels.dispatch import implementation, implements


def mrope_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, mrope_section: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of interleaved M-RoPE.

    Args:
        positions: [3, T] int64, the temporal, height and width position of each token.
        inv_freq: [R / 2] float32, R the number of rotated dimensions.
        mrope_section: pairs for (temporal, height, width); their sum is R / 2.

    Returns:
        cos, sin: [T, R / 2] float32 each.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit, or sections that don't sum to R / 2.
    """
    check_shape("positions", positions, (3, None), "[3, T]")
    check_shape("inv_freq", inv_freq, (None,), "[R / 2]")
    check_dtype("inv_freq", inv_freq, (torch.float32,))
    pair_axis = mrope_pair_axis(tuple(mrope_section), inv_freq.shape[0])
    return implementation("mrope_cos_sin", positions.device)(positions, inv_freq, pair_axis)


@functools.cache
def mrope_pair_axis(mrope_section: tuple[int, ...], num_pairs: int) -> tuple[int, ...]:
    """Which row of the positions (0 temporal, 1 height, 2 width) turns each frequency pair.

    Raises:
        ValueError: not three sections, or sections that don't sum to `num_pairs`.
    """
    if len(mrope_section) != 3 or min(mrope_section) < 0 or sum(mrope_section) != num_pairs:
        raise ValueError(
            f"mrope_section must be three numbers that sum to R / 2 = {num_pairs} frequency pairs, as [11, 11, 10] do "
            f"for 32; got {list(mrope_section)}. Take it and the rotary size from the checkpoint's config.json."
        )
    axis = [0] * num_pairs
    for row in (1, 2):
        for pair in range(row, min(3 * mrope_section[row], num_pairs), 3):
            axis[pair] = row
    return tuple(axis)


def apply_partial_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first R dimensions of every head (pairs i and i + R / 2); the others pass through.

    Args:
        x: [T, H, D], float32 or bfloat16. The rotation is float32.
        cos, sin: [T, R / 2] float32, R <= D.

    Returns:
        [T, H, D], a new tensor of x's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_dtype("x", x, FLOAT_DTYPES)
    check_shape("x", x, (None, None, None), "[T, H, D]")
    check_dtype("cos", cos, (torch.float32,))
    check_dtype("sin", sin, (torch.float32,))
    check_shape("cos", cos, (x.shape[0], None), "[T, R / 2]")
    check_shape("sin", sin, cos.shape, "the shape of cos")
    if 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(f"cos and sin turn {2 * cos.shape[1]} dimensions, but heads have {x.shape[2]}; pass R <= D.")
    return implementation("apply_partial_rope", x.device)(x, cos, sin)


def naive_mrope_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, mrope_section: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `mrope_cos_sin`."""
    angles = torch.zeros(positions.shape[1], inv_freq.shape[0])
    for pair in range(inv_freq.shape[0]):
        row = pair % 3
        if row > 0 and pair >= 3 * mrope_section[row]:
            row = 0
        angles[:, pair] = positions[row].float() * inv_freq[pair]
    return angles.cos(), angles.sin()


def naive_apply_partial_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The specification of `apply_partial_rope`."""
    half = cos.shape[1]
    out = x.float().clone()
    for pair in range(half):
        c, s = cos[:, None, pair], sin[:, None, pair]
        first, second = x[..., pair].float(), x[..., pair + half].float()
        out[..., pair] = first * c - second * s
        out[..., pair + half] = second * c + first * s
    return out.to(x.dtype)


@implements("mrope_cos_sin", "torch")
def _mrope_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, pair_axis: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    axis = torch.tensor(pair_axis, device=positions.device)
    angles = positions.float()[axis].t() * inv_freq
    return angles.cos(), angles.sin()


@implements("apply_partial_rope", "torch")
def _apply_partial_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = (first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)
    return torch.cat([*(part.to(x.dtype) for part in rotated), x[..., 2 * half :]], dim=-1)
