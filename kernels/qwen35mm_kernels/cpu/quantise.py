"""Matrices as integers with a scale for every 32 neighbours of a row: symmetric, 8 or 4 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

GROUP = 32
# How far from the scale that puts the farthest value on -8 others are tried, in steps of a tenth of an integer.
_INT4_STEPS = range(-12, 13)


def quantise(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, in] -> integers [n, groups, 32] int8 and scales [n, groups] bfloat16; the last group is padded by zeros.

    Eight bits run from -127 to 127, with a scale that no value exceeds; four from -8 to 7, with the scale of the least
    squared error among those that put a group's farthest value near -8.
    """
    groups = F.pad(rows.float(), (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    if bits == 8:
        largest = groups.abs().amax(dim=2)
        scales = (largest / 127).bfloat16()
        scales = torch.where(scales.float() < largest / 127, torch.nextafter(scales, scales + 1), scales)
        return _round(groups, scales, -127, 127), scales
    assert bits == 4
    farthest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    best_score, best = torch.full_like(farthest, -1), torch.zeros_like(farthest)
    for step in _INT4_STEPS:
        integers = (groups * ((-8 + 0.1 * step) / farthest)).round().clamp_(-8, 7).nan_to_num_(0)
        product = (integers * groups).sum(dim=2, keepdim=True)
        square = integers.square().sum(dim=2, keepdim=True).clamp_(min=1)
        is_better = product.square() / square > best_score
        best_score = torch.where(is_better, product.square() / square, best_score)
        best = torch.where(is_better, product / square, best)
    scales = best[..., 0].bfloat16()
    return _round(groups, scales, -8, 7), scales


def _round(groups: torch.Tensor, scales: torch.Tensor, low: int, high: int) -> torch.Tensor:
    inverse = torch.where(scales == 0, 0, 1 / scales.float())[..., None]
    return (groups * inverse).round().clamp_(low, high).to(torch.int8)


def pack_nibbles(integers: torch.Tensor) -> torch.Tensor:
    """integers [..., 32] from -8 to 7 -> [..., 16] uint8: the first half in the lower four bits."""
    shifted = (integers + 8).to(torch.uint8)
    return shifted[..., : GROUP // 2] | (shifted[..., GROUP // 2 :] << 4)


def dequantise(integers: torch.Tensor, scales: torch.Tensor, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """integers [n, groups, 32] int8, or [n, groups, 16] uint8 of `pack_nibbles` -> rows [n, in_features]."""
    if integers.dtype == torch.uint8:
        integers = torch.cat([integers & 15, integers >> 4], dim=-1).to(torch.int8) - 8
    return (integers * scales.float()[..., None]).flatten(1)[:, :in_features].to(dtype)
