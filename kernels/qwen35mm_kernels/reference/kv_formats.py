"""The cache's formats of keys and values, one number at a time. See `qwen35mm_kernels.kv_formats`."""

from __future__ import annotations

import functools
import math

import torch

from qwen35mm_kernels.kv_formats import GROUP, KVFormat


def quantise(format: KVFormat, x: torch.Tensor) -> torch.Tensor:
    """One head's values [D] float32 -> its row [row_width] in the format's type."""
    if format.dtype == torch.float16:
        return torch.tensor([max(-65504.0, min(65504.0, value)) for value in x.tolist()], dtype=torch.float16)
    if not format.bits:
        return x.to(format.dtype)
    if format.is_rotated:
        x = _hadamard(x * _signs(len(x)))
    if format.has_levels:
        return _quantise_to_levels(format, x)
    blocks = [_quantise_group(format, x[start : start + GROUP]) for start in range(0, len(x), GROUP)]
    return torch.cat([codes for codes, _ in blocks] + [scale for _, scale in blocks])


def dequantise(format: KVFormat, row: torch.Tensor) -> torch.Tensor:
    """A row [row_width] -> values [D] float32."""
    return dequantise_all(format, row[None, None])[0, 0]


def dequantise_all(format: KVFormat, rows: torch.Tensor) -> torch.Tensor:
    """Rows of all tokens and heads [N, Hkv, row_width] -> values [N, Hkv, D] float32."""
    if not format.bits:
        return rows.float()
    count = 1 if format.has_levels else rows.shape[-1] // (2 + GROUP * format.bits // 8)

    def values_of(head: torch.Tensor) -> list[float]:
        groups = zip(head[: -2 * count].chunk(count), head[-2 * count :].split(2), strict=True)
        return [value for codes, scale in groups for value in _values(format, codes, scale)]

    values = torch.tensor([[values_of(head) for head in token] for token in rows])
    return _hadamard(values) * _signs(values.shape[-1]) if format.is_rotated else values


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] times the Hadamard matrix over sqrt(D): sums and differences of halves, then of their halves."""
    shape, width = x.shape, x.shape[-1]
    while width > 1:
        first, second = x.view(-1, 2, width // 2).unbind(1)
        x, width = torch.stack([first + second, first - second], dim=1), width // 2
    return x.view(shape) * shape[-1] ** -0.5


@functools.cache
def _signs(dim: int) -> torch.Tensor:
    signs = []
    for i in range(dim):
        # The sign is -1 if an odd number of bit pairs of i are both 1.
        pairs = sum(i >> digit & 3 == 3 for digit in range(0, dim.bit_length(), 2))
        signs.append((-1.0) ** pairs)
    return torch.tensor(signs)


def _quantise_to_levels(format: KVFormat, x: torch.Tensor) -> torch.Tensor:
    squares = [value * value for value in x.tolist()]
    scale = torch.tensor(math.sqrt(sum(squares) / len(squares))).bfloat16()
    edges, codes = (format.levels[1:] + format.levels[:-1]) / 2, []
    for value in x:
        step = value / scale.float() if 0 < scale < math.inf else torch.tensor(0.0)
        codes.append(int((step > edges).sum()))
    if format.bits == 4:
        packed = bytes(codes[i + j] | codes[i + j + 16] << 4 for i in range(0, len(codes), 32) for j in range(16))
    else:
        packed = sum(code << 3 * i for i, code in enumerate(codes)).to_bytes(len(codes) * 3 // 8, "little")
    return torch.cat([torch.tensor(list(packed), dtype=torch.uint8), scale[None].view(torch.uint8)])


def _quantise_group(format: KVFormat, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale, as bytes."""
    extreme = values[int(values.abs().argmax())]
    if format.bits == 4 and values.max() == -values.min():
        extreme = values.min()
    scale = (extreme / -8.0 if format.bits == 4 else extreme.abs() / format.largest).bfloat16()
    codes = []
    for value in values:
        step = value / scale.float() if abs(scale) > 0 else torch.tensor(0.0)
        if format.codes is not None:
            codes.append(step.clamp(-format.largest, format.largest).to(format.codes).view(torch.uint8).item())
        elif format.bits == 8:
            codes.append(round(step.clamp(-127, 127).item()) & 255)
        else:
            codes.append(round(step.clamp(-8, 7).item()) + 8)
    if format.bits == 4:
        codes = [low | high << 4 for low, high in zip(codes[: GROUP // 2], codes[GROUP // 2 :], strict=True)]
    return torch.tensor(codes, dtype=torch.uint8, device=values.device), scale[None].view(torch.uint8)


def _values(format: KVFormat, codes: torch.Tensor, scale_bytes: torch.Tensor) -> list[float]:
    scale = scale_bytes.clone().view(torch.bfloat16).item()
    if format.has_levels and format.bits == 3:
        levels, packed = format.levels.tolist(), int.from_bytes(bytes(codes.tolist()), "little")
        steps = [levels[packed >> 3 * i & 7] for i in range(len(codes) * 8 // 3)]
    elif format.has_levels:
        levels, halves = format.levels.tolist(), [half for some in codes.split(16) for half in (some & 15, some >> 4)]
        steps = [levels[code] for part in halves for code in part.tolist()]
    elif format.codes is not None:
        steps = codes.clone().view(format.codes).tolist()
    elif format.bits == 8:
        steps = [code - 256 if code > 127 else code for code in codes.tolist()]
    else:
        steps = [code - 8 for part in (codes & 15, codes >> 4) for code in part.tolist()]
    return [step * scale for step in steps]
