"""Chooses, once per device type, which implementation of each operation runs, and says why in the log.

An implementation joins with `@implements(op, backend)`; every operation has one for "torch", which runs anywhere.
A choice depends on the device type and what is installed, never on timing or load: arithmetic must not change between
two runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


# What the kernels are written for; older ones lack parts of the language, newer ones nobody has tried.
_TRITON_VERSIONS = ((3, 5), (4, 0))
_MIN_CAPABILITY = (8, 0)


def _why_not_triton(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"Triton's kernels run on cuda devices, not on {device_type}"
    if torch.version.hip is not None:
        return "Triton's kernels are written for NVIDIA's cards, and this PyTorch is built for AMD's"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "Triton isn't installed: `pip install triton`"
    low, high = _TRITON_VERSIONS
    if not low <= tuple(int(part) for part in version.split(".")[:2]) < high:
        return f"Triton {version} is installed, and the kernels need {low[0]}.{low[1]} or newer, before {high[0]}.0"
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < _MIN_CAPABILITY:
            name = torch.cuda.get_device_name(index)
            return f"{name} has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    return None


# Fastest first. Each tells why it can't run on a device type, or None if it can.
_BACKENDS: Mapping[str, Callable[[str], str | None]] = MappingProxyType(
    {"triton": _why_not_triton, "torch": lambda device_type: None}
)
# Imported where the backend can run: importing Triton takes a second that a CPU has no use for.
_MODULES: Mapping[str, str] = MappingProxyType({"triton": "qwen35mm_kernels.gpu.all"})
_implementations: dict[str, dict[str, Callable[..., Any]]] = {}


@dataclass(frozen=True)
class Choice:
    """The implementation of one operation on one device type."""

    backend: str
    reason: str
    function: Callable[..., Any]


def implements(op: str, backend: str) -> Callable[[Function], Function]:
    """Decorator that enters a function as `backend`'s implementation of `op`."""

    def enter(function: Function) -> Function:
        backends = _implementations.setdefault(op, {})
        assert backend in _BACKENDS, f"unknown backend {backend} of {op}"
        assert backend not in backends, f"two implementations of {op} for {backend}"
        backends[backend] = function
        return function

    return enter


@functools.cache
def choices(device_type: str) -> Mapping[str, Choice]:
    """The choice for every operation on a device type ("cpu", "cuda", ...), made and logged on the first call."""
    for backend, module in _MODULES.items():
        if _BACKENDS[backend](device_type) is None:
            importlib.import_module(module)
    chosen = {op: _choose(device_type, backends) for op, backends in sorted(_implementations.items())}
    for backend, reason in dict.fromkeys((choice.backend, choice.reason) for choice in chosen.values()):
        ops = [op for op, choice in chosen.items() if (choice.backend, choice.reason) == (backend, reason)]
        logger.info("On %s, %s runs %s (%s).", device_type, backend, ", ".join(ops), reason)
    return MappingProxyType(chosen)


def _choose(device_type: str, backends: Mapping[str, Callable[..., Any]]) -> Choice:
    registered = [backend for backend in _BACKENDS if backend in backends]
    refusals = []
    for backend in registered:
        why_not = _BACKENDS[backend](device_type)
        if why_not is None:
            first = f"the fastest of {', '.join(registered)}" if len(registered) > 1 else "the only implementation"
            return Choice(backend, "; ".join(refusals) or first, backends[backend])
        refusals.append(why_not)
    raise AssertionError(f"no torch implementation is registered, only {registered}")


def implementation(op: str, device: torch.device) -> Callable[..., Any]:
    """The chosen function for `op` on `device`."""
    return choices(device.type)[op].function


def describe(device: torch.device | str) -> dict[str, str]:
    """Operation -> backend on a device, sorted by name: what a cache's fingerprint must know of the arithmetic."""
    return {op: choice.backend for op, choice in choices(torch.device(device).type).items()}
