"""Rotary positions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch


def mrope_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, mrope_section: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    axis = _pair_axis(tuple(mrope_section), inv_freq.shape[0], positions.device)
    angles = positions.float()[axis].t() * inv_freq
    return angles.cos(), angles.sin()


@functools.cache
def _pair_axis(mrope_section: tuple[int, ...], num_pairs: int, device: torch.device) -> torch.Tensor:
    """The row of the positions (0 temporal, 1 height, 2 width) for each frequency pair: [R / 2] int64."""
    axis = torch.zeros(num_pairs, dtype=torch.int64)
    for row in (1, 2):
        axis[row : 3 * mrope_section[row] : 3] = row
    return axis.to(device)


def apply_partial_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = (first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)
    return torch.cat([*(part.to(x.dtype) for part in rotated), x[..., 2 * half :]], dim=-1)
