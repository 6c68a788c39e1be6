"""A checkpoint's tensors as numbers, from any storage format: plain floats, or codes with scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import ClassVar

import torch

from qwen35mm.checkpoints.safetensors_files import (
    StoredTensor,
    open_shard,
    read_into,
    read_rows,
    read_tensor,
    same_bytes,
)
from qwen35mm.errors import CheckpointError
from qwen35mm_kernels.cpu.native.products import GroupedRows, Groups
from qwen35mm_kernels.reference.fp8 import Blocks

# A quantised matrix's part [in] of any format, by which its inputs are multiplied: AWQ and SmoothQuant of ModelOpt.
INPUT_SCALE = "pre_quant_scale"
# Float32 values made at a time from a quantised tensor.
_VALUES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Source(ABC):
    """A tensor with its name in the family's own checkpoints.

    Attributes:
        shape: of its numbers.
        stored: the stored tensors that make it up, by part name.
    """

    name: str
    shape: tuple[int, ...]
    stored: Mapping[str, StoredTensor]

    @property
    def place(self) -> tuple[Path, int]:
        """File and offset of its beginning: files are read from start to end."""
        first = min(self.stored.values(), key=lambda part: (part.file, part.start))
        return first.file, first.start

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return sum(part.num_bytes for part in self.stored.values())

    def same_bytes(self, other: Source) -> bool:
        """Whether another source holds the same numbers, stored in the same way."""
        both = zip(sorted(self.stored), sorted(other.stored), strict=False)
        return len(self.stored) == len(other.stored) and all(
            one == two and same_bytes(self.stored[one], other.stored[two]) for one, two in both
        )

    @property
    @abstractmethod
    def kind(self) -> str:
        """The storage format, in a word or two."""

    @abstractmethod
    def rows(self, width: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Its exact numbers as rows [n, width], some at a time, float32 or bfloat16 on the CPU. The next result may
        overwrite the last one.

        Args:
            buffer: from `new_buffer`.

        Raises:
            CheckpointError: the file ends early, or its values aren't valid numbers.
        """

    @property
    def groups(self) -> Groups | Blocks | None:
        """The format of integers on a processor, or eight-bit floats on a card, that holds its numbers exactly; None if
        there is none. Judged by the headers."""
        return None

    def grouped_rows(self) -> Iterator[GroupedRows]:
        """Its rows in that form, some at a time; raises as `rows`."""
        raise AssertionError(f"{self.kind} has no groups")

    def read_into(self, target: torch.Tensor, buffer: torch.Tensor) -> None:
        """Writes its numbers to `target` (1-D, contiguous, same size) in target's dtype; raises as `rows`."""
        width, done = self.shape[-1], 0
        for rows in self.rows(width, buffer):
            target[done : done + rows.numel()].view(-1, width).copy_(rows)
            done += rows.numel()


class PlainSource(Source):
    """Floats of 16 or 32 bits."""

    @classmethod
    def of(cls, tensor: StoredTensor) -> PlainSource:
        return cls(tensor.name, tensor.shape, {"": tensor})

    @property
    def tensor(self) -> StoredTensor:
        return self.stored[""]

    @property
    def kind(self) -> str:
        return self.tensor.dtype

    def rows(self, width: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        with open_shard(self.tensor.file) as file:
            yield from read_rows(file, self.tensor, width, buffer)

    def read_into(self, target: torch.Tensor, buffer: torch.Tensor) -> None:
        with open_shard(self.tensor.file) as file:
            read_into(file, self.tensor, target, buffer)


@dataclass(frozen=True, eq=False)
class Grouped:
    """A matrix as small numbers times scales.

    Attributes:
        codes: [out, in], exact in float32: integers less their zero point, or small floats.
        scales: [out, groups] float32.
        group_of: [in] int64, the group of each column; None for neighbouring groups, all but the last `width` wide.
        width: columns of a group.
        columns: [in] float32, another scale for each column, or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    width: int
    group_of: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """[stop - start, in] float32, contiguous."""
        rows = self._scaled(start, stop)
        return rows if self.columns is None else rows.mul_(self.columns)

    def _scaled(self, start: int, stop: int) -> torch.Tensor:
        codes = self.codes[start:stop].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        scales = self.scales[start:stop]
        if self.group_of is not None:
            return codes.mul_(scales[:, self.group_of])
        if scales.shape[1] == 1:
            return codes.mul_(scales)
        return codes.mul_(scales.repeat_interleave(self.width, dim=1)[:, : codes.shape[1]])

    def integers(self, start: int, stop: int, groups: Groups) -> GroupedRows:
        """The same rows as integers. Raises ValueError if they don't fit into the bits."""
        codes, scales, minima = self.codes[start:stop], self.scales[start:stop], None
        if groups.has_minima:
            # Whatever the zero point, a group's smallest integer becomes the smallest possible one.
            least = 0 if groups.bits == 4 else -128
            grouped = codes.unflatten(1, (scales.shape[1], -1))
            base = grouped.amin(dim=2).to(torch.int16) - least
            codes, minima = (grouped - base.to(codes.dtype)[..., None]).flatten(1), scales * base
        low, high = (-128, 127) if groups.bits == 8 else (0, 15) if groups.has_minima else (-8, 7)
        if int(codes.amin()) < low or int(codes.amax()) > high:
            raise ValueError(f"holds integers beyond {low} and {high}")
        return GroupedRows(codes.to(torch.int8), scales.contiguous(), minima)


class Format(ABC):
    """How a kind of quantised matrix is stored. All methods raise ValueError with the reason."""

    # In a word or two.
    name: ClassVar[str]
    # Allowed dtypes by part. Other parts are an error: without them the matrix would be a different one.
    dtypes: ClassVar[Mapping[str, tuple[str, ...]]]

    def check(self, parts: Mapping[str, StoredTensor]) -> None:
        """Checks which parts there are, and their dtypes."""
        for part, tensor in sorted(parts.items()):
            known = self.dtypes.get(part)
            if known is None:
                raise ValueError(f"has {tensor.name} beside it, which is none of {self.name}'s parts")
            if tensor.dtype not in known:
                raise ValueError(f"has {tensor.name} in {tensor.dtype}, where {' or '.join(known)} is expected")

    @abstractmethod
    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        """Checks the parts' headers; returns the matrix's shape, [out, in] or [experts, out, in]."""

    @abstractmethod
    def decode(self, parts: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Grouped:
        """Decodes the parts, with stacked matrices one below the other."""

    def groups(self, parts: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Groups | Blocks | None:
        """See `Source.groups`."""
        return None


@dataclass(frozen=True)
class QuantisedSource(Source):
    """A matrix, or a stack of them, stored as codes and scales."""

    format: Format

    @property
    def kind(self) -> str:
        return self.format.name

    @classmethod
    def of(cls, name: str, stored: Mapping[str, StoredTensor], format: Format) -> QuantisedSource:
        """Raises CheckpointError if the parts don't make a matrix of that format."""
        own = {part: tensor for part, tensor in stored.items() if part != INPUT_SCALE}
        try:
            format.check(own)
            shape = format.shape(own)
            if INPUT_SCALE in stored:
                _check_columns(stored[INPUT_SCALE], shape)
            return cls(name, shape, stored, format)
        except ValueError as error:
            raise damaged(name, stored, str(error)) from None

    @property
    def groups(self) -> Groups | Blocks | None:
        return None if INPUT_SCALE in self.stored else self.format.groups(self.stored, self.shape)

    def grouped_rows(self) -> Iterator[GroupedRows]:
        groups, found, width = self.groups, self.read(), self.shape[-1]
        assert groups is not None
        num_rows, at_once = prod(self.shape[:-1]), max(1, _VALUES_AT_ONCE // width)
        for start in range(0, num_rows, at_once):
            stop = min(start + at_once, num_rows)
            if isinstance(groups, Blocks):
                if not bool(found.rows(start, stop).isfinite().all()):
                    raise damaged(self.name, self.stored, "holds values that are not finite")
                yield GroupedRows(found.codes[start:stop], found.scales[start:stop])
                continue
            try:
                rows = found.integers(start, stop, groups)
            except ValueError as error:
                raise damaged(self.name, self.stored, str(error)) from None
            # The largest product with any integer.
            if not bool((rows.scales * 256).isfinite().all()):
                raise damaged(self.name, self.stored, "holds values that are not finite")
            yield rows

    def read(self) -> Grouped:
        """Reads the whole matrix; raises CheckpointError."""
        try:
            parts = {name: read_tensor(part) for name, part in self.stored.items()}
            columns = parts.pop(INPUT_SCALE, None)
            found = self.format.decode(parts, self.shape)
        except ValueError as error:
            raise damaged(self.name, self.stored, str(error)) from None
        if columns is not None:
            found = replace(found, columns=columns.float())
        if not bool(found.scales.isfinite().all()):
            raise damaged(self.name, self.stored, "has scales that are not finite")
        return found

    def rows(self, width: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        if width != self.shape[-1]:
            raise damaged(self.name, self.stored, f"is quantised, which only matrices of {width} columns may be")
        found = self.read()
        num_rows, at_once = prod(self.shape[:-1]), max(1, _VALUES_AT_ONCE // width)
        for start in range(0, num_rows, at_once):
            rows = found.rows(start, min(start + at_once, num_rows))
            if not bool(rows.isfinite().all()):
                raise damaged(self.name, self.stored, "holds values that are not finite")
            yield rows


def _check_columns(scale: StoredTensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a matrix of this shape has one of these scales a column."""
    if scale.shape != shape[-1:] or scale.dtype not in ("F16", "BF16", "F32"):
        what = f"{scale.dtype} of {list(scale.shape)}"
        raise ValueError(f"has a {INPUT_SCALE} in {what}, which doesn't fit {list(shape)}")


def as_groups(bits: int, width: int, num_groups: int, *, has_minima: bool = False) -> Groups | None:
    """Groups of a matrix `width` columns wide for a processor's products; None if they don't support them."""
    # A whole row is one group, as wide as the padded row.
    group = width // num_groups if num_groups > 1 else -(-width // 32) * 32
    if width % num_groups or (group % 32 and group != 16):
        return None
    return Groups(4 if bits <= 4 else 8, group, has_minima)


def damaged(name: str, stored: Mapping[str, StoredTensor], what: str) -> CheckpointError:
    """The error for a damaged tensor."""
    file = next(iter(stored.values())).file.name
    return CheckpointError(f"{name} in {file} {what}. Download the checkpoint again, or take another one.")


def described(sources: Iterable[Source]) -> str:
    """Counts tensors by storage format: "186 FP8, 120 BF16"."""
    counts = Counter(source.kind for source in sources)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
