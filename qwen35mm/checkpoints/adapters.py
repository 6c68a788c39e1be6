"""Adapters merged into a checkpoint's tensors while they are read: in float32, before anything is rounded.

Only a quantised tensor that keeps its integers is read as it is: `model/attach.py` puts the changes beside it.

An adapter's share is a share of the change that it makes: W + scale * (W_adapted - W), also for DoRA and for whole
tensors. Several adapters' changes are added up, each taken of the original tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from qwen35mm.checkpoints.peft_folders import Adapter, LowRank
from qwen35mm.checkpoints.safetensors_files import StoredTensor, read_tensor
from qwen35mm.checkpoints.sources import Source
from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD
from qwen35mm.errors import CheckpointError
from qwen35mm_kernels.cpu.native.products import GroupedRows, Groups
from qwen35mm_kernels.reference.fp8 import Blocks

_VALUES_AT_ONCE = 1 << 20
# The two parameters of a stack of experts; where each has tensors of its own, one of them is two.
_STACKED = (("gate", "up"), ("down",))


@dataclass(frozen=True)
class Factors:
    """A low-rank change in numbers, for the matrices [out, in] of a stack; most stacks have one.

    Attributes:
        up: [stack, out, rank] float32, times the scaling.
        down: [stack, rank, in] float32.
        magnitude: [out] float32 of DoRA: the length of each row of the result; else None.
    """

    up: torch.Tensor
    down: torch.Tensor
    magnitude: torch.Tensor | None

    @classmethod
    def read(cls, change: LowRank, shape: Sequence[int]) -> Factors:
        """Reads the change of a tensor of this shape."""
        down, up = read_tensor(change.down).float(), read_tensor(change.up).float()
        if change.is_embedding:
            down, up = down.T, up.T
        if _is_stack(shape):
            # PEFT's order: rows of experts in `down`, columns of ranks in `up`.
            down = down.unflatten(0, (shape[0], change.rank))
            up = up.unflatten(1, (change.rank, shape[0])).permute(2, 0, 1)
        else:
            down, up = down.flatten(1)[None], up.flatten(1)[None]
        magnitude = None if change.magnitude is None else read_tensor(change.magnitude).float().flatten()
        return cls(up * change.scaling, down.contiguous(), magnitude)

    def added(self, first: int, rows: torch.Tensor) -> torch.Tensor:
        """What the adapter adds to rows [n, in] float32 of the stack, which begin with row `first`."""
        out_features = self.up.shape[1]
        found, done = torch.empty_like(rows), 0
        while done < len(rows):
            matrix, start = divmod(first + done, out_features)
            stop = min(out_features, start + len(rows) - done)
            count = stop - start
            torch.mm(self.up[matrix, start:stop], self.down[matrix], out=found[done : done + count])
            if self.magnitude is not None:
                part = rows[done : done + count]
                changed = found[done : done + count].add_(part)
                lengths = torch.linalg.vector_norm(changed, dim=1)
                changed.mul_((self.magnitude[start:stop] / lengths)[:, None]).sub_(part)
            done += count
        return found


@dataclass(frozen=True)
class Change:
    """What one adapter does to one tensor: a low-rank change, or a tensor in its place.

    Attributes:
        stack: the shape that a low-rank change is of.
        first: the tensor's first row in it, with the matrices of a stack one below the other.
    """

    adapter: Adapter
    low_rank: LowRank | None = None
    whole: StoredTensor | None = None
    stack: tuple[int, ...] = ()
    first: int = 0


@dataclass(frozen=True)
class AdaptedSource(Source):
    """A tensor with changes of adapters."""

    base: Source
    changes: tuple[Change, ...]
    read: Callable[[LowRank, tuple[int, ...]], Factors] = field(repr=False)

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def groups(self) -> Groups | Blocks | None:
        """Of the tensor without low-rank changes, which may stay beside it; a whole tensor in its place is floats.

        Embeddings, head and experts take up a change, so they become floats.
        """
        stays = self.name not in (EMBEDDING, LM_HEAD) and ".experts." not in self.name
        return self.base.groups if stays and all(change.whole is None for change in self.changes) else None

    def grouped_rows(self) -> Iterator[GroupedRows]:
        """Its rows without the changes."""
        yield from self.base.grouped_rows()

    def rows(self, width: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        first = 0
        wholes = [
            (each.adapter, read_tensor(each.whole).float().view(-1, width))
            for each in self.changes
            if each.whole is not None
        ]
        added = [
            (each.adapter, self.read(each.low_rank, each.stack), each.first)
            for each in self.changes
            if each.low_rank is not None
        ]
        at_once = max(1, _VALUES_AT_ONCE // width)
        for several in self.base.rows(width, buffer):
            for part in several.split(at_once):
                base = part.to(torch.float32, copy=True)
                found = base.clone()
                for adapter, whole in wholes:
                    found.lerp_(whole[first : first + len(base)], adapter.scale)
                for adapter, factors, offset in added:
                    found.add_(factors.added(offset + first, base), alpha=adapter.scale)
                if not bool(found.isfinite().all()):
                    names = ", ".join(each.adapter.name for each in self.changes)
                    raise CheckpointError(
                        f"{self.name} with the adapter {names} holds values that are not finite: train it again, or "
                        "take a smaller scale."
                    )
                yield found
                first += len(base)


def with_adapters(stored: Mapping[str, Source], adapters: Sequence[Adapter]) -> dict[str, Source]:
    """A checkpoint's tensors with the changes of adapters.

    A head that is tied to the embeddings becomes a tensor of its own if one of the two changes, as in PEFT.

    Raises:
        CheckpointError: an adapter changes what the model doesn't have, or has tensors of another shape.
    """
    found = untied(stored, adapters)
    changes: dict[str, list[Change]] = defaultdict(list)
    for adapter in adapters:
        for name, change in changes_of(adapter, found):
            if change.whole is not None and (other := _whole_of(changes[name])) is not None:
                what = f"{name} is a whole tensor in it and in {other.name}; only one can take the model's place."
                raise adapter.error(what, "Use one of the two.")
            changes[name].append(change)
    # Several tensors have parts of the same two changes of an adapter where each expert has tensors of its own.
    read = functools.lru_cache(maxsize=2 * len(adapters))(Factors.read)
    for name, several in changes.items():
        base = found[name]
        found[name] = AdaptedSource(base.name, base.shape, base.stored, base, tuple(several), read)
    return found


def untied(stored: Mapping[str, Source], adapters: Sequence[Adapter]) -> dict[str, Source]:
    """The tensors, with a head of its own where an adapter unties it."""
    found = dict(stored)
    if LM_HEAD not in found and EMBEDDING in found and any(map(_unties, adapters)):
        found[LM_HEAD] = replace(found[EMBEDDING], name=LM_HEAD)
    return found


def _unties(adapter: Adapter) -> bool:
    names = {f"{module}.weight" for module in adapter.low_rank} | adapter.whole.keys()
    return not adapter.keeps_ties and bool(names & {EMBEDDING, LM_HEAD})


def _whole_of(changes: Sequence[Change]) -> Adapter | None:
    return next((each.adapter for each in changes if each.whole is not None), None)


def changes_of(adapter: Adapter, stored: Mapping[str, Source]) -> Iterator[tuple[str, Change]]:
    """An adapter's changes by tensor, each checked. Raises CheckpointError."""
    for name, whole in adapter.whole.items():
        if name == LM_HEAD and name not in stored and adapter.keeps_ties:
            continue  # the embeddings' change is its own
        source = stored.get(name)
        if source is None:
            raise adapter.foreign(f"{whole.name} takes the place of {name}, which this model doesn't have.")
        if whole.shape != source.shape:
            raise adapter.foreign(f"{whole.name} is {list(whole.shape)}, where {list(source.shape)} is expected.")
        yield name, Change(adapter, whole=whole)
    for module, several in adapter.low_rank.items():
        name = f"{module}.weight"
        if name == LM_HEAD and name not in stored and adapter.keeps_ties:
            continue
        for low_rank in several:
            if name in stored:
                _check(adapter, low_rank, stored[name].shape)
                yield name, Change(adapter, low_rank, stack=stored[name].shape)
            else:
                yield from _of_experts(adapter, module, low_rank, stored)


def _check(adapter: Adapter, change: LowRank, shape: Sequence[int]) -> None:
    wanted = _shapes(shape, change)
    for part, expected in zip((change.down, change.up, change.magnitude), wanted, strict=True):
        if part is not None and (*part.shape[:1], prod(part.shape[1:])) != expected:
            raise adapter.foreign(f"{part.name} is {list(part.shape)}, where {list(expected)} is expected.")


def _of_experts(
    adapter: Adapter, module: str, change: LowRank, stored: Mapping[str, Source]
) -> Iterator[tuple[str, Change]]:
    """A change of all experts. PEFT's names don't say of which of their two matrices; the shapes do."""
    stacks: dict[tuple[int, ...], list[str]] = {}
    for parts in _STACKED:
        fused = f"{module}.{'_'.join(parts)}_proj"
        if fused in stored:
            stacks[stored[fused].shape] = [fused]
        elif f"{module}.0.{parts[0]}_proj.weight" in stored:
            count = next(
                index for index in itertools.count() if f"{module}.{index}.{parts[0]}_proj.weight" not in stored
            )
            names = [f"{module}.{index}.{part}_proj.weight" for index in range(count) for part in parts]
            if not all(name in stored for name in names):
                continue
            rows, width = stored[names[0]].shape
            stacks[len(names) // len(parts), len(parts) * rows, width] = names
    found = change.down.shape, change.up.shape
    for shape, names in stacks.items():
        if found == _shapes(shape, change)[:2]:
            first = 0
            for name in names:
                yield name, Change(adapter, change, stack=shape, first=first)
                first += prod(stored[name].shape[:-1])
            return
    if stacks:
        fits = " or ".join(str([list(each) for each in _shapes(shape, change)[:2]]) for shape in stacks)
        what = f"{change.down.name} and its lora_B are {[list(each) for each in found]}, where {fits} is expected."
        raise adapter.foreign(what)
    raise adapter.foreign(f"{change.down.name} changes {module}.weight, which this model doesn't have.")


def _shapes(shape: Sequence[int], change: LowRank) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """The shapes of a change's down, up and magnitude, with all but their first dimension as one."""
    if _is_stack(shape):
        num_experts, out_features, in_features = shape
        rank = num_experts * change.rank
    else:
        out_features, in_features, rank = shape[0], prod(shape[1:]), change.rank
    # A convolution's magnitude has its rows in the second dimension.
    magnitude = change.magnitude.shape if change.magnitude is not None else ()
    lengths = (1, out_features) if len(magnitude) > 1 else (out_features, 1)
    if change.is_embedding:
        return (in_features, rank), (rank, out_features), lengths
    return (rank, in_features), (out_features, rank), lengths


def _is_stack(shape: Sequence[int]) -> bool:
    """Whether a tensor holds experts' matrices; a causal convolution has three dimensions, too."""
    return len(shape) == 3 and shape[1] != 1
