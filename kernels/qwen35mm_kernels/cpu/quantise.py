"""Quantises matrices to symmetric 8- or 4-bit integers, with a scale for every 32 neighbours of a row; products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

GROUP = 32
# Scales to try: those that put the farthest value at -8 plus so many tenths.
_INT4_STEPS = range(-12, 13)


def quantise(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, in] -> integers [n, groups, 32] int8 and scales [n, groups] bfloat16. Zeros pad the last group.

    8-bit integers run from -127 to 127, with a scale that no value exceeds. 4-bit integers run from -8 to 7, with the
    scale of the least squared error among those that put a group's farthest value near -8.
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


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """integers [n, in] int8 (4-bit: 0 to 15) -> words [n, ceil(in / 32) * bits] int32 of `reference.integers`."""
    padded = F.pad(integers, (0, -integers.shape[1] % GROUP)).view(torch.uint8)
    # Words, and in each the values from the lowest bits on.
    values = padded.unflatten(1, (-1, 16 // bits, 4, 2)).transpose(2, 3).flatten(3)
    if bits == 4:
        values = values[..., ::2] | (values[..., 1::2] << 4)
    return values.contiguous().view(torch.int32).flatten(1)


def dequantise(
    words: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    *,
    bits: int,
    width: int,
    in_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Words [n, ...] of `pack` and their scales -> rows [n, in_features]."""
    data = words.view(torch.uint8).unflatten(1, (-1, 4, 4))
    if bits == 4:
        data = torch.stack([data & 15, data >> 4], dim=4).flatten(3)
    integers = data.unflatten(3, (-1, 2)).transpose(2, 3).flatten(1).view(torch.int8)
    if bits == 4 and minima is None:
        integers = integers.sub_(8)
    if integers.shape[1] % width:
        integers = F.pad(integers, (0, -integers.shape[1] % width))
    # Convert first, then scale in place: torch takes twice as long to multiply integers by floats.
    values = integers.float().unflatten(1, (-1, width))[:, : scales.shape[1]].mul_(scales.float()[..., None])
    if minima is not None:
        values += minima.float()[..., None]
    return values.flatten(1)[:, :in_features].to(dtype)


def integer_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    bits: int,
    width: int,
) -> torch.Tensor:
    num_in, dtype = x.shape[1], torch.float32
    matrix = dequantise(words, scales, minima, bits=bits, width=width, in_features=num_in, dtype=dtype)
    found = F.linear(x.float(), matrix)
    return found.to(x.dtype) if out is None else out.copy_(found)
