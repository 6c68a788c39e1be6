"""Sampling in one pass over the vocabulary."""

from __future__ import annotations

import ctypes
import functools

import torch

from qwen35mm_kernels.cpu import sampling as by_torch
from qwen35mm_kernels.cpu.native.library import Library, loaded_library
from qwen35mm_kernels.cpu.native.strided import dense_rows, is_known
from qwen35mm_kernels.reference.sampling import COLUMNS, SamplingRows

_TABLES = ("logits", "in_text", "in_reply", "banned")
_C_TYPES = {torch.float32: "float", torch.int32: "int32_t", torch.int64: "int64_t"}
# The columns that sampling.cpp must have been compiled with.
_EXPECTED = "".join(f"{_C_TYPES[column.dtype]} {name}\n" for name, column in COLUMNS.items())


class _Sampling(ctypes.Structure):
    """The struct of sampling.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _TABLES),
        *((f"{name}_stride", ctypes.c_long) for name in _TABLES),
        ("vocab", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in (*COLUMNS, "out")),
    )


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    seen_in_text: torch.Tensor,
    counts_in_reply: torch.Tensor,
    banned: torch.Tensor,
) -> torch.Tensor:
    if not is_known(logits) or seen_in_text.stride(1) != 1 or counts_in_reply.stride(1) != 1:
        return by_torch.sample(logits, rows, seen_in_text, counts_in_reply, banned)
    logits, banned = dense_rows(logits), dense_rows(banned)
    out = torch.empty(len(logits), dtype=torch.int64)
    tables = logits, seen_in_text, counts_in_reply, banned
    sampling = _Sampling(
        *(table.data_ptr() for table in tables),
        *(table.stride(0) if table.dim() == 2 else 0 for table in tables),
        logits.shape[1],
        *(getattr(rows, name).data_ptr() for name in COLUMNS),
        out.data_ptr(),
    )
    library = loaded_library()
    _check_columns(library)
    is_bf16 = logits.dtype == torch.bfloat16
    counts = len(logits), is_bf16, torch.get_num_threads()
    library("qwen_sample", ctypes.byref(sampling), seen_in_text, counts_in_reply, *counts)
    return out


@functools.cache
def _check_columns(library: Library) -> None:
    """Raises RuntimeError if the library's columns differ from those of `SamplingRows`."""
    if not library("qwen_sample_reads", _EXPECTED.encode()):
        raise RuntimeError(
            f"{library.name}.so reads other columns of SamplingRows than sampling.cpp should have: "
            f"{', '.join(COLUMNS)}. Change COLUMNS in sampling.cpp, and build it again: "
            "QWEN35MM_INSTRUCTION_SETS=all pip install -e ."
        )
