"""Products with 8-bit float weights, one group of columns at a time, and rounding to them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qwen35mm_kernels.reference.fp8 import GROUP, LARGEST, LEAST_MAXIMUM, scale_of_rows


def fp8_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    of_rows = scales.repeat_interleave(scale_of_rows(values, scales), dim=0)[: len(values)]
    codes, code_scales = rounded_rows(x)
    sums = torch.zeros(len(x), len(values), device=x.device)
    parts = zip(codes.float().split(GROUP, dim=1), values.split(GROUP, dim=1), strict=True)
    for group, (some, columns) in enumerate(parts):
        of_columns = of_rows[:, 0 if scales.shape[1] == 1 else group]
        sums += some @ columns.float().T * (code_scales[:, group : group + 1] * of_columns)
    return sums.to(x.dtype) if out is None else out.copy_(sums)


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, in] -> codes [N, in] e4m3, and scales [N, ceil(in / 128)] float32, by which the largest of 128 is 448."""
    groups = F.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    # A tensor, since on a card torch multiplies by the inverse of a Python number, which rounds ties differently.
    largest = torch.full((), LARGEST, device=x.device)
    scales = groups.abs().amax(dim=2).clamp_min(LEAST_MAXIMUM) / largest
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[1]], scales
