"""Weight matrices and the formats that keep them. All differences between formats are in this module.

A `Weight` is created empty and filled with rows from the checkpoint. On a CPU with the compiled part it is packed for
that processor's products: rounded to integers, or with a quantised checkpoint's own integers. Elsewhere it is a plain
tensor, a checkpoint's eight-bit floats, or integers with scales, which a card's kernels or torch multiply.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import nn

from qwen35mm.model.dense import linear
from qwen35mm_kernels import select_backend
from qwen35mm_kernels.cpu.fp8 import rounded_rows
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_kernels.cpu.native.products import GroupedRows, Groups, PackedMatrix
from qwen35mm_kernels.cpu.quantise import GROUP, dequantise, pack, quantise
from qwen35mm_kernels.reference import fp8
from qwen35mm_kernels.reference.fp8 import Blocks

# Bits of a value by format name, including a group's scale. None: the activations' dtype.
INTEGER_FORMATS = {"int8": 8.5, "int4": 4.5}
# Eight-bit floats made from any checkpoint, a scale for 128 neighbours of a row. `auto` never chooses them.
ROUNDED_FP8 = "fp8"
ROUNDED_FORMATS = {**INTEGER_FORMATS, ROUNDED_FP8: Blocks(rows=1).bits_per_value}
# A checkpoint's own integers, where products take them exactly; its other tensors have the activations' dtype.
AS_STORED = "as stored"
# A checkpoint's own eight-bit floats, on cards that multiply them.
FP8 = "fp8 as stored"
_ROWS_AT_ONCE = 2048
_VALUES_AT_ONCE = 1 << 19


# Floats [n, in_features] on the CPU, float32 or bfloat16, or a quantised checkpoint's own rows.
Rows = torch.Tensor | GroupedRows


@dataclass(frozen=True)
class Factory:
    """Where and how parameters are made.

    Attributes:
        dtype: of activations, and of weights that aren't integers.
        integers: one of `ROUNDED_FORMATS`, `AS_STORED` or `FP8` for matrices that may be quantised.
        is_mapped: packed matrices get their memory from `PackedWeight.take`, and use none before.
    """

    dtype: torch.dtype
    device: torch.device
    integers: str | None = None
    is_mapped: bool = False

    def exact(self) -> Factory:
        """The factory for what is never quantised."""
        return replace(self, integers=None)

    def head(self) -> Factory:
        """The factory for embeddings and the output head, which fewer than eight bits harm more than the layers."""
        return replace(self, integers="int8" if self.integers in ROUNDED_FORMATS else self.integers)

    def experts(self) -> Factory:
        """The factory for experts, whose grouped products have none of eight-bit floats."""
        return replace(self, integers="int8") if self.integers == ROUNDED_FP8 else self


class Weight(nn.Module, abc.ABC):
    """A matrix [out_features, in_features] and its products.

    Attributes:
        dtype: of rows and products.
        device: where it lies and is multiplied.
    """

    def __init__(self, out_features: int, in_features: int, factory: Factory) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.dtype, self.device = factory.dtype, factory.device

    @abc.abstractmethod
    def fill(self, first: int, rows: Rows) -> None:
        """Overwrites rows from `first` on with floats, or in a `StoredWeight`'s part with a checkpoint's own rows."""

    @abc.abstractmethod
    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x @ weight.T + bias: [N, in_features] -> [N, out_features] in `dtype`, which is x's; into `out` if given."""

    @abc.abstractmethod
    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """index: [N] int64 -> [N, in_features] in `dtype`, a new tensor."""


class PlainWeight(Weight):
    """A tensor that torch multiplies.

    Args:
        below: another empty weight, whose rows move right behind this one's.

    Attributes:
        values: [out_features, in_features].
        stacked: `values`, then the rows of `below`.
    """

    def __init__(
        self, out_features: int, in_features: int, factory: Factory, *, below: PlainWeight | None = None
    ) -> None:
        super().__init__(out_features, in_features, factory)
        num_rows = out_features + (0 if below is None else below.out_features)
        self.stacked = torch.empty(num_rows, in_features, dtype=factory.dtype, device=factory.device)
        self.values = nn.Parameter(self.stacked[:out_features], requires_grad=False)
        if below is not None:
            below.stacked = self.stacked[out_features:]
            below.values = nn.Parameter(below.stacked, requires_grad=False)

    def fill(self, first: int, rows: Rows) -> None:
        assert isinstance(rows, torch.Tensor)
        self.values[first : first + len(rows)] = rows

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = linear(x, self.values, bias)
        return found if out is None else out.copy_(found)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return F.embedding(index, self.values)


class PackedWeight(Weight):
    """A matrix in the compiled part's layout, in one of its formats."""

    data: torch.Tensor
    scales: torch.Tensor

    def __init__(self, out_features: int, in_features: int, factory: Factory, groups: Groups | None = None) -> None:
        """groups: the integer format, in place of the factory's."""
        super().__init__(out_features, in_features, factory)
        library = find_library()
        assert library is not None
        format = groups or factory.integers or str(factory.dtype).removeprefix("torch.")
        if factory.is_mapped:
            # Memory that is never written to takes no pages.
            num_bytes, num_scales = PackedMatrix.shapes(format, out_features, in_features)
            data = torch.empty(num_bytes, dtype=torch.uint8), torch.empty(num_scales, dtype=torch.bfloat16)
            self.matrix = PackedMatrix(library, format, out_features, in_features, *data)
        else:
            self.matrix = PackedMatrix(library, format, out_features, in_features)
        self.register_buffer("data", self.matrix.data)
        self.register_buffer("scales", self.matrix.scales)

    def take(self, data: torch.Tensor, scales: torch.Tensor) -> None:
        """Uses other, read-only memory that holds this matrix."""
        old = self.matrix
        self.matrix = PackedMatrix(old.library, old.format, self.out_features, self.in_features, data, scales)
        self.data, self.scales = data, scales

    def fill(self, first: int, rows: Rows) -> None:
        if isinstance(rows, GroupedRows):
            self.matrix.fill_groups(first, rows)
        else:
            self.matrix.fill(first, rows)

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.matrix.linear(x, bias, out)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.matrix.rows(index, self.dtype)


class QuantisedWeight(Weight):
    """Integers with scales, without the compiled part: some rows at a time become floats and are multiplied.

    Attributes:
        words: [out_features, ...] int32, in the layout of `qwen35mm_kernels.reference.integers`.
        scales: one a group: bfloat16 where we round, float32 from a checkpoint.
        minima: one a group, from a checkpoint that has them.
    """

    words: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None

    def __init__(self, out_features: int, in_features: int, factory: Factory, groups: Groups | None = None) -> None:
        """groups: the integer format, in place of the factory's."""
        super().__init__(out_features, in_features, factory)
        self.groups = groups or Groups(8 if factory.integers == "int8" else 4, GROUP)
        self.is_rounded = groups is None

        def zeros(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(out_features, columns, dtype=dtype, device=factory.device)

        num_groups, dtype = -(-in_features // self.groups.width), torch.bfloat16 if groups is None else torch.float32
        self.register_buffer("words", zeros(-(-in_features // GROUP) * self.groups.bits, torch.int32))
        self.register_buffer("scales", zeros(num_groups, dtype))
        self.register_buffer("minima", zeros(num_groups, dtype) if self.groups.has_minima else None)

    def fill(self, first: int, rows: Rows) -> None:
        # A few rows at a time: the temporaries are many times larger than the result.
        at_once = max(1, _VALUES_AT_ONCE // self.in_features)
        for start in range(0, len(rows), at_once):
            some, minima = rows[start : start + at_once], None
            if isinstance(some, GroupedRows):
                integers, scales, minima = some.integers.to(self.device), some.scales, some.minima
            else:
                assert self.is_rounded
                groups, scales = quantise(some.to(self.device), self.groups.bits)
                integers = groups.flatten(1)[:, : self.in_features]
            if self.groups.bits == 4 and minima is None:
                integers = integers + 8
            part = slice(first + start, first + start + len(some))
            self.words[part], self.scales[part] = pack(integers, self.groups.bits), scales
            if self.minima is not None:
                assert minima is not None
                self.minima[part] = minima

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = x.new_empty(len(x), self.out_features) if out is None else out
        for start in range(0, self.out_features, _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            out[:, part] = linear(x, self._values(part), None if bias is None else bias[part])
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self._values(index)

    def _values(self, part: torch.Tensor | slice) -> torch.Tensor:
        return dequantise(
            self.words[part],
            self.scales[part],
            None if self.minima is None else self.minima[part],
            bits=self.groups.bits,
            width=self.groups.width,
            in_features=self.in_features,
            dtype=self.dtype,
        )


class CardWeight(QuantisedWeight):
    """`QuantisedWeight` that a card's kernels multiply directly.

    Args:
        below: another empty weight of the same format, whose rows move right behind this one's.

    Attributes:
        stacked: words, scales and perhaps minima of all these rows.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        factory: Factory,
        groups: Groups | None = None,
        *,
        below: CardWeight | None = None,
    ) -> None:
        num_rows = out_features + (0 if below is None else below.out_features)
        super().__init__(num_rows, in_features, factory, groups)
        self.out_features = out_features
        self.ops = select_backend(factory.device)
        self.stacked = tuple(x for x in (self.words, self.scales, self.minima) if x is not None)
        if below is not None:
            assert below.groups == self.groups
            self._take(self.stacked, slice(0, out_features))
            below._take(self.stacked, slice(out_features, num_rows))

    def _take(self, stacked: tuple[torch.Tensor, ...], rows: slice) -> None:
        self.words, self.scales, *minima = (x[rows] for x in stacked)
        self.minima = minima[0] if minima else None

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        how = {"bits": self.groups.bits, "width": self.groups.width}
        found = self.ops.integer_linear(x, self.words, self.scales, self.minima, out, **how)
        return found if bias is None else found.add_(bias)


class Fp8Weight(Weight):
    """A matrix of eight-bit floats, a checkpoint's own or rounded; its products round the activations too.

    Attributes:
        values: [out_features, in_features] e4m3.
        scales: float32, one for each `blocks.rows` rows and 128 columns, or one for all columns.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def __init__(self, out_features: int, in_features: int, factory: Factory, blocks: Blocks) -> None:
        super().__init__(out_features, in_features, factory)
        self.blocks, self.ops = blocks, select_backend(factory.device)
        shape = -(-out_features // blocks.rows), 1 if blocks.is_whole else -(-in_features // fp8.GROUP)
        values = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn, device=factory.device)
        self.register_buffer("values", values)
        self.register_buffer("scales", torch.empty(shape, dtype=torch.float32, device=factory.device))

    def fill(self, first: int, rows: Rows) -> None:
        index = torch.arange(first, first + len(rows))
        if isinstance(rows, GroupedRows):
            codes, scales = rows.integers, rows.scales
        else:
            assert self.blocks == Blocks(rows=1), "rows may come singly"
            codes, scales = rounded_rows(rows.to(self.device))
        self.values[first : first + len(index)] = codes
        self.scales[index // self.blocks.rows] = scales.to(self.device)

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = self.ops.fp8_linear(x, self.values, self.scales, out)
        return found if bias is None else found.add_(bias)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        # As bytes: some releases of torch can't index eight-bit floats.
        codes = self.values.view(torch.uint8)[index].view(torch.float8_e4m3fn).float()
        scales = self.scales[index // self.blocks.rows]
        if not self.blocks.is_whole:
            scales = scales.repeat_interleave(fp8.GROUP, dim=1)[:, : self.in_features]
        return codes.mul_(scales).to(self.dtype)


class StackedWeight(Weight):
    """Weights stacked by rows: experts, or quantised rows above rows that aren't."""

    def __init__(self, parts: Sequence[Weight], factory: Factory, shape: tuple[int, int] | None = None) -> None:
        """shape: of a weight whose parts come later."""
        super().__init__(*(shape or (sum(part.out_features for part in parts), parts[0].in_features)), factory)
        self._hold(parts)

    def _hold(self, parts: Sequence[Weight]) -> None:
        self.parts = parts
        for index, part in enumerate(parts):
            self.add_module(str(index), part)

    def _placed(self) -> Iterator[tuple[slice, Weight]]:
        """Each part with its slice of the rows."""
        start = 0
        for part in self.parts:
            yield slice(start, start + part.out_features), part
            start += part.out_features

    def stored(self, first: int = 0) -> Iterator[tuple[int, StoredWeight]]:
        """The parts that keep a checkpoint's own format, with the first row of each."""
        for place, part in self._placed():
            if isinstance(part, StackedWeight):
                yield from part.stored(first + place.start)

    def fill(self, first: int, rows: Rows) -> None:
        for place, part in self._placed():
            low, high = max(first, place.start), min(first + len(rows), place.stop)
            if low < high:
                part.fill(low - place.start, rows[low - first : high - first])

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if len(self.parts) == 1:
            return self.parts[0].product(x, bias, out)
        out = x.new_empty(len(x), self.out_features) if out is None else out
        for place, part in self._placed():
            part.product(x, None if bias is None else bias[place], out[:, place])
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        if len(self.parts) == 1:
            return self.parts[0].rows(index)
        out = torch.empty(len(index), self.in_features, dtype=self.dtype, device=self.device)
        for place, part in self._placed():
            here = (index >= place.start) & (index < place.stop)
            out[here] = part.rows(index[here] - place.start)
        return out


class StoredWeight(StackedWeight):
    """Rows in a checkpoint's own format: empty until `lay_out` has made the parts."""

    def __init__(self, out_features: int, in_features: int, factory: Factory) -> None:
        super().__init__([], factory, (out_features, in_features))
        self.factory = factory.exact()

    def stored(self, first: int = 0) -> Iterator[tuple[int, StoredWeight]]:
        yield first, self

    def lay_out(self, runs: Sequence[tuple[int, Groups | Blocks | None]]) -> None:
        """Makes one part for each run of rows with the same integers, eight-bit floats, or plain floats.

        Args:
            runs: the number of rows and their format, in order; together they cover all rows.
        """
        assert not self.parts
        assert sum(count for count, _ in runs) == self.out_features
        merged = [(key, [count for count, _ in run]) for key, run in groupby(runs, key=lambda run: run[1])]
        self._hold([self._part(counts, held) for held, counts in merged])

    def _part(self, counts: Sequence[int], held: Groups | Blocks | None) -> Weight:
        count, width = sum(counts), self.in_features
        if isinstance(held, Blocks):
            # Merged tensors whose rows don't fill whole blocks get a scale for each row.
            fit = all(each % held.rows == 0 for each in counts[:-1])
            return Fp8Weight(count, width, self.factory, held if fit else replace(held, rows=1))
        if held is None:
            return new_weight(count, width, self.factory)
        is_packed = self.device.type == "cpu" and find_library() is not None
        return (PackedWeight if is_packed else CardWeight)(count, width, self.factory, held)


def new_weight(
    out_features: int, in_features: int, factory: Factory, *, exact_rows: int = 0, below: Weight | None = None
) -> Weight:
    """An empty weight in the format that `factory` asks for.

    Args:
        exact_rows: how many of the last rows are never quantised.
        below: an empty weight of the same format, plain or a card's, whose rows move right behind this one's.
    """
    if isinstance(below, PlainWeight):
        return PlainWeight(out_features, in_features, factory, below=below)
    if isinstance(below, CardWeight):
        return CardWeight(out_features, in_features, factory, below=below)
    assert below is None
    if factory.integers is not None and exact_rows:
        main = new_weight(out_features - exact_rows, in_features, factory)
        return StackedWeight([main, new_weight(exact_rows, in_features, factory.exact())], factory)
    if factory.integers == ROUNDED_FP8:
        return Fp8Weight(out_features, in_features, factory, Blocks(rows=1))
    if factory.integers in (AS_STORED, FP8):
        return StoredWeight(out_features, in_features, factory)
    if factory.device.type == "cpu" and find_library() is not None:
        return PackedWeight(out_features, in_features, factory)
    if factory.integers is None:
        return PlainWeight(out_features, in_features, factory)
    return (QuantisedWeight if factory.device.type == "cpu" else CardWeight)(out_features, in_features, factory)
