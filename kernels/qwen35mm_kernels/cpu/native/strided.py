"""Passes strided tensors to the compiled library without copies."""

from __future__ import annotations

import ctypes
import functools

import torch

from qwen35mm_kernels.cpu.native.library import Library, find_library
from qwen35mm_kernels.kv_formats import FORMATS, PLAIN, KVFormat


class Strided(ctypes.Structure):
    """[N, H, D] with a dense last dimension, or [N, H]: the struct of strided.h."""

    _fields_ = [("data", ctypes.c_void_p), ("row", ctypes.c_long), ("head", ctypes.c_long)]


def strided(x: torch.Tensor) -> Strided:
    """The memory of a tensor. The caller keeps the tensor alive."""
    return Strided(x.data_ptr(), x.stride(0), x.stride(1))


class KVRows(ctypes.Structure):
    """Rows of the cache in a format, with strides in bytes: the struct of kv_rows.h."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_long) for name in ("row", "head", "format"))]


def kv_rows(x: torch.Tensor, format: KVFormat | None = None) -> KVRows:
    """The memory of keys or values [N, Hkv, row]. The caller keeps x alive. None means plain numbers of x's type."""
    if (library := find_library()) is not None:
        _check_formats(library)
    size = x.element_size()
    return KVRows(x.data_ptr(), x.stride(0) * size, x.stride(1) * size, (format or PLAIN[x.dtype]).number)


@functools.cache
def _check_formats(library: Library) -> None:
    """Raises RuntimeError if the library's formats differ. It would read an unknown format as int4."""
    if not library("qwen_kv_rows", "".join(f"{name}\n" for name in FORMATS).encode()):
        raise RuntimeError(
            f"{library.name}.so knows other formats of keys and values than kv_formats.py: {', '.join(FORMATS)}. "
            "Change KV_FORMATS in kv_rows.h, with a KVRow for each, and build it again: "
            "QWEN35MM_INSTRUCTION_SETS=all pip install -e ."
        )


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its last dimension isn't dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def is_known(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether all tensors have the same compiled type."""
    return x.dtype in (torch.float32, torch.bfloat16) and all(other.dtype == x.dtype for other in others)
