"""Matrices of weights, and the formats that they are kept in: what formats differ in is here and nowhere else.

A `Weight` is made empty and filled with rows as a checkpoint gives them. On a CPU with the compiled part it is packed
for that processor's products, rounded to integers or as the integers that a quantised checkpoint has; elsewhere it is a
plain tensor, the eight-bit floats of a checkpoint, or integers beside scales: a card's kernels multiply them, or torch.
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
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_kernels.cpu.native.products import GroupedRows, Groups, PackedMatrix
from qwen35mm_kernels.cpu.quantise import GROUP, dequantise, pack, quantise
from qwen35mm_kernels.reference import fp8
from qwen35mm_kernels.reference.fp8 import Blocks

# By name: bits of a value, a group's scale included. None: as the activations are.
INTEGER_FORMATS = {"int8": 8.5, "int4": 4.5}
# The integers that a checkpoint has, where products hold them exactly; what else is in it stays as activations are.
AS_STORED = "as stored"
# The same of its eight-bit floats, on cards that multiply them.
FP8 = "fp8"
_ROWS_AT_ONCE = 2048
_VALUES_AT_ONCE = 1 << 19


# Plain ones [n, in_features] on the CPU, in float32 or bfloat16, or those of a quantised checkpoint as it has them.
Rows = torch.Tensor | GroupedRows


@dataclass(frozen=True)
class Factory:
    """Where and how parameters are made.

    Attributes:
        dtype: of activations, and of weights that aren't integers.
        integers: `int8`, `int4`, `AS_STORED` or `FP8` for matrices that may be quantised.
        is_mapped: packed matrices get their memory by `PackedWeight.take`, and take none before.
    """

    dtype: torch.dtype
    device: torch.device
    integers: str | None = None
    is_mapped: bool = False

    def exact(self) -> Factory:
        """For what is never quantised."""
        return replace(self, integers=None)

    def head(self) -> Factory:
        """For embeddings and the output head, which fewer than eight bits cost more than the layers."""
        return replace(self, integers="int8" if self.integers in INTEGER_FORMATS else self.integers)


class Weight(nn.Module, abc.ABC):
    """A matrix [out_features, in_features] and its products.

    Attributes:
        dtype: of rows and products.
        device: where it lies, and where it is multiplied.
    """

    def __init__(self, out_features: int, in_features: int, factory: Factory) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.dtype, self.device = factory.dtype, factory.device

    @abc.abstractmethod
    def fill(self, first: int, rows: Rows) -> None:
        """Writes rows over those from `first` on: plain ones, or to a part that lies so, those of a checkpoint."""

    @abc.abstractmethod
    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x @ weight.T + bias: [N, in_features] -> [N, out_features] in x's dtype, which is `dtype`; into `out`."""

    @abc.abstractmethod
    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """index: [N] int64 -> [N, in_features] in `dtype`, a tensor of its own."""


class PlainWeight(Weight):
    """A tensor that torch multiplies.

    Args:
        below: another one, still empty, whose rows move to where they lie right behind this one's.

    Attributes:
        values: [out_features, in_features].
        stacked: `values`, and behind them those of the one below.
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
    """A matrix in the layout of the compiled part, in one of its formats."""

    data: torch.Tensor
    scales: torch.Tensor

    def __init__(self, out_features: int, in_features: int, factory: Factory, groups: Groups | None = None) -> None:
        """groups: as which integers it is filled, in place of the factory's."""
        super().__init__(out_features, in_features, factory)
        library = find_library()
        assert library is not None
        format = groups or factory.integers or str(factory.dtype).removeprefix("torch.")
        if factory.is_mapped:
            # Memory that nothing is written to isn't taken.
            num_bytes, num_scales = PackedMatrix.shapes(format, out_features, in_features)
            data = torch.empty(num_bytes, dtype=torch.uint8), torch.empty(num_scales, dtype=torch.bfloat16)
            self.matrix = PackedMatrix(library, format, out_features, in_features, *data)
        else:
            self.matrix = PackedMatrix(library, format, out_features, in_features)
        self.register_buffer("data", self.matrix.data)
        self.register_buffer("scales", self.matrix.scales)

    def take(self, data: torch.Tensor, scales: torch.Tensor) -> None:
        """Has it lie in other memory, which holds such a matrix and is only read."""
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
    """Integers beside scales, where there is no compiled part: some rows at a time become floats and are multiplied.

    Attributes:
        words: [out_features, ...] int32, as `qwen35mm_kernels.reference.integers` has them.
        scales: a group's, bfloat16 of what is rounded here, and float32 of a checkpoint's.
        minima: a group's, of a checkpoint that has them.
    """

    words: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None

    def __init__(self, out_features: int, in_features: int, factory: Factory, groups: Groups | None = None) -> None:
        """groups: as which integers it is filled, in place of the factory's."""
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
        # A few at a time: what it computes with is many times what it makes.
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
    """The same where a card's kernels multiply it as it is."""

    def __init__(self, out_features: int, in_features: int, factory: Factory, groups: Groups | None = None) -> None:
        super().__init__(out_features, in_features, factory, groups)
        self.ops = select_backend(factory.device)

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        how = {"bits": self.groups.bits, "width": self.groups.width}
        found = self.ops.integer_linear(x, self.words, self.scales, self.minima, out, **how)
        return found if bias is None else found.add_(bias)


class Fp8Weight(Weight):
    """A matrix of eight-bit floats as a checkpoint has them, whose products round the rows that come, too.

    Attributes:
        values: [out_features, in_features] e4m3.
        scales: float32, one for each `blocks.rows` rows and 128 columns, or all of them.
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
        assert isinstance(rows, GroupedRows), "eight-bit floats come as they are stored"
        index = torch.arange(first, first + len(rows))
        self.values[first : first + len(index)] = rows.integers
        self.scales[index // self.blocks.rows] = rows.scales.to(self.device)

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = self.ops.fp8_linear(x, self.values, self.scales, out)
        return found if bias is None else found.add_(bias)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        # As bytes: not every release of torch picks rows of eight-bit floats.
        codes = self.values.view(torch.uint8)[index].view(torch.float8_e4m3fn).float()
        scales = self.scales[index // self.blocks.rows]
        if not self.blocks.is_whole:
            scales = scales.repeat_interleave(fp8.GROUP, dim=1)[:, : self.in_features]
        return codes.mul_(scales).to(self.dtype)


class StackedWeight(Weight):
    """Weights one under the other: experts, or rows that aren't quantised below those that are."""

    def __init__(self, parts: Sequence[Weight], factory: Factory, shape: tuple[int, int] | None = None) -> None:
        """shape: of one whose parts come later."""
        super().__init__(*(shape or (sum(part.out_features for part in parts), parts[0].in_features)), factory)
        self._hold(parts)

    def _hold(self, parts: Sequence[Weight]) -> None:
        self.parts = parts
        for index, part in enumerate(parts):
            self.add_module(str(index), part)

    def _placed(self) -> Iterator[tuple[slice, Weight]]:
        """The parts, and which of all rows are theirs."""
        start = 0
        for part in self.parts:
            yield slice(start, start + part.out_features), part
            start += part.out_features

    def stored(self, first: int = 0) -> Iterator[tuple[int, StoredWeight]]:
        """Those in it that lie as a checkpoint has them, and where each begins."""
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
    """Rows that lie as a checkpoint has them: nothing until `lay_out` has made its parts."""

    def __init__(self, out_features: int, in_features: int, factory: Factory) -> None:
        super().__init__([], factory, (out_features, in_features))
        self.factory = factory.exact()

    def stored(self, first: int = 0) -> Iterator[tuple[int, StoredWeight]]:
        yield first, self

    def lay_out(self, runs: Sequence[tuple[int, Groups | Blocks | None]]) -> None:
        """Makes its parts, one for each run of rows that are the same integers or eight-bit floats, or neither.

        Args:
            runs: how many rows, and as what they are held; together all rows.
        """
        assert not self.parts
        assert sum(count for count, _ in runs) == self.out_features
        merged = [(key, [count for count, _ in run]) for key, run in groupby(runs, key=lambda run: run[1])]
        self._hold([self._part(counts, held) for held, counts in merged])

    def _part(self, counts: Sequence[int], held: Groups | Blocks | None) -> Weight:
        count, width = sum(counts), self.in_features
        if isinstance(held, Blocks):
            # Matrices whose blocks don't follow each other without a gap have a scale for each row.
            fit = all(each % held.rows == 0 for each in counts[:-1])
            return Fp8Weight(count, width, self.factory, held if fit else replace(held, rows=1))
        if held is None:
            return new_weight(count, width, self.factory)
        is_packed = self.device.type == "cpu" and find_library() is not None
        return (PackedWeight if is_packed else CardWeight)(count, width, self.factory, held)


def new_weight(out_features: int, in_features: int, factory: Factory, *, exact_rows: int = 0) -> Weight:
    """An empty weight in the format that `factory` asks for.

    Args:
        exact_rows: how many of the last rows are never quantised.
    """
    if factory.integers is not None and exact_rows:
        main = new_weight(out_features - exact_rows, in_features, factory)
        return StackedWeight([main, new_weight(exact_rows, in_features, factory.exact())], factory)
    if factory.integers in (AS_STORED, FP8):
        return StoredWeight(out_features, in_features, factory)
    if factory.device.type == "cpu" and find_library() is not None:
        return PackedWeight(out_features, in_features, factory)
    if factory.integers is None:
        return PlainWeight(out_features, in_features, factory)
    return (QuantisedWeight if factory.device.type == "cpu" else CardWeight)(out_features, in_features, factory)
