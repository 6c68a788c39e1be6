"""Puts adapters beside a loaded model's linear maps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from qwen35mm.checkpoints.adapters import Change, Factors, changes_of, untied
from qwen35mm.checkpoints.peft_folders import Adapter, LowRank
from qwen35mm.checkpoints.sources import Source
from qwen35mm.checkpoints.tensor_names import Target
from qwen35mm.errors import CheckpointError
from qwen35mm.model.adapters import LinearAdapter, LinearAdapters, Part, joined
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.layers import Linear
from qwen35mm.model.mlp import SparseMoE
from qwen35mm.model.weight_formats import Factory
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_kernels.cpu.native.products import PackedMatrix

Changes = Mapping[str, Sequence[Change]]


def attach(
    model: Qwen35Model,
    targets: Iterable[Target],
    stored: Mapping[str, Source],
    unmerged: Changes,
    named: Iterable[Adapter],
) -> None:
    """Gives a model's linear maps their adapters.

    Args:
        targets, stored: of the checkpoint.
        unmerged: changes by tensor that every request gets, because the weights couldn't take them up.
        named: adapters that a request may choose; they are numbered from 1 on.

    Raises:
        CheckpointError: an adapter doesn't fit, or changes what only a merge can change.
    """
    places = {target.name: target for target in targets}
    if unmerged:
        _take(model, places, 0, unmerged)
    for number, adapter in enumerate(named, start=1):
        changes: dict[str, list[Change]] = defaultdict(list)
        for name, change in (*_flat(unmerged), *changes_of(adapter, untied(stored, [adapter]))):
            changes[name].append(change)
        _take(model, places, number, changes)


def beside_bytes(change: LowRank, dtype: torch.dtype, *, on_cpu: bool) -> int:
    """Bytes of a change's two products beside a linear map. Packed ones are padded, which doubles small ranks."""
    found = 0 if change.magnitude is None else torch.float32.itemsize * math.prod(change.magnitude.shape)
    for stored in (change.down, change.up):
        rows, width = stored.shape[0], math.prod(stored.shape[1:])
        if on_cpu and find_library() is not None:
            found += PackedMatrix.shapes(str(dtype).removeprefix("torch."), rows, width)[0]
        else:
            found += rows * width * dtype.itemsize
    return found


def _flat(changes: Changes) -> Iterable[tuple[str, Change]]:
    return ((name, change) for name, several in changes.items() for change in several)


def _take(model: Qwen35Model, places: Mapping[str, Target], number: int, changes: Changes) -> None:
    by_linear: dict[str, list[Part]] = defaultdict(list)
    for name, several in changes.items():
        target = places.get(name)
        linear = None if target is None else _linear(model, target.parameter)
        whole = next((change for change in several if change.low_rank is None), None)
        if target is None or linear is None or whole is not None:
            raise _only_merged((whole or several[0]).adapter, name, is_whole=whole is not None)
        numbers = []
        for change in several:
            assert change.low_rank is not None
            factors = Factors.read(change.low_rank, change.stack)
            numbers.append((factors.up[0], factors.down[0], factors.magnitude, change.adapter.scale))
        module = target.parameter.removesuffix(".weight")
        by_linear[module].append(joined(target.offset // linear.weight.in_features, numbers, linear.weight))
    for module, parts in by_linear.items():
        linear = _linear(model, f"{module}.weight")
        assert linear is not None
        if linear.adapters is None:
            linear.adapters = LinearAdapters(model.routes)
        weight = linear.weight
        factory = Factory(weight.dtype, weight.device)
        linear.adapters.take(number, LinearAdapter(parts, weight.out_features, factory))
    model.routes.numbers.add(number)


def _linear(model: Qwen35Model, parameter: str) -> Linear | None:
    """The linear map whose weight this is; None for other parameters, and where another product takes it up."""
    path = parameter.removesuffix(".weight")
    try:
        found = model.get_submodule(path)
    except AttributeError:
        return None
    block, mark, _ = path.partition(".shared_expert.")
    if mark and isinstance(moe := model.get_submodule(block), SparseMoE) and moe.is_joined:
        return None
    return found if isinstance(found, Linear) and path != "lm_head" else None


def _only_merged(adapter: Adapter, name: str, *, is_whole: bool) -> CheckpointError:
    what = f"{name} is a whole tensor in it" if is_whole else f"it changes {name}, which is no linear layer's"
    advice = (
        "Name its folder alone (--lora FOLDER), without a NAME= in front, on a checkpoint of floats: then it is merged "
        "into the weights."
    )
    return adapter.error(f"{what}; beside other requests an adapter can only change linear layers.", advice)
