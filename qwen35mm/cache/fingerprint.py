"""The root of all addresses: a fingerprint of all that decides the arithmetic.

Two runs with the same root compute the same bits from the same tokens, so one can use the other's entries on disk. When
in doubt a thing counts: a needlessly changed root costs time, a wrongly equal one gives wrong answers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
# Its folders that decide which numbers are computed from a prompt, and in which batches.
_COMPUTING = ("cache", "checkpoints", "config", "engine", "model", "prompt")
# Tables of kernel configurations are JSON.
_SOURCES = (".py", ".cpp", ".h", ".json")
# The pip packages that multiply matrices on a GPU; conda and the system name them differently.
_MATRIX_WHEELS = tuple(f"nvidia-{name}{cuda}" for name in ("cublas", "cudnn") for cuda in ("", "-cu12", "-cu13"))
# Environment variables of the libraries below torch, and those by which torch chooses among them: for cards its cuBLAS
# library, workspace and kernels found by timing (TunableOp), for processors the sizes from which oneDNN multiplies.
_ENVIRONMENT = (
    *("MKL_", "ONEDNN_", "DNNL_", "ATEN_", "OMP_DYNAMIC", "TORCH_MKLDNN_", "TORCH_LINEAR_"),
    *("CUBLAS_", "CUBLASLT_", "CUDNN_", "NVIDIA_TF32_", "TORCH_BLAS_", "TORCH_CUBLASLT_", "TORCH_CUDNN_"),
    *("TORCH_ALLOW_TF32_", "DISABLE_ADDMM_CUDA_LT", "PYTORCH_TUNABLEOP_"),
)
# Settings of torch's products on cards; older releases lack some.
_PRODUCTS = (
    "allow_tf32",
    "fp32_precision",
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction_split_k",
    "allow_bf16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction_split_k",
)


def fingerprint(parts: Mapping[str, Any]) -> bytes:
    """32 bytes, a SHA-256 of JSON values; the order of keys doesn't count.

    Raises:
        TypeError, ValueError: a value has no JSON form (NaN and the infinities have none).
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(_FINGERPRINT + text.encode()).digest()


def arithmetic(layer_devices: Sequence[torch.device], dtype: torch.dtype) -> dict[str, Any]:
    """What decides a computation's bits besides weights and prompt, as JSON values for `fingerprint`.

    It describes the current state: a later change of threads or precision changes the arithmetic. Which of several
    equal GPUs holds a layer makes no difference.

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
        "float32_matmul_precision": _read(torch.get_float32_matmul_precision),
        "fp32_precision": _fp32_precisions(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "devices": kinds,
        "layers": [kinds.index(found[device]) for device in layer_devices] if len(kinds) > 1 else 0,
    }


def sources_digest() -> str:
    """Hex SHA-256 of the source files that compute, so that any changed kernel counts, whatever its version."""
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
    cuda = torch.backends.cuda
    return described | {
        "name": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "num_multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        # Wheels may be newer than those that torch was built with.
        "wheels": {name: _version(name) for name in _MATRIX_WHEELS},
        "products": {name: _read(partial(getattr, cuda.matmul, name, None)) for name in _PRODUCTS},
        "blas": [str(cuda.preferred_blas_library()), *_workspaces()],
        "convolutions_in_tf32": _read(lambda: torch.backends.cudnn.allow_tf32),
        # Vision attention takes the first that can compute it.
        "attention": {
            "cudnn": cuda.cudnn_sdp_enabled(),
            "flash": cuda.flash_sdp_enabled(),
            "mem_efficient": cuda.mem_efficient_sdp_enabled(),
        },
    }


def _read(setting: Callable[[], Any]) -> Any:
    """A setting of torch; None where torch refuses an old name because a new one was used."""
    try:
        return setting()
    except RuntimeError:
        return None


def _fp32_precisions() -> dict[str, str | None]:
    """The settings that torch 2.9 has in place of the older ones, also of processors."""
    names = ("", "mkldnn.matmul.", "mkldnn.conv.", "cuda.matmul.", "cudnn.conv.")
    found: dict[str, str | None] = {}
    for name in names:
        holder: Any = torch.backends
        for part in name.split(".")[:-1]:
            holder = getattr(holder, part, None)
        found[name] = getattr(holder, "fp32_precision", None)
    return found


def _workspaces() -> list[int]:
    """Bytes of cuBLAS's and cuBLASLt's workspaces where this torch can set them besides by environment variables."""
    names = ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    return [getattr(torch._C, name)() for name in names if hasattr(torch._C, name)]
