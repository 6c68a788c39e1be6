"""How much memory a backend's successor may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache.pools import DEFAULT_BLOCK_SIZE
from qwen35mm.errors import ConfigError
from qwen35mm.model_library.memory import (
    MemoryNeed,
    device_bytes,
    held_bytes,
    loaded_weights_bytes,
    memory_need,
)
from qwen35mm.model_library.options import BackendOptions

Available = Callable[[torch.device], int | None]


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
    model = backend.loaded.model
    return memory_need(
        backend.loaded.name,
        backend.loaded.config,
        loaded_weights_bytes(model) if weights_bytes is None else weights_bytes,
        dtype=model.dtype,
        devices=model.devices,
        settings=options.with_context(context_length).settings,
        cache=options.cache,
        memory_bytes=memory_bytes,
    )
