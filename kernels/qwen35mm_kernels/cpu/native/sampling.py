"""Sampling in one pass over the vocabulary."""

from __future__ import annotations

import ctypes

import torch

from qwen35mm_kernels.cpu import sampling as by_torch
from qwen35mm_kernels.cpu.native.library import loaded_library
from qwen35mm_kernels.cpu.native.strided import dense_rows, is_known
from qwen35mm_kernels.reference.sampling import SamplingRows

_TABLES = ("logits", "in_text", "in_reply", "banned")
_PARAMETERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
_WHOLE = ("top_k", "seeds", "steps", "slots")


class _Sampling(ctypes.Structure):
    """As in sampling.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _TABLES),
        *((f"{name}_stride", ctypes.c_long) for name in _TABLES),
        ("vocab", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in (*_PARAMETERS, *_WHOLE, "out", "frequency_penalty")),
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
    values = [getattr(rows, name) for name in (*_PARAMETERS, *_WHOLE)]
    sampling = _Sampling(
        *(table.data_ptr() for table in tables),
        *(table.stride(0) if table.dim() == 2 else 0 for table in tables),
        logits.shape[1],
        *(value.data_ptr() for value in values),
        out.data_ptr(),
        rows.frequency_penalty.data_ptr(),
    )
    is_bf16 = logits.dtype == torch.bfloat16
    counts = len(logits), is_bf16, torch.get_num_threads()
    loaded_library()("qwen_sample", ctypes.byref(sampling), seen_in_text, counts_in_reply, *counts)
    return out
