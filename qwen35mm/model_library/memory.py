"""Whether a model fits into the memory there is, beside another one or after it, found out before it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

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
_MEMINFO = Path("/proc/meminfo")
_OWN_MEMORY = Path("/proc/self/status")

Available = Callable[[torch.device], int | None]


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
    memory_bytes: int | None,
) -> MemoryNeed:
    """What a model will take, with the planner's own arithmetic.

    Args:
        name: what to call it in a message.
        weights_bytes: see `stored_weights_bytes`.
        devices: what it may lie on, all together; how it is split among several is found out when it is loaded.
        memory_bytes: what it may take of their memory; None where that isn't known.

    Raises:
        ConfigError: it doesn't fit, with the numbers and what would help; or a setting can't be used.
    """
    settings = options.settings
    context_length = settings.context_length_of(config.text.max_position_embeddings, name)
    if memory_bytes is not None and weights_bytes > memory_bytes:
        raise ConfigError(
            f"{name} doesn't fit: its weights take {gib(weights_bytes)}, and {gib(memory_bytes)} of memory can be had "
            f"on {_names(devices)}. Take a smaller model, or close other programs."
        )
    # The engine plans by all memory of a host, and by what the weights leave free on a GPU.
    on_cpu = all(device.type == "cpu" for device in devices)
    left = None if on_cpu or memory_bytes is None else memory_bytes - weights_bytes
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
    if memory_bytes is not None and need.total_bytes > memory_bytes:
        raise ConfigError(
            f"{name} doesn't fit: weights take {gib(weights_bytes)}, KV for {plan.num_kv_tokens:,} tokens "
            f"{gib(plan.kv_bytes)} and running states {gib(plan.slot_bytes)}, together {gib(need.total_bytes)}, and "
            f"{gib(memory_bytes)} of memory can be had on {_names(devices)}. Take a smaller model or a shorter "
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


def available_bytes(device: torch.device) -> int | None:
    """Memory of the device that could be had now, with a reserve left over; None where the system doesn't tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What this process has let go of, PyTorch keeps for it.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(free - RESERVE_BYTES, 0)
    free = _read_kib(_MEMINFO, "MemAvailable:")
    if free is None:
        return None
    limit, own = host_memory_bytes(), _read_kib(_OWN_MEMORY, "VmRSS:")
    if limit is not None and own is not None:
        free = min(free, limit - own)  # a container's limit
    return max(free - RESERVE_BYTES, 0)


def device_bytes(device: torch.device) -> int | None:
    """All memory of the device; None where the system doesn't tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory_bytes()


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(map(str, devices))


def gib(num_bytes: int) -> str:
    """Bytes as a person reads them: GiB from one on, MiB below."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def _read_kib(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    values = [line.split() for line in lines if line.startswith(name)]
    return int(values[0][1]) * 1024 if values and len(values[0]) > 1 and values[0][1].isdecimal() else None


def held_bytes(device: torch.device, planned_bytes: int) -> int:
    """How much a backend on this device really holds of what its plan allows.

    A host gives memory when it is first written to; of a GPU, everything that PyTorch has allocated is ours.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    resident = _read_kib(_OWN_MEMORY, "VmRSS:")
    return planned_bytes if resident is None else min(planned_bytes, resident)


@dataclass(frozen=True)
class Room:
    """Bytes of the devices together; None where the system doesn't tell.

    Attributes:
        beside_bytes: what a successor may take while the backend still runs.
        after_bytes: what it may take once the backend is closed.
    """

    beside_bytes: int | None
    after_bytes: int | None


def measure_room(
    backend: LocalBackend | None,
    options: BackendOptions,
    devices: Sequence[torch.device],
    available: Available,
    *,
    keep_weights: bool = False,
) -> Room:
    """What there is beside and after a backend.

    Args:
        backend: the one that runs, if one does.
        options: what it was made with.
        devices: what the successor may lie on.
        available: tells what is free on one of them.
        keep_weights: whether its model goes on, with another engine.
    """
    free = _sum(available(device) for device in devices)
    weights = 0 if backend is None else loaded_weights_bytes(backend.loaded.model)
    if free is None:
        total = _sum(device_bytes(device) for device in devices)
        return Room(None, total if total is None or not keep_weights else total - weights)
    if backend is None:
        return Room(free, free)
    planned = _need(backend, options, backend.context_length, None).total_bytes
    held = sum(held_bytes(device, planned) for device in devices)
    return Room(free, free + max(held - (weights if keep_weights else 0), 0))


def largest_context(
    backend: LocalBackend, options: BackendOptions, limit: int | None, available: Available
) -> int | None:
    """The largest context length above the backend's own that its model and the memory allow; None where none is."""
    longest = backend.loaded.config.text.max_position_embeddings
    longest = longest if limit is None else min(longest, limit)
    room = measure_room(backend, options, backend.loaded.model.devices, available, keep_weights=True).after_bytes

    def fits(context_length: int) -> bool:
        try:
            _need(backend, options, context_length, room, weights_bytes=0)
        except ConfigError:
            return False
        return True

    if longest <= backend.context_length:
        return None
    if fits(longest):
        return longest
    # In whole blocks, from the most that is known to fit.
    low, high = backend.context_length // DEFAULT_BLOCK_SIZE, -(-longest // DEFAULT_BLOCK_SIZE)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * DEFAULT_BLOCK_SIZE) else (low, middle)
    found = low * DEFAULT_BLOCK_SIZE
    return found if found > backend.context_length else None


def _sum(parts: Iterable[int | None]) -> int | None:
    """None where a part isn't known."""
    known = list(parts)
    return None if None in known else sum(part for part in known if part is not None)


def _need(
    backend: LocalBackend,
    options: BackendOptions,
    context_length: int,
    memory_bytes: int | None,
    *,
    weights_bytes: int | None = None,
) -> MemoryNeed:
    loaded, model = backend.loaded, backend.loaded.model
    return memory_need(
        loaded.name,
        loaded.config,
        loaded_weights_bytes(model) if weights_bytes is None else weights_bytes,
        options.with_context(context_length),
        dtype=model.dtype,
        devices=model.devices,
        memory_bytes=memory_bytes,
    )
