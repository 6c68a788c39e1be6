"""Chooses the module whose operations run on a device, and logs why.

The choice depends only on the device type and the installed packages, so that arithmetic can't change between runs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging

import torch

from qwen35mm_kernels import cpu
from qwen35mm_kernels.cpu import native
from qwen35mm_kernels.cpu.native.library import find_library

logger = logging.getLogger(__name__)

# Supported versions: older ones lack language features, newer ones are untested.
_TRITON_VERSIONS = ((3, 5), (4, 0))
_MIN_CAPABILITY = (8, 0)
# Ada and newer; see `gpu/fp8.py`.
_FP8_CAPABILITY = (8, 9)


# No return annotation: a module type can't be written, and the inferred type shows the functions to editors and type
# checkers.
def select_backend(device: torch.device | str):
    """`gpu` if Triton's kernels run on the device; on a CPU `cpu.native` if there is a compiled library; else `cpu`."""
    return _backend(torch.device(device).type)


@functools.cache
def _backend(device_type: str):
    why_not = why_not_triton(device_type)
    if device_type == "cpu" and (library := find_library()) is not None:
        logger.info("On %s the operations run compiled for %s, else in torch.", device_type, library.name)
        return native
    if why_not is not None:
        logger.info("On %s the operations run in torch: %s.", device_type, why_not)
        return cpu
    # Imported here: importing Triton takes a second, wasted on a CPU.
    from qwen35mm_kernels import gpu

    logger.info("On %s the operations run as Triton's kernels, vision attention in torch.", device_type)
    return gpu


def runs_triton(device: torch.device) -> bool:
    """Whether a device is a card that runs Triton's kernels.

    These never wait for the device, so a step can be captured, and launched before the previous one has run. Torch's
    operations read lengths, slots and counts on the host.
    """
    return device.type == "cuda" and why_not_triton(device.type) is None


def multiplies_fp8(device: torch.device) -> bool:
    """Whether `fp8_linear` has a kernel for the device. Elsewhere torch computes it, only for tests."""
    return runs_triton(device) and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def multiplies_integers(device: torch.device) -> bool:
    """Whether `integer_linear` has a kernel for the device."""
    return runs_triton(device)


def why_not_triton(device_type: str) -> str | None:
    """Why `gpu` can't run on a device type, or None if it can."""
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
