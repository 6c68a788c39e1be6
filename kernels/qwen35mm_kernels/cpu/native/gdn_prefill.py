"""The gated delta rule over a sequence. A chunk's data stays in the L2 cache."""

from __future__ import annotations

import ctypes

import torch

from qwen35mm_kernels.cpu import gated_delta_rule as by_torch
from qwen35mm_kernels.cpu.native.library import loaded_library
from qwen35mm_kernels.cpu.native.strided import Strided, dense_rows, is_known, strided


class _DeltaRule(ctypes.Structure):
    _fields_ = [
        *((name, Strided) for name in ("q", "k", "v", "a", "b")),
        *((name, ctypes.c_void_p) for name in ("A_log", "dt_bias", "state", "out")),
        *((name, ctypes.c_long) for name in ("num_tokens", "num_k_heads", "num_v_heads", "key_dim", "value_dim")),
    ]


def gated_delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    num_tokens, state = int(counts), states[int(slots)]
    if not is_known(q, k, v) or not state.is_contiguous():
        return by_torch.gated_delta_prefill(q, k, v, a, b, A_log, dt_bias, states, slots, counts)
    out = torch.empty(v.shape, dtype=v.dtype)
    out[num_tokens:] = 0
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    a, b, A_log, dt_bias = a.float(), b.float(), A_log.float(), dt_bias.float()
    pointers = (x.data_ptr() for x in (A_log, dt_bias, state, out))
    rule = _DeltaRule(*map(strided, (q, k, v, a, b)), *pointers, num_tokens, k.shape[1], *state.shape)
    is_bf16 = v.dtype == torch.bfloat16
    loaded_library()("qwen_gated_delta_prefill", ctypes.byref(rule), is_bf16, torch.get_num_threads())
    return out
