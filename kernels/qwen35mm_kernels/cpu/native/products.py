"""Products with packed weights: the layouts are described in src/weight.h."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from qwen35mm_kernels.cpu.native.library import Library

_BLOCK, _GROUP = 16, 32
# By the name of the format: its number in weight.h, and bits of a value.
FORMATS = {"float32": (0, 32), "bfloat16": (1, 16), "int8": (2, 8), "int4": (3, 4)}


class _Weight(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("in_", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    )


class PackedMatrix:
    """A matrix [out, in] in blocks of 16 rows, made for products with few rows and with many.

    Integers are symmetric, with a bfloat16 scale for every 32 neighbours of a row: 8.5 and 4.5 bits a value. Rows that
    they are multiplied by are rounded to 8 bits, 32 neighbours at a time, and the sums of 32 products are exact.
    A product's bits depend on its own row alone, not on the rows beside it nor on the number of threads.

    Attributes:
        data: uint8, what `src/weight.h` describes; undefined until `fill` has written all rows.
        scales: bfloat16, of integers; empty for floats.
    """

    def __init__(
        self,
        library: Library,
        format: str,
        out_features: int,
        in_features: int,
        data: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """data, scales: of a matrix that was packed before (`shapes` says how large)."""
        self.library, self.format = library, format
        self.out_features, self.in_features = out_features, in_features
        num_bytes, num_scales = self.shapes(format, out_features, in_features)
        # Zeros are for what pads it: where nothing does, `fill` writes every byte.
        new = torch.zeros if out_features % _BLOCK or in_features % _GROUP else torch.empty
        self.data = new(num_bytes, dtype=torch.uint8) if data is None else data
        self.scales = new(num_scales, dtype=torch.bfloat16) if scales is None else scales
        assert (self.data.numel(), self.scales.numel()) == (num_bytes, num_scales)
        addresses = self.data.data_ptr(), self.scales.data_ptr() if num_scales else None
        self._weight = _Weight(FORMATS[format][0], out_features, in_features, *addresses)
        self._reference = ctypes.byref(self._weight)

    @staticmethod
    def shapes(format: str, out_features: int, in_features: int) -> tuple[int, int]:
        """How many bytes of data and how many scales a matrix takes."""
        rows = -(-out_features // _BLOCK) * _BLOCK
        columns = in_features if format == "float32" else -(-in_features // _GROUP) * _GROUP
        is_integer = format.startswith("int")
        return rows * columns * FORMATS[format][1] // 8, rows * columns // _GROUP if is_integer else 0

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def fill(self, first: int, rows: torch.Tensor) -> None:
        """Writes rows [n, in], float32 or bfloat16, contiguous, over those from `first` on."""
        assert rows.is_contiguous()
        assert rows.shape[1] == self.in_features
        assert first + len(rows) <= self.out_features
        is_bf16 = rows.dtype == torch.bfloat16
        self.library("qwen_pack", self._reference, rows, is_bf16, first, len(rows), torch.get_num_threads())

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x @ matrix.T + bias.

        Args:
            x: [N, in], float32 or bfloat16, a row's values side by side; float32 for a float32 matrix, bfloat16 for a
                bfloat16 one, either for integers.
            bias: [out] in x's dtype.
            out: [N, out] in x's dtype to write to, a row's values side by side.

        Returns:
            [N, out] in x's dtype.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        if out is None:
            out = x.new_empty(x.shape[0], self.out_features)
        rows, is_bf16 = (x, x.shape[0], x.stride(0)), x.dtype is torch.bfloat16
        self.library("qwen_linear", self._reference, *rows, bias, out, out.stride(0), is_bf16, torch.get_num_threads())
        return out

    def rows(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows by their numbers, index [N] int64 -> [N, in], as exact as `dtype` (float32 or bfloat16) is."""
        out = torch.empty(len(index), self.in_features, dtype=dtype)
        index = index.contiguous()
        is_bf16, num_threads = dtype is torch.bfloat16, torch.get_num_threads()
        self.library("qwen_rows", self._reference, index, len(index), out, is_bf16, num_threads)
        return out

    def __reduce__(self) -> Any:
        raise TypeError("A packed matrix holds addresses: it can't be pickled.")
