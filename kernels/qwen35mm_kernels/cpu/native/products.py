"""Products with packed weights. src/weight.h describes the layouts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from qwen35mm_kernels.cpu.native.library import Library

_BLOCK, _GROUP = 16, 32
# Name of a format -> (its number in weight.h, bits of a value).
FORMATS = {"float32": (0, 32), "bfloat16": (1, 16), "int8": (2, 8), "int4": (3, 4)}


@dataclass(frozen=True)
class Groups:
    """A checkpoint's integer format: scale * integer + minimum, with one of both for `width` neighbours of a row.

    Attributes:
        bits: 8 (integers from -128 to 127) or 4 (from -8 to 7; with minima from 0 to 15).
        width: 16, or a multiple of 32.
        has_minima: whether there are minima to add.
    """

    bits: int
    width: int
    has_minima: bool = False

    def __post_init__(self) -> None:
        assert self.bits in (4, 8)
        assert self.width == _GROUP // 2 or (self.width > 0 and self.width % _GROUP == 0)

    @property
    def bits_per_value(self) -> float:
        """Including scales and minima in float32."""
        return self.bits + 32 * (1 + self.has_minima) / self.width


@dataclass(frozen=True, eq=False)
class GroupedRows:
    """Rows of a `Groups` matrix: integers [n, in] int8, scales and minima [n, ceil(in / width)] float32.

    For 8-bit floats (`reference.fp8.Blocks`), `integers` are e4m3, and a whole row may share one scale.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.integers)

    def __getitem__(self, part: slice) -> GroupedRows:
        """A slice of the rows."""
        return GroupedRows(self.integers[part], self.scales[part], None if self.minima is None else self.minima[part])


class _Weight(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("in_", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
        ("group", ctypes.c_int32),
    )


class PackedMatrix:
    """A matrix [out, in] in blocks of 16 rows, for products with few or many rows.

    Integers are symmetric with a bfloat16 scale for every 32 neighbours of a row (8.5 and 4.5 bits a value), or
    `Groups`. Products with integers round the other operand's rows to 8 bits, 32 neighbours at a time. Sums of 32
    products are exact. Each row of a result depends only on its own input row, not on other rows or the number of
    threads.

    Attributes:
        format: one of `FORMATS`, or `Groups`.
        data: uint8 in the layout of `src/weight.h`; undefined until all rows are written.
        scales: bfloat16 for integers; float32 for groups, followed by their minima; empty for floats.
    """

    def __init__(
        self,
        library: Library,
        format: str | Groups,
        out_features: int,
        in_features: int,
        data: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """data, scales: of a matrix that was packed before, with the sizes of `shapes`."""
        self.library, self.format = library, format
        self.out_features, self.in_features = out_features, in_features
        num_bytes, num_scales = self.shapes(format, out_features, in_features)
        # Padding must be zero. Without padding, `fill` writes every byte.
        new = torch.zeros if out_features % _BLOCK or in_features % _GROUP else torch.empty
        self.data = new(num_bytes, dtype=torch.uint8) if data is None else data
        dtype = torch.float32 if isinstance(format, Groups) else torch.bfloat16
        self.scales = new(num_scales, dtype=dtype) if scales is None else scales
        assert (self.data.numel(), self.scales.numel(), self.scales.dtype) == (num_bytes, num_scales, dtype)
        addresses = self.data.data_ptr(), self.scales.data_ptr() if num_scales else None
        if isinstance(format, Groups):
            minima = self.scales[num_scales // 2 :].data_ptr() if format.has_minima else None
            number = 4 if format.bits == 8 else 5
            self._weight = _Weight(number, out_features, in_features, *addresses, minima, format.width)
        else:
            self._weight = _Weight(FORMATS[format][0], out_features, in_features, *addresses)
        self._reference = ctypes.byref(self._weight)

    @staticmethod
    def shapes(format: str | Groups, out_features: int, in_features: int) -> tuple[int, int]:
        """(bytes of data, number of scales and minima) of a matrix."""
        rows = -(-out_features // _BLOCK) * _BLOCK
        if isinstance(format, Groups):
            columns = -(-in_features // _GROUP) * _GROUP
            return rows * columns * format.bits // 8, rows * -(-columns // format.width) * (1 + format.has_minima)
        columns = in_features if format == "float32" else -(-in_features // _GROUP) * _GROUP
        is_integer = format.startswith("int")
        return rows * columns * FORMATS[format][1] // 8, rows * columns // _GROUP if is_integer else 0

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def fill(self, first: int, rows: torch.Tensor) -> None:
        """Writes rows [n, in], float32 or bfloat16, contiguous, at row `first`."""
        assert rows.is_contiguous()
        assert rows.shape[1] == self.in_features
        assert first + len(rows) <= self.out_features
        assert not isinstance(self.format, Groups)
        is_bf16 = rows.dtype == torch.bfloat16
        self.library("qwen_pack", self._reference, rows, is_bf16, first, len(rows), torch.get_num_threads())

    def fill_groups(self, first: int, rows: GroupedRows) -> None:
        """Writes rows in this matrix's `Groups` format at row `first`."""
        integers, scales = rows.integers.contiguous(), rows.scales.contiguous()
        minima = None if rows.minima is None else rows.minima.contiguous()
        assert isinstance(self.format, Groups)
        assert self.format.has_minima == (minima is not None)
        assert (integers.dtype, integers.shape[1]) == (torch.int8, self.in_features)
        for x in (scales, minima):
            assert x is None or x.dtype == torch.float32
            assert x is None or x.shape == (len(integers), -(-self.in_features // self.format.width))
        assert first + len(integers) <= self.out_features
        place = first, len(integers), torch.get_num_threads()
        self.library("qwen_pack_groups", self._reference, integers, scales, minima, *place)

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x @ matrix.T + bias.

        Args:
            x: [N, in] with contiguous rows; float32 for a float32 matrix, bfloat16 for a bfloat16 one, either for
                integers.
            bias: [out] in x's dtype.
            out: [N, out] in x's dtype to write to, with contiguous rows.

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
        """Rows by index [N] int64 -> [N, in], rounded only to `dtype` (float32 or bfloat16)."""
        out = torch.empty(len(index), self.in_features, dtype=dtype)
        index = index.contiguous()
        is_bf16, num_threads = dtype is torch.bfloat16, torch.get_num_threads()
        self.library("qwen_rows", self._reference, index, len(index), out, is_bf16, num_threads)
        return out

    def __reduce__(self) -> Any:
        raise TypeError("A packed matrix holds addresses: it can't be pickled.")
