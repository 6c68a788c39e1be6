"""A Gated DeltaNet layer's decode step in one call that reads and writes each state once."""

from __future__ import annotations

import ctypes

import torch

from qwen35mm_kernels.cpu import gated_delta_rule as by_torch
from qwen35mm_kernels.cpu.native.library import loaded_library
from qwen35mm_kernels.cpu.native.strided import is_known

# Fills whole vectors of every instruction set.
_DIM_MULTIPLE = 16


class _Step(ctypes.Structure):
    """The struct of gdn_step.cpp."""

    _fields_ = (
        ("mixed", ctypes.c_void_p),
        ("mixed_stride", ctypes.c_long),
        ("conv_weight", ctypes.c_void_p),
        ("A_log", ctypes.c_void_p),
        ("dt_bias", ctypes.c_void_p),
        ("norm_weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("conv_states", ctypes.c_void_p),
        ("conv_stride", ctypes.c_long),
        ("states", ctypes.c_void_p),
        ("state_stride", ctypes.c_long),
        ("num_k_heads", ctypes.c_long),
        ("num_v_heads", ctypes.c_long),
        ("key_dim", ctypes.c_long),
        ("value_dim", ctypes.c_long),
        ("taps", ctypes.c_long),
        ("out", ctypes.c_void_p),
    )


def gdn_decode_step(
    mixed: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    conv_states: torch.Tensor,
    recurrent_states: torch.Tensor,
    slots: torch.Tensor,
    sources: torch.Tensor | None = None,
    *,
    num_k_heads: int,
) -> torch.Tensor:
    _, num_v_heads, key_dim, value_dim = recurrent_states.shape
    if not (
        is_known(mixed, conv_weight, norm_weight, conv_states)
        and mixed.stride(1) == 1
        and conv_weight.is_contiguous()
        and conv_states.stride()[1:] == (conv_states.shape[2], 1)
        and recurrent_states.stride()[1:] == (key_dim * value_dim, value_dim, 1)
        and key_dim % _DIM_MULTIPLE == value_dim % _DIM_MULTIPLE == 0
    ):
        parameters = mixed, conv_weight, A_log, dt_bias, norm_weight, eps
        places = conv_states, recurrent_states, slots, sources
        return by_torch.gdn_decode_step(*parameters, *places, num_k_heads=num_k_heads)
    out = torch.empty(len(mixed), num_v_heads * value_dim, dtype=mixed.dtype)
    slots = _int64(slots)
    sources = None if sources is None else _int64(sources)
    step = _Step(
        mixed.data_ptr(),
        mixed.stride(0),
        conv_weight.data_ptr(),
        A_log.data_ptr(),
        dt_bias.data_ptr(),
        norm_weight.data_ptr(),
        eps,
        conv_states.data_ptr(),
        conv_states.stride(0),
        recurrent_states.data_ptr(),
        recurrent_states.stride(0),
        num_k_heads,
        num_v_heads,
        key_dim,
        value_dim,
        conv_weight.shape[1],
        out.data_ptr(),
    )
    is_bf16 = mixed.dtype == torch.bfloat16
    threads = torch.get_num_threads()
    loaded_library()("qwen_gdn_rows", ctypes.byref(step), slots, sources, len(mixed), is_bf16, threads)
    return out


def _int64(slots: torch.Tensor) -> torch.Tensor:
    return slots.to(torch.int64) if slots.dtype != torch.int64 else slots.contiguous()
