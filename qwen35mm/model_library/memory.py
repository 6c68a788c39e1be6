"""Whether a model fits into the memory there is, beside another one or after it, found out before it is loaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil
import torch

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache.kv_pool import DEFAULT_BLOCK_SIZE
from qwen35mm.cache.planner import MemoryPlan, host_memory_bytes, plan_memory
from qwen35mm.checkpoints.safetensors_files import find_shards, read_headers
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ConfigError
from qwen35mm.model_library.options import BackendOptions

# For what a step computes with, and for the rest of the machine.
RESERVE_BYTES = 512 << 20

Available = Callable[[torch.device], int]


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model takes on its device: weights, KV and running states."""

    weights_bytes: int
    cache: MemoryPlan

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache.kv_bytes + self.cache.slot_bytes


def memory_need(
    name: str,
    config: ModelConfig,
    weights_bytes: int,
    options: BackendOptions,
    *,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    memory_bytes: int,
) -> MemoryNeed:
    """What a model will take, with the planner's own arithmetic.

    Args:
        name: what to call it in a message.
        weights_bytes: see `stored_weights_bytes`.
        devices: what it may lie on, all together; how it is split among several is found out when it is loaded.
        memory_bytes: what it may take of their memory.

    Raises:
        ConfigError: it doesn't fit, with the numbers and what would help; or a setting can't be used.
    """
    settings = options.settings
    context_length = settings.context_length_of(config.text.max_position_embeddings, name)
    if weights_bytes > memory_bytes:
        raise ConfigError(
            f"{name} doesn't fit: its weights take {_gib(weights_bytes)}, and {_gib(memory_bytes)} of memory can be "
            f"had on {_names(devices)}. Take a smaller model, or close other programs."
        )
    # The engine plans by all memory of a host, and by what the weights leave free on a GPU.
    on_cpu = all(device.type == "cpu" for device in devices)
    left = None if on_cpu else memory_bytes - weights_bytes
    plan = plan_memory(
        config,
        dtype=dtype,
        device=devices[0],
        num_slots=settings.slots,
        context_length=context_length,
        block_size=DEFAULT_BLOCK_SIZE,
        settings=options.cache,
        available_bytes=left,
    )
    need = MemoryNeed(weights_bytes, plan)
    if need.total_bytes > memory_bytes:
        raise ConfigError(
            f"{name} doesn't fit: weights take {_gib(weights_bytes)}, KV for {plan.num_kv_tokens:,} tokens "
            f"{_gib(plan.kv_bytes)} and running states {_gib(plan.slot_bytes)}, together {_gib(need.total_bytes)}, and "
            f"{_gib(memory_bytes)} of memory can be had on {_names(devices)}. Take a smaller model or a shorter "
            "context, or close other programs."
        )
    return need


def stored_weights_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of a checkpoint's tensors in memory, from its files' headers; a little more than is loaded.

    Raises:
        CheckpointError: the files are missing or damaged.
    """
    return sum(prod(tensor.shape) * dtype.itemsize for tensor in read_headers(find_shards(folder)).values())


def loaded_weights_bytes(model: torch.nn.Module) -> int:
    """Bytes of a loaded model's parameters and buffers."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def available_bytes(device: torch.device) -> int:
    """Memory of the device that could be had now, with a reserve left over."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What this process has let go of, PyTorch keeps for it.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        # A container's limit may leave less than the machine has.
        free = min(psutil.virtual_memory().available, host_memory_bytes() - _resident_bytes())
    return max(free - RESERVE_BYTES, 0)


def held_bytes(device: torch.device, planned_bytes: int) -> int:
    """How much a backend on this device really holds of what its plan allows.

    A host gives memory when it is first written to; of a GPU, everything that PyTorch has allocated is ours.
    """
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else min(planned_bytes, _resident_bytes())


@dataclass(frozen=True)
class Room:
    """Bytes of the devices together.

    Attributes:
        beside_bytes: what a successor may take while the backend still runs.
        after_bytes: what it may take once the backend is closed.
    """

    beside_bytes: int
    after_bytes: int


def measure_room(
    backend: LocalBackend | None, devices: Sequence[torch.device], available: Available, *, keep_weights: bool = False
) -> Room:
    """What there is beside and after a backend.

    Args:
        backend: the one that runs, if one does.
        devices: what the successor may lie on.
        available: tells what is free on one of them.
        keep_weights: whether its model goes on, with another engine.
    """
    free = sum(map(available, devices))
    if backend is None:
        return Room(free, free)
    weights_bytes = loaded_weights_bytes(backend.loaded.model)
    planned_bytes = MemoryNeed(weights_bytes, backend.engine.plan).total_bytes
    held = sum(held_bytes(device, planned_bytes) for device in devices)
    return Room(free, free + max(held - (weights_bytes if keep_weights else 0), 0))


def largest_context(
    backend: LocalBackend, options: BackendOptions, limit: int | None, available: Available
) -> int | None:
    """The largest context length above the backend's own that its model and the memory allow; None where none is."""
    loaded, model = backend.loaded, backend.loaded.model
    longest = loaded.config.text.max_position_embeddings
    longest = longest if limit is None else min(longest, limit)
    room = measure_room(backend, model.devices, available, keep_weights=True)

    def fits(context_length: int) -> bool:
        wanted = options.with_context(context_length)
        sizes = {"dtype": model.dtype, "devices": model.devices, "memory_bytes": room.after_bytes}
        try:
            memory_need(loaded.name, loaded.config, 0, wanted, **sizes)
        except ConfigError:
            return False
        return True

    if longest <= backend.context_length:
        return None
    if fits(longest):
        return longest
    lengths = range(backend.context_length, longest, DEFAULT_BLOCK_SIZE)
    num_fitting = bisect_left(lengths, True, key=lambda length: not fits(length))
    return lengths[num_fitting - 1] if num_fitting > 1 else None


def _resident_bytes() -> int:
    """Of this process."""
    return psutil.Process().memory_info().rss


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(map(str, devices))


def _gib(num_bytes: int) -> str:
    """Bytes as a person reads them: GiB from one on, MiB below."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
