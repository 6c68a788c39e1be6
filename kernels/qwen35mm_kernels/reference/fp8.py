"""Products of e4m3 (8-bit float) weights with rows rounded to e4m3.

Source: DeepSeek-V3's blocks of 128 x 128 and tiles of 1 x 128, as in transformers' finegrained_fp8.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Neighbours of a row that share a scale, and rows of a weight's block.
GROUP = 128
LARGEST = 448.0
# Lower bound of a group's maximum: keeps the scale from being zero or subnormal.
LEAST_MAXIMUM = 2.0**-100


@dataclass(frozen=True)
class Blocks:
    """The scale blocks of a matrix of e4m3 numbers, as `fp8_linear` takes it.

    Attributes:
        rows: number of rows that share a scale, 1 or 128.
        is_whole: whether all columns share a scale; else 128 columns do.
    """

    rows: int
    is_whole: bool = False

    @property
    def bits_per_value(self) -> float:
        """Including scales, except those of whole rows, which are negligible."""
        return 8 if self.is_whole else 8 + 32 / (self.rows * GROUP)


def fp8_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ (values * scales).T, where each 128 neighbours of a row of x are rounded to e4m3. Their largest becomes 448.

    Args:
        x: [N, in], float32 or bfloat16. A group with an infinity or NaN gives NaN.
        values: [M, in] float8_e4m3fn.
        scales: float32, one for each row ([M, ...]) or each 128 rows ([ceil(M / 128), ...]) of `values`, and for each
            128 columns ([..., ceil(in / 128)]) or all of them ([..., 1]).
        out: [N, M] in x's dtype, to write the result to.

    Returns:
        [N, M] in x's dtype; `out` if given.
    """
    out = torch.empty(len(x), len(values), dtype=x.dtype) if out is None else out
    rows_of_scale, is_whole = scale_of_rows(values, scales), scales.shape[1] == 1
    for row, target in zip(x.float(), out, strict=True):
        sums = torch.zeros(len(values))
        for group, some in enumerate(row.split(GROUP)):
            scale = some.abs().amax().clamp_min(LEAST_MAXIMUM) / LARGEST
            codes = (some / scale).to(torch.float8_e4m3fn).float()
            columns = values[:, group * GROUP : group * GROUP + len(some)].float()
            of_rows = scales[:, 0 if is_whole else group].repeat_interleave(rows_of_scale)[: len(values)]
            sums += columns @ codes * (scale * of_rows)
        target.copy_(sums)
    return out


def scale_of_rows(values: torch.Tensor, scales: torch.Tensor) -> int:
    """How many rows of a weight, or of each in a stack, share a scale: 1 or 128. Asserts that the shapes fit."""
    (num_out, num_in), (rows, groups) = values.shape[-2:], scales.shape[-2:]
    assert rows in (num_out, -(-num_out // GROUP)), (values.shape, scales.shape)
    assert groups in (1, -(-num_in // GROUP)), (values.shape, scales.shape)
    return 1 if rows == num_out else GROUP
