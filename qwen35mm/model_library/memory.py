"""Whether a model fits into the memory there is, beside another one or after it, found out before it is loaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache.kv_pool import DEFAULT_BLOCK_SIZE
from qwen35mm.cache.planner import CacheSettings, MemoryPlan, host_memory_bytes, plan_memory
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ConfigError
from qwen35mm.model.devices import gib
from qwen35mm.model.weights import loaded_bytes
from qwen35mm.model_library.options import BackendOptions
from qwen35mm_preprocess.say import say

# For what a step computes with, and for the rest of the machine.
RESERVE_BYTES = 512 << 20

Available = Callable[[torch.device], int]


class NoRoomError(ConfigError):
    """A model doesn't fit into the memory that can be had."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model takes on its device: weights, KV and running states.

    Attributes:
        settings: what the engine has to be started with to take no more than that.
    """

    weights_bytes: int
    cache: MemoryPlan
    settings: CacheSettings

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
    integers: str | None = None,
) -> MemoryNeed:
    """What a model will take, with the planner's own arithmetic.

    On a host whose memory doesn't hold what the planner would give to kept prompts, those get what is left, and
    running ones at least one context.

    Args:
        name: what to call it in a message.
        weights_bytes: see `qwen35mm.model.weights.weights_bytes`; 0 of a model that is loaded.
        devices: what it may lie on, all together; how it is split among several is found out when it is loaded.
        memory_bytes: what it may take of their memory.
        integers: what its weights are kept as, for a message.

    Raises:
        NoRoomError: it doesn't fit, with the numbers and what would help.
        ConfigError: a setting can't be used.
    """
    settings = options.settings
    context_length = settings.context_length_of(config.text, name)
    weights = say("{integers} weights", integers=integers) if integers else say("weights")
    if weights_bytes > memory_bytes:
        raise NoRoomError(
            say(
                "{name} doesn't fit: its {weights} take {size}, and {memory} of memory can be had on {devices}. Take a "
                "smaller model, or close other programs.",
                name=name,
                weights=weights,
                size=gib(weights_bytes),
                memory=gib(memory_bytes),
                devices=_names(devices),
            )
        )
    # The engine plans by all memory of a host, and by what the weights leave free on a GPU.
    on_cpu = all(device.type == "cpu" for device in devices)
    left = None if on_cpu else memory_bytes - weights_bytes

    def planned(cache: CacheSettings) -> MemoryNeed:
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
        return MemoryNeed(weights_bytes, plan, cache)

    need = planned(options.cache)
    if on_cpu and options.cache.kv_bytes is None and need.total_bytes > memory_bytes:
        one_context = -(-context_length // DEFAULT_BLOCK_SIZE) * DEFAULT_BLOCK_SIZE * need.cache.kv_token_bytes
        left_bytes = memory_bytes - weights_bytes - need.cache.slot_bytes
        need = planned(replace(options.cache, kv_bytes=max(one_context, left_bytes)))
    plan = need.cache
    if need.total_bytes > memory_bytes:
        raise NoRoomError(
            say(
                "{name} doesn't fit: {weights} take {size}, KV for {n} tokens {kv} and running states {states}, "
                "together {total}, and {memory} of memory can be had on {devices}. Take a smaller model or a shorter "
                "context, or close other programs.",
                name=name,
                weights=weights,
                size=gib(weights_bytes),
                n=plan.num_kv_tokens,
                kv=gib(plan.kv_bytes),
                states=gib(plan.slot_bytes),
                total=gib(need.total_bytes),
                memory=gib(memory_bytes),
                devices=_names(devices),
            )
        )
    return need


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
    weights_bytes = loaded_bytes(backend.loaded.model)
    plan = backend.engine.plan
    planned_bytes = weights_bytes + plan.kv_bytes + plan.slot_bytes
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
