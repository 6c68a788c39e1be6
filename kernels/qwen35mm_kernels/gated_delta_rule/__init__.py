"""The gated delta rule (arXiv:2412.06464): per head, a state S [K, V] that decays, forgets and learns.

For each token, with q and k L2-normalised and q scaled by K ** -0.5:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

Here are the public functions; `naive` is their specification, `chunked` and `recurrent` are the torch versions.
"""

from __future__ import annotations

import torch

from qwen35mm_kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from qwen35mm_kernels.dispatch import implementation
from qwen35mm_kernels.gated_delta_rule import chunked, gates, recurrent

__all__ = ["chunk_gated_delta_rule", "gdn_gates", "recurrent_gated_delta_step"]

_IMPLEMENTATIONS = (chunked, gates, recurrent)  # importing them enters them in dispatch


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one sequence through the rule, `chunk_size` tokens at a time.

    Calls that cut a sequence at multiples of chunk_size do the same arithmetic as one call.

    Args:
        q, k: [T, Hk, K], float32 or bfloat16, raw: L2 norm and scale happen here.
        v: [T, Hv, V]; Hv is a multiple of Hk, and key head h serves the value heads from h * (Hv / Hk) on.
        g: [T, Hv] float32, log decay, at most 0.
        beta: [T, Hv], how much of a value is written, 0 to 1.
        initial_state: [Hv, K, V] float32; None: zeros. It is not written to.
        chunk_size: tokens to a chunk.

    Returns:
        o: [T, Hv, V] in v's dtype.
        final_state: [Hv, K, V] float32, a new tensor.

    Raises:
        ValueError, TypeError: no token, or a shape or dtype that doesn't fit.
    """
    _check_inputs(q, k, v, g, beta, "T")
    if q.shape[0] == 0:
        raise ValueError("q must hold at least one token, got T = 0; skip the call when there is nothing to prefill.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; 64 is the usual one.")
    if initial_state is not None:
        check_dtype("initial_state", initial_state, (torch.float32,))
        check_shape("initial_state", initial_state, (v.shape[1], k.shape[2], v.shape[2]), "[Hv, K, V]")
    return implementation("chunk_gated_delta_rule", q.device)(q, k, v, g, beta, initial_state, chunk_size)


def recurrent_gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token for each of B sequences.

    Args:
        q, k: [B, Hk, K], float32 or bfloat16, raw: L2 norm and scale happen here.
        v: [B, Hv, V]; Hv is a multiple of Hk.
        g: [B, Hv] float32, log decay, at most 0.
        beta: [B, Hv].
        state: [B, Hv, K, V] float32, of any strides, updated in place.

    Returns:
        [B, Hv, V] in v's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    _check_inputs(q, k, v, g, beta, "B")
    check_dtype("state", state, (torch.float32,))
    check_shape("state", state, (*v.shape[:2], k.shape[2], v.shape[2]), "[B, Hv, K, V]")
    return implementation("recurrent_gated_delta_step", q.device)(q, k, v, g, beta, state)


def gdn_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gates of the rule from their projections: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).

    Args:
        a, b: [T, Hv], float32 or bfloat16. The arithmetic is float32.
        A_log, dt_bias: [Hv].

    Returns:
        g: [T, Hv] float32, log decay.
        beta: [T, Hv] float32.

    Raises:
        ValueError: a shape that doesn't fit.
    """
    check_shape("a", a, (None, None), "[T, Hv]")
    check_shape("b", b, a.shape, "the shape of a")
    check_shape("A_log", A_log, a.shape[1:], "[Hv]")
    check_shape("dt_bias", dt_bias, a.shape[1:], "[Hv]")
    return implementation("gdn_gates", a.device)(a, b, A_log, dt_bias)


def _check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, rows: str
) -> None:
    check_shape("q", q, (None, None, None), f"[{rows}, Hk, K]")
    check_shape("k", k, q.shape, "the shape of q")
    check_shape("v", v, (q.shape[0], None, None), f"[{rows}, Hv, V]")
    check_shape("g", g, v.shape[:2], f"[{rows}, Hv]")
    check_shape("beta", beta, v.shape[:2], f"[{rows}, Hv]")
    check_dtype("g", g, (torch.float32,))
    for name, tensor in (("q", q), ("k", k), ("v", v), ("beta", beta)):
        check_dtype(name, tensor, FLOAT_DTYPES)
    if q.shape[1] == 0 or v.shape[1] % q.shape[1]:
        raise ValueError(f"value heads must be a multiple of key heads, got Hv = {v.shape[1]} and Hk = {q.shape[1]}.")
