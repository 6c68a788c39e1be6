"""Whether a model fits into memory, beside the running one or in its place; known before it is loaded."""

from __future__ import annotations

import functools
import importlib.util
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import psutil
import torch

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache.kv_files import mapped_bytes
from qwen35mm.cache.kv_pool import DEFAULT_BLOCK_SIZE
from qwen35mm.cache.planner import MIN_CACHED_STATES, CacheSettings, MemoryPlan, host_memory_bytes
from qwen35mm.config import ModelConfig
from qwen35mm.engine.memory import plan_engine
from qwen35mm.errors import ConfigError
from qwen35mm.model import DeviceRequest
from qwen35mm.model.devices import gib
from qwen35mm.model.weights import loaded_bytes
from qwen35mm.model_library.options import BackendOptions
from qwen35mm_preprocess.say import said_of, say

# For the rest of the machine.
RESERVE_BYTES = 512 << 20
# Bytes of a tokenizer per id, and of llguidance's table. Measured with 152,000 and 248,000 ids: see docs/models.md.
_TOKEN_BYTES, _GRAMMAR_TOKEN_BYTES = 480, 460

T = TypeVar("T")
Available = Callable[[torch.device], int]


class NoRoomError(ConfigError):
    """A model doesn't fit into the available memory."""


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a model takes.

    Attributes:
        plan: its whole plan.
        settings: the cache settings that keep the engine within the plan.
        has_host: whether the model's device is the host, so that the whole plan lies in one memory.
    """

    plan: MemoryPlan
    settings: CacheSettings
    has_host: bool

    @property
    def total_bytes(self) -> int:
        """On the model's device; what is kept can shrink, and counts only where its size was fixed."""
        return self.plan.total_bytes if self.has_host else self.plan.device_bytes

    @property
    def least_bytes(self) -> int:
        """`total_bytes` without what is kept: one context's keys and values, and no states but the running ones."""
        plan = self.plan
        kept = max(plan.kv_memory_bytes - plan.context_rows * plan.kv_token_bytes, 0) + plan.device_state_bytes
        return self.total_bytes - kept - (plan.state_bytes + plan.vision_bytes if self.has_host else 0)


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
    runtime_bytes: int = 0,
) -> MemoryNeed:
    """The memory that a model will take, by the planner's own arithmetic.

    If the host's memory doesn't hold the planner's budget for kept prompts, these get what is left, and running ones at
    least one context.

    Args:
        name: the model's name for messages.
        weights_bytes: see `qwen35mm.model.weights.weights_bytes`; 0 for a loaded model.
        devices: the devices that it may use, all together; loading decides how it is split among several.
        memory_bytes: the memory that it may use on them.
        integers: its weights' format, for a message.

    Raises:
        NoRoomError: it doesn't fit, with the numbers and what would help.
        ConfigError: a setting can't be used.
    """
    on_cpu = all(device.type == "cpu" for device in devices)
    left = memory_bytes - weights_bytes
    weights = say("{integers} weights", integers=integers) if integers else say("weights")
    if left < 0:
        raise NoRoomError(
            say(
                "{name} doesn't fit: its {weights} take {size}, and {memory} of memory is available on "
                "{devices}. Choose a smaller model, or close other programs.",
                name=name,
                weights=weights,
                size=gib(weights_bytes),
                memory=gib(memory_bytes),
                devices=_names(devices),
            )
        )
    cache = options.cache
    planned = functools.partial(
        plan_model,
        config,
        weights_bytes,
        options,
        name=name,
        dtype=dtype,
        device=devices[0],
        runtime_bytes=runtime_bytes,
        # The engine plans with all memory of a host, and with what the weights leave free on a GPU.
        available_bytes=host_memory_bytes() if on_cpu else left,
    )
    plan = planned(cache=cache)
    if on_cpu and plan.total_bytes > memory_bytes:
        # Running requests come first; kept ones get the rest.
        plan = planned(cache=running_alone(cache, plan))
        if plan.total_bytes <= memory_bytes:
            plan = planned(cache=cache, limit_bytes=memory_bytes)
            cache = replace(cache, kv_bytes=plan.kv_bytes, state_bytes=plan.state_bytes, vision_bytes=plan.vision_bytes)
    need = MemoryNeed(plan, cache, on_cpu)
    if need.total_bytes > memory_bytes:
        raise NoRoomError(
            say(
                "{name} doesn't fit: {weights} take {size}, the KV cache for {n} tokens {kv}, running states "
                "{states}, working memory {work} and the rest {rest}, {total} in total, and {memory} of "
                "memory is available on {devices}. Choose a smaller model or a shorter context, or close "
                "other programs.",
                name=name,
                weights=weights,
                size=gib(weights_bytes),
                n=plan.num_kv_tokens,
                kv=gib(plan.kv_memory_bytes),
                states=gib(plan.slot_bytes),
                work=gib(plan.work_bytes),
                rest=gib(plan.host_bytes if on_cpu else 0),
                total=gib(need.total_bytes),
                memory=gib(memory_bytes),
                devices=_names(devices),
            )
        )
    return need


def first_in_memory(options: BackendOptions, tried: Callable[[BackendOptions], T]) -> T:
    """The result of `tried` with keys and values in memory; if it is refused and a file is allowed, with a file.

    Raises:
        NoRoomError: neither fits.
        ConfigError: memory doesn't allow it, and no file is allowed.
    """
    on_cpu = all(device.type == "cpu" for device in DeviceRequest.parse(options.device).devices)
    if options.kv_directory is None or not on_cpu:
        return tried(options)
    try:
        return tried(replace(options, kv_directory=None))
    except ConfigError as refused:
        try:
            return tried(options.in_file())
        except ConfigError as error:
            raise NoRoomError(said_of(error)) from refused


def plan_model(
    config: ModelConfig,
    weights_bytes: int,
    options: BackendOptions,
    *,
    cache: CacheSettings,
    device: torch.device,
    **details: Any,
) -> MemoryPlan:
    """`plan_engine` for an engine with these options and budgets."""
    budget = options.media_budget(device)
    how = {"settings": options.settings, "cache": cache, "budget": budget, "weights_bytes": weights_bytes}
    return plan_engine(config, device=device, **how, **details)


def running_alone(cache: CacheSettings, plan: MemoryPlan) -> CacheSettings:
    """Budgets that keep nothing except what the user fixed: KV for one context, and no states."""
    one_context = -(-plan.context_rows // DEFAULT_BLOCK_SIZE) * DEFAULT_BLOCK_SIZE * plan.kv_token_bytes
    given = cache.kv_bytes if cache.kv_bytes is not None else one_context
    return replace(cache, kv_bytes=given, state_bytes=cache.state_bytes or 0, vision_bytes=cache.vision_bytes or 0)


def running_with_others(cache: CacheSettings, plan: MemoryPlan, one_state_bytes: int) -> CacheSettings:
    """`running_alone`, and states for the smallest useful cache: the least of one model among several."""
    alone = running_alone(cache, plan)
    return alone if cache.state_bytes is not None else replace(alone, state_bytes=MIN_CACHED_STATES * one_state_bytes)


def tokenizer_bytes(config: ModelConfig) -> int:
    """Approximate memory of a tokenizer, and of the table for constrained decoding if its extra is installed."""
    has_grammars = importlib.util.find_spec("llguidance") is not None
    return config.text.vocab_size * (_TOKEN_BYTES + (_GRAMMAR_TOKEN_BYTES if has_grammars else 0))


def available_within(options: BackendOptions) -> Available:
    """`available_bytes`, limited so that the program stays within `max_memory`."""
    if (most := options.max_memory) is None:
        return available_bytes
    return lambda device: max(min(available_bytes(device), most - resident_bytes()), 0)


def available_bytes(device: torch.device) -> int:
    """The device's available memory, less a reserve."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch keeps memory that this process has freed.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        # A container's limit may be below the machine's memory.
        free = min(psutil.virtual_memory().available, host_memory_bytes() - resident_bytes())
    return max(free - RESERVE_BYTES, 0)


def held_bytes(device: torch.device, planned_bytes: int) -> int:
    """The part of their plans that backends really hold on this device.

    A host allocates memory at its first write; on a GPU, everything that PyTorch has allocated is ours.
    """
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else min(planned_bytes, resident_bytes())


def measure_room(backends: Sequence[LocalBackend], devices: Sequence[torch.device], available: Available) -> int:
    """The bytes available on all devices together once these backends are closed."""
    plans = [(loaded_bytes(each.loaded.model), each.engine.plan) for each in backends]
    planned = sum(weights_bytes + plan.kv_memory_bytes + plan.slot_bytes for weights_bytes, plan in plans)
    held = sum(held_bytes(device, planned) for device in devices) if backends else 0
    return sum(map(available, devices)) + held


def longest_that_fits(shortest: int, longest: int, fits: Callable[[int], bool]) -> int | None:
    """The largest length that fits, in steps of a KV block from `shortest` on; None if not even `shortest` does."""
    if fits(longest):
        return longest
    lengths = range(shortest, longest, DEFAULT_BLOCK_SIZE)
    num_fitting = bisect_left(lengths, True, key=lambda length: not fits(length))
    return lengths[num_fitting - 1] if num_fitting else None


def largest_context(backend: LocalBackend, options: BackendOptions, limit: int | None, memory_bytes: int) -> int | None:
    """The largest context length above the backend's own that its model and the memory allow; None if there is none.

    Args:
        memory_bytes: for its weights and everything else.
    """
    loaded, model = backend.loaded, backend.loaded.model
    longest = loaded.config.text.max_position_embeddings
    longest = longest if limit is None else min(longest, limit)
    memory_bytes -= loaded_bytes(model)

    def fits(context_length: int) -> bool:
        wanted = options.with_context(context_length)
        sizes = {"dtype": model.dtype, "devices": model.devices, "memory_bytes": memory_bytes}
        try:
            memory_need(loaded.name, loaded.config, 0, wanted, **sizes)
        except ConfigError:
            return False
        return True

    if longest <= backend.context_length:
        return None
    found = longest_that_fits(backend.context_length, longest, fits)
    return found if found is not None and found > backend.context_length else None


def resident_bytes() -> int:
    """Resident memory of this process, without a file's pages of keys and values, which the system can reclaim."""
    return psutil.Process().memory_info().rss - mapped_bytes()


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(map(str, devices))
