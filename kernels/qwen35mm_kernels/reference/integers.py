"""Products with weights that are integers beside scales, in the layout that cards read 16 bytes at a time.

A row of a matrix is `words` of 32 bits, for each 32 columns as many as a value has bits. Four words hold 16 columns of
eight bits or 32 of four: bits from `bits * s` on of word j are column 4 s + j, so that whoever has four words has
values for four neighbours of x at a time. Columns that fill up the last words are zeros.
"""

from __future__ import annotations

import torch


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
    """x @ (scale * integer + minimum).T, each number of the matrix for itself.

    Args:
        x: [N, in], float32 or bfloat16.
        words: [M, ceil(in / 32) * bits] int32, as above. Eight bits are -128 to 127; four are 0 to 15, and 8 less
            where there are no minima.
        scales: [M, ceil(in / width)], bfloat16 or float32.
        minima: the same of what is added, or None.
        out: [N, M] in x's dtype, which the result is written to.
        bits: 8 or 4.
        width: columns that have a scale in common, 16 or a multiple of 32.

    Returns:
        [N, M] in x's dtype; `out` where it is given.
    """
    out = torch.empty(len(x), len(words), dtype=x.dtype) if out is None else out
    matrix = torch.zeros(len(words), x.shape[1])
    per_word = 32 // bits
    for column in range(x.shape[1]):
        four, inside = divmod(column, 4 * per_word)
        code = words[:, 4 * four + inside % 4] >> (bits * (inside // 4)) & (1 << bits) - 1
        integers = code - 256 * (code > 127) if bits == 8 else code if minima is not None else code - 8
        matrix[:, column] = integers * scales[:, column // width].float()
        if minima is not None:
            matrix[:, column] += minima[:, column // width].float()
    for row, target in zip(x.float(), out, strict=True):
        target.copy_(matrix @ row)
    return out
