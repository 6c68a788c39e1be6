"""Products with integer weights and scales, in a layout that GPUs read 16 bytes at a time.

A row of a matrix is `words` of 32 bits. 32 columns take `bits` words. Four words hold 16 columns of 8 bits or 32
columns of 4 bits: the bits from `bits * s` on of word j are column 8 (s // 2) + 2 j + s % 2. So four words give pairs
of values for eight neighbours of x at a time, where matrix units want those of a first operand. Columns that pad the
last words are zeros.
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
    """x @ (scale * integer + minimum).T, elementwise for the matrix.

    Args:
        x: [N, in], float32 or bfloat16.
        words: [M, ceil(in / 32) * bits] int32, as above. 8-bit values are -128 to 127. 4-bit values are 0 to 15 with
            minima, and -8 to 7 without.
        scales: [M, ceil(in / width)], bfloat16 or float32.
        minima: summands with the shape of scales, or None.
        out: [N, M] in x's dtype, to write the result to.
        bits: 8 or 4.
        width: number of columns that share a scale, 16 or a multiple of 32.

    Returns:
        [N, M] in x's dtype; `out` if given.
    """
    out = torch.empty(len(x), len(words), dtype=x.dtype) if out is None else out
    matrix = integer_matrix(words, scales, minima, num_in=x.shape[1], bits=bits, width=width)
    for row, target in zip(x.float(), out, strict=True):
        target.copy_(matrix @ row)
    return out


def integer_matrix(
    words: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None = None,
    *,
    num_in: int,
    bits: int,
    width: int,
) -> torch.Tensor:
    """[M, num_in] float32: the matrix of `integer_linear`."""
    matrix = torch.zeros(len(words), num_in)
    per_word = 32 // bits
    for column in range(num_in):
        four, inside = divmod(column, 4 * per_word)
        place = 2 * (inside // 8) + inside % 2
        code = words[:, 4 * four + inside % 8 // 2] >> (bits * place) & (1 << bits) - 1
        integers = code - 256 * (code > 127) if bits == 8 else code if minima is not None else code - 8
        matrix[:, column] = integers * scales[:, column // width].float()
        if minima is not None:
            matrix[:, column] += minima[:, column // width].float()
    return matrix
