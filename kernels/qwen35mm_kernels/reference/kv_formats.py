"""The cache's formats of keys and values, one number after the other. See `qwen35mm_kernels.kv_formats`."""

from __future__ import annotations

import torch

from qwen35mm_kernels.kv_formats import GROUP, KVFormat


def quantise(format: KVFormat, x: torch.Tensor) -> torch.Tensor:
    """A row of one head [D] float32 as it is kept, [row_width] of the format's type."""
    if format.dtype == torch.float16:
        return torch.tensor([max(-65504.0, min(65504.0, value)) for value in x.tolist()], dtype=torch.float16)
    if not format.bits:
        return x.to(format.dtype)
    blocks = [_quantise_group(format, x[start : start + GROUP]) for start in range(0, len(x), GROUP)]
    return torch.cat(blocks)


def dequantise(format: KVFormat, row: torch.Tensor) -> torch.Tensor:
    """A kept row [row_width] as values [D] float32."""
    if not format.bits:
        return row.float()
    return torch.tensor([value for block in row.split(format.block_bytes) for value in _values(format, block)])


def dequantise_all(format: KVFormat, rows: torch.Tensor) -> torch.Tensor:
    """Rows of all tokens and heads [N, Hkv, row_width] as values [N, Hkv, D] float32."""
    return torch.stack([torch.stack([dequantise(format, head) for head in token]) for token in rows])


def _quantise_group(format: KVFormat, values: torch.Tensor) -> torch.Tensor:
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
    return torch.cat([scale[None].view(torch.uint8), torch.tensor(codes, dtype=torch.uint8)])


def _values(format: KVFormat, block: torch.Tensor) -> list[float]:
    scale, codes = block[:2].clone().view(torch.bfloat16).item(), block[2:]
    if format.codes is not None:
        steps = codes.clone().view(format.codes).tolist()
    elif format.bits == 8:
        steps = [code - 256 if code > 127 else code for code in codes.tolist()]
    else:
        steps = [code - 8 for part in (codes & 15, codes >> 4) for code in part.tolist()]
    return [step * scale for step in steps]
