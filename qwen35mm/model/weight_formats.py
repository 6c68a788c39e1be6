"""Matrices of weights, and the formats that they are kept in: what formats differ in is here and nowhere else.

A `Weight` is made empty and filled with rows as a checkpoint gives them. On a CPU with the compiled part it is packed
for that processor's products, rounded to integers or as the integers that a quantised checkpoint has; elsewhere it is a
plain tensor, or integers beside scales, and torch multiplies.
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
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_kernels.cpu.native.products import GroupedRows, Groups, PackedMatrix
from qwen35mm_kernels.cpu.quantise import GROUP, dequantise, pack_nibbles, quantise

# By name: bits of a value, a group's scale included. None: as the activations are.
INTEGER_FORMATS = {"int8": 8.5, "int4": 4.5}
# The integers that a checkpoint has, where products hold them exactly; what else is in it stays as activations are.
AS_STORED = "as stored"
_ROWS_AT_ONCE = 2048
_VALUES_AT_ONCE = 1 << 19


@dataclass(frozen=True)
class Factory:
    """Where and how parameters are made.

    Attributes:
        dtype: of activations, and of weights that aren't integers.
        integers: `int8`, `int4` or `AS_STORED` for matrices that may be quantised.
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
    def fill(self, first: int, rows: torch.Tensor) -> None:
        """Writes plain rows [n, in_features], on the CPU, in float32 or bfloat16, over those from `first` on."""

    @abc.abstractmethod
    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x @ weight.T + bias: [N, in_features] -> [N, out_features] in x's dtype, which is `dtype`; into `out`."""

    @abc.abstractmethod
    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """index: [N] int64 -> [N, in_features] in `dtype`, a tensor of its own."""


class PlainWeight(Weight):
    """A tensor, `values` [out_features, in_features], that torch multiplies."""

    def __init__(self, out_features: int, in_features: int, factory: Factory) -> None:
        super().__init__(out_features, in_features, factory)
        values = torch.empty(out_features, in_features, dtype=factory.dtype, device=factory.device)
        self.values = nn.Parameter(values, requires_grad=False)

    def fill(self, first: int, rows: torch.Tensor) -> None:
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

    def fill(self, first: int, rows: torch.Tensor) -> None:
        self.matrix.fill(first, rows)

    def fill_groups(self, first: int, rows: GroupedRows) -> None:
        """The same of one that is made of groups."""
        self.matrix.fill_groups(first, rows)

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.matrix.linear(x, bias, out)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.matrix.rows(index, self.dtype)


class QuantisedWeight(Weight):
    """Integers beside scales, where there is no compiled part: some rows at a time become floats and are multiplied."""

    integers: torch.Tensor
    scales: torch.Tensor

    def __init__(self, out_features: int, in_features: int, factory: Factory) -> None:
        super().__init__(out_features, in_features, factory)
        groups = -(-in_features // GROUP)
        self.bits = 8 if factory.integers == "int8" else 4
        shape = (out_features, groups, GROUP if self.bits == 8 else GROUP // 2)
        integers = torch.zeros(shape, dtype=torch.int8 if self.bits == 8 else torch.uint8, device=factory.device)
        self.register_buffer("integers", integers)
        self.register_buffer("scales", torch.zeros(out_features, groups, dtype=torch.bfloat16, device=factory.device))

    def fill(self, first: int, rows: torch.Tensor) -> None:
        # A few at a time: what it computes with is many times what it makes.
        for some in rows.split(max(1, _VALUES_AT_ONCE // self.in_features)):
            integers, scales = quantise(some, self.bits)
            part = slice(first, first + len(some))
            self.integers[part] = integers if self.bits == 8 else pack_nibbles(integers)
            self.scales[part] = scales
            first = part.stop

    def product(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = x.new_empty(len(x), self.out_features) if out is None else out
        for start in range(0, self.out_features, _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            some = dequantise(self.integers[part], self.scales[part], self.in_features, self.dtype)
            out[:, part] = linear(x, some, None if bias is None else bias[part])
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return dequantise(self.integers[index], self.scales[index], self.in_features, self.dtype)


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

    def part_at(self, row: int) -> tuple[Weight, int]:
        """The part of a part that a row lies in, and which of its rows it is there."""
        for place, part in self._placed():
            if place.start <= row < place.stop:
                row -= place.start
                return part.part_at(row) if isinstance(part, StackedWeight) else (part, row)
        raise IndexError(row)

    def stored(self, first: int = 0) -> Iterator[tuple[int, StoredWeight]]:
        """Those in it that lie as a checkpoint has them, and where each begins."""
        for place, part in self._placed():
            if isinstance(part, StackedWeight):
                yield from part.stored(first + place.start)

    def fill(self, first: int, rows: torch.Tensor) -> None:
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

    def lay_out(self, runs: Sequence[tuple[int, Groups | None]]) -> None:
        """Makes its parts, one for each run of rows that are the same integers, or none.

        Args:
            runs: how many rows, and as what they are held; together all rows.
        """
        assert not self.parts
        assert sum(count for count, _ in runs) == self.out_features
        merged = [(key, sum(count for count, _ in run)) for key, run in groupby(runs, key=lambda run: run[1])]
        self._hold([PackedWeight(count, self.in_features, self.factory, groups) for groups, count in merged])


def new_weight(out_features: int, in_features: int, factory: Factory, *, exact_rows: int = 0) -> Weight:
    """An empty weight in the format that `factory` asks for.

    Args:
        exact_rows: how many of the last rows are never quantised.
    """
    if factory.integers is not None and exact_rows:
        main = new_weight(out_features - exact_rows, in_features, factory)
        return StackedWeight([main, new_weight(exact_rows, in_features, factory.exact())], factory)
    if factory.integers == AS_STORED:
        return StoredWeight(out_features, in_features, factory)
    if factory.device.type == "cpu" and find_library() is not None:
        return PackedWeight(out_features, in_features, factory)
    return (PlainWeight if factory.integers is None else QuantisedWeight)(out_features, in_features, factory)
