"""Tensors that the compiled part takes where they lie."""

from __future__ import annotations

import ctypes
import functools

import torch

from qwen35mm_kernels.cpu.native.library import Library, find_library
from qwen35mm_kernels.kv_formats import FORMATS, PLAIN, KVFormat


class Strided(ctypes.Structure):
    """[N, H, D] with a dense last dimension, or [N, H]: strided.h's struct."""

    _fields_ = [("data", ctypes.c_void_p), ("row", ctypes.c_long), ("head", ctypes.c_long)]


def strided(x: torch.Tensor) -> Strided:
    """The memory of a tensor, which has to live as long as it is used."""
    return Strided(x.data_ptr(), x.stride(0), x.stride(1))


class KVRows(ctypes.Structure):
    """Rows of the cache in a format, with strides in bytes: kv_rows.h's struct."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_long) for name in ("row", "head", "format"))]


def kv_rows(x: torch.Tensor, format: KVFormat | None = None) -> KVRows:
    """The memory of keys or values [N, Hkv, row], which has to live as long as it is used; plain ones by their type."""
    if (library := find_library()) is not None:
        _check_formats(library)
    size = x.element_size()
    return KVRows(x.data_ptr(), x.stride(0) * size, x.stride(1) * size, (format or PLAIN[x.dtype]).number)


@functools.cache
def _check_formats(library: Library) -> None:
    """Raises a RuntimeError where the library knows other formats: it would read an unknown one as int4."""
    if not library("qwen_kv_formats", "".join(f"{name}\n" for name in FORMATS).encode()):
        raise RuntimeError(
            f"{library.name}.so knows other formats of keys and values than kv_formats.py: {', '.join(FORMATS)}. "
            "Change KV_FORMATS in kv_rows.h, with a KVRow for each, and build it again: pip install -e ."
        )


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor, with its last dimension dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def is_known(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether all tensors have one of the compiled types, the same one."""
    return x.dtype in (torch.float32, torch.bfloat16) and all(other.dtype == x.dtype for other in others)
