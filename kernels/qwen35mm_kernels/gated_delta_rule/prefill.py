"""A Gated DeltaNet layer's gates and delta rule over a sequence, as one operation."""

from __future__ import annotations

import torch

from qwen35mm_kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from qwen35mm_kernels.dispatch import implementation, implements
from qwen35mm_kernels.gated_delta_rule.chunked import chunk_gated_delta_rule
from qwen35mm_kernels.gated_delta_rule.gates import gdn_gates
from qwen35mm_kernels.gated_delta_rule.naive import naive_gated_delta_rule, naive_gdn_gates

CHUNK_SIZE = 64


def gated_delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """`gdn_gates`, then `chunk_gated_delta_rule` in chunks of 64 tokens, from a state that is moved on in place.

    Args:
        q, k: [T, Hk, K], float32 or bfloat16, raw: L2 norm and scale happen here.
        v: [T, Hv, V] of q's dtype; Hv is a multiple of Hk, and key head h serves the value heads from h * (Hv / Hk) on.
        a, b: [T, Hv], float32 or bfloat16, the projections of the gates.
        A_log, dt_bias: [Hv].
        state: [Hv, K, V] float32, before the sequence and, afterwards, behind it.

    Returns:
        [T, Hv, V] in v's dtype.

    Raises:
        ValueError, TypeError: no token, or a shape or dtype that doesn't fit.
    """
    check_shape("q", q, (None, None, None), "[T, Hk, K]")
    check_shape("k", k, q.shape, "the shape of q")
    check_shape("v", v, (q.shape[0], None, None), "[T, Hv, V]")
    for name, tensor in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b)):
        check_dtype(name, tensor, FLOAT_DTYPES)
    for name, tensor in (("a", a), ("b", b)):
        check_shape(name, tensor, v.shape[:2], "[T, Hv]")
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_shape(name, tensor, v.shape[1:2], "[Hv]")
    check_dtype("state", state, (torch.float32,))
    check_shape("state", state, (v.shape[1], k.shape[2], v.shape[2]), "[Hv, K, V]")
    if q.shape[0] == 0:
        raise ValueError("q must hold at least one token, got T = 0; skip the call when there is nothing to prefill.")
    if q.shape[1] == 0 or v.shape[1] % q.shape[1]:
        raise ValueError(f"value heads must be a multiple of key heads, got Hv = {v.shape[1]} and Hk = {q.shape[1]}.")
    return implementation("gated_delta_prefill", q.device)(q, k, v, a, b, A_log, dt_bias, state)


def naive_gated_delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The specification of `gated_delta_prefill`."""
    out, final_state = naive_gated_delta_rule(q, k, v, *naive_gdn_gates(a, b, A_log, dt_bias), state)
    state.copy_(final_state)
    return out


@implements("gated_delta_prefill", "torch")
def _gated_delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    out, final_state = chunk_gated_delta_rule(q, k, v, *gdn_gates(a, b, A_log, dt_bias), state, CHUNK_SIZE)
    state.copy_(final_state)
    return out
