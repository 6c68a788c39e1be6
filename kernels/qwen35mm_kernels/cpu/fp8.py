"""Products with 8-bit float weights, one group of columns at a time."""

from __future__ import annotations

import torch

from qwen35mm_kernels.reference.fp8 import GROUP, LARGEST, LEAST_MAXIMUM, scale_of_rows


def fp8_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    of_rows = scales.repeat_interleave(scale_of_rows(values, scales), dim=0)[: len(values)]
    sums = torch.zeros(len(x), len(values), device=x.device)
    parts = zip(x.float().split(GROUP, dim=1), values.split(GROUP, dim=1), strict=True)
    # A tensor, since on a card torch multiplies by the inverse of a Python number, which rounds ties differently.
    largest = torch.full((), LARGEST, device=x.device)
    for group, (some, columns) in enumerate(parts):
        scale = some.abs().amax(dim=1, keepdim=True).clamp_min(LEAST_MAXIMUM) / largest
        codes = (some / scale).to(torch.float8_e4m3fn).float()
        sums += codes @ columns.float().T * (scale * of_rows[:, 0 if scales.shape[1] == 1 else group])
    return sums.to(x.dtype) if out is None else out.copy_(sums)
