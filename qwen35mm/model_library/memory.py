"""Whether a model fits into the memory there is, found out before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from qwen35mm.cache import CacheSettings, MemoryPlan, plan_memory
from qwen35mm.cache.host_memory import host_memory_bytes
from qwen35mm.cache.pools import DEFAULT_BLOCK_SIZE
from qwen35mm.checkpoints.safetensors_files import find_shards, read_headers
from qwen35mm.config import ModelConfig
from qwen35mm.engine import EngineSettings
from qwen35mm.engine.settings import DEFAULT_CONTEXT_LENGTH
from qwen35mm.errors import ConfigError

# For what a step computes with, and for the rest of the machine.
RESERVE_BYTES = 512 << 20
_MEMINFO = Path("/proc/meminfo")
_OWN_MEMORY = Path("/proc/self/status")


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
    *,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    settings: EngineSettings,
    cache: CacheSettings,
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
    limit = config.text.max_position_embeddings
    context_length = settings.context_length or min(limit, DEFAULT_CONTEXT_LENGTH)
    if context_length > limit:
        raise ConfigError(f"A context of {context_length:,} tokens was asked for; {name} has {limit:,}.")
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
        settings=cache,
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
