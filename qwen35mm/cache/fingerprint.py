"""The root of all addresses: a fingerprint of everything that decides the arithmetic.

Two runs with the same root compute the same bits from the same tokens, so that one may use what the other left on
disk. Where a thing can't be known to be without influence, it counts: a changed root costs time, a wrong one answers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import qwen35mm_kernels
import qwen35mm_preprocess
from qwen35mm.cpu import cpu_capabilities
from qwen35mm_kernels import select_backend
from qwen35mm_kernels.cpu.native.library import find_library

_FINGERPRINT = b"qwen35mm fingerprint 1\n"
_PACKAGE = Path(__file__).parents[1]
# Its parts that decide which numbers are computed from a prompt, and beside which others.
_COMPUTING = ("cache", "checkpoints", "config", "engine", "model", "prompt")
# The tables of kernels' configurations are JSON.
_SOURCES = (".py", ".cpp", ".h", ".json")
# What multiplies matrices on a card, where it has come by pip; conda and the system have other names for it.
_MATRIX_WHEELS = tuple(f"nvidia-{name}{cuda}" for name in ("cublas", "cudnn") for cuda in ("", "-cu12", "-cu13"))
# How users steer the libraries below torch.
_ENVIRONMENT = ("MKL_", "ONEDNN_", "DNNL_", "ATEN_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_", "OMP_DYNAMIC")


def fingerprint(parts: Mapping[str, Any]) -> bytes:
    """32 bytes over JSON values; the order of keys doesn't count.

    Raises:
        TypeError, ValueError: a value has no JSON form (NaN and the infinities have none).
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(_FINGERPRINT + text.encode()).digest()


def arithmetic(layer_devices: Sequence[torch.device], dtype: torch.dtype) -> dict[str, Any]:
    """What decides the bits of a computation besides weights and prompt, as JSON values for `fingerprint`.

    It is a state of this moment: threads or precision set later are other arithmetic. Which of several equal cards a
    layer lies on makes no difference.

    Args:
        layer_devices: a device for each decoder layer.
    """
    found = {device: _device(device) for device in layer_devices}
    kinds = [kind for index, kind in enumerate(found.values()) if kind not in list(found.values())[:index]]
    return {
        "torch": torch.__version__,
        "torch_build": hashlib.sha256(torch.__config__.show().encode()).hexdigest(),
        "triton": _version("triton"),
        "sources": sources_digest(),
        "dtype": str(dtype),
        "num_threads": torch.get_num_threads(),
        "cpu": {**cpu_capabilities(), "capability": torch.backends.cpu.get_cpu_capability()},
        "libraries": {
            "mkl": torch.backends.mkl.is_available(),
            "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,  # pyright: ignore[reportAttributeAccessIssue]
        },
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ENVIRONMENT)},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "devices": kinds,
        "layers": [kinds.index(found[device]) for device in layer_devices] if len(kinds) > 1 else 0,
    }


def sources_digest() -> str:
    """Hex SHA-256 of the source files that compute: a changed kernel is another kernel, whatever its version says."""
    folders = [_PACKAGE / name for name in _COMPUTING]
    folders += [Path(module.__path__[0]) for module in (qwen35mm_kernels, qwen35mm_preprocess)]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(device: torch.device) -> dict[str, Any]:
    described = {"type": device.type, "kernels": select_backend(device).__name__}
    if device.type == "cpu" and (library := find_library()) is not None:
        return described | {"library": library.name, "library_digest": library.digest}
    if device.type != "cuda":
        return described
    properties = torch.cuda.get_device_properties(device)
    matmul = torch.backends.cuda.matmul
    return described | {
        "name": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "num_multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        # Wheels that may be newer than those that torch was built with.
        "wheels": {name: _version(name) for name in _MATRIX_WHEELS},
        "tf32": [matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "reduced_precision": [
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        ],
    }
