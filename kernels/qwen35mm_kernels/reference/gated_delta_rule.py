"""The gated delta rule (arXiv:2412.06464): each head updates a state S [K, V].

For each token, with q and k L2-normalised and q scaled by K ** -0.5:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

A Gated DeltaNet layer runs it over a sequence (`gated_delta_prefill`), or for one token of each sequence of a batch
(`gdn_decode_step`). The decode step includes convolution and gated norm, since its time is that of reading and writing
the states.
"""

from __future__ import annotations

import torch

from qwen35mm_kernels.reference.conv1d import causal_conv1d_step
from qwen35mm_kernels.reference.norm import gated_rms_norm

L2_EPS = 1e-6


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
    """Runs the rule over one sequence's piece and updates its state in place.

    Calls that split a sequence at multiples of 64 tokens do the same arithmetic as one call.

    Args:
        q, k: [T, Hk, K], float32 or bfloat16, before the L2 norm and the scale.
        v: [T, Hv, V] of q's dtype; Hv is a multiple of Hk, and key head h serves the value heads from h * (Hv / Hk) on.
        a, b: [T, Hv], float32 or bfloat16, the projections of the gates, see `gdn_gates`.
        A_log, dt_bias: [Hv], float32 or bfloat16.
        states: [num_slots, Hv, K, V] float32.
        slots: [1] int64, the sequence's place in `states`, replaced with the state after the piece.
        counts: [1] int64, tokens of the piece.

    Returns:
        [T, Hv, V] in v's dtype; 0 for padding.
    """
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    out, state = torch.zeros_like(v), states[int(slots)][None]
    for t in (slice(t, t + 1) for t in range(int(counts))):
        out[t] = gated_delta_step(q[t], k[t], v[t], g[t], beta[t], state)
    return out


def gdn_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay g = -exp(A_log) softplus(a + dt_bias) and write strength beta = sigmoid(b).

    Both are [T, Hv] float32, from a and b [T, Hv] and the parameters [Hv].
    """
    step = torch.log1p(torch.exp(a.double() + dt_bias.double()))
    return (-A_log.double().exp() * step).float(), (1 / (1 + torch.exp(-b.double()))).float()


def gated_delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The rule for one token of each of B sequences, their states [B, Hv, K, V] updated in place: [B, Hv, V]."""
    group = v.shape[1] // k.shape[1]
    q32 = _normalise(q).repeat_interleave(group, dim=1) * k.shape[2] ** -0.5
    k32 = _normalise(k).repeat_interleave(group, dim=1)
    state *= g.exp()[..., None, None]
    predicted = torch.einsum("bhkv,bhk->bhv", state, k32)
    delta = (v.float() - predicted) * beta.float()[..., None]
    state += torch.einsum("bhk,bhv->bhkv", k32, delta)
    return torch.einsum("bhkv,bhk->bhv", state, q32).to(v.dtype)


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
    """B rows, one token or several of each sequence: causal conv and SiLU, gates, gated delta rule, gated norm.

    Args:
        mixed: [B, C + Hv * V + 2 * Hv], float32 or bfloat16, with C = 2 * Hk * K + Hv * V: in_proj's output with the
            columns q | k | v (C in total), z, b, a. The arithmetic is float32 throughout.
        conv_weight: [C, W], W at least 2; the last tap meets the current token.
        A_log, dt_bias: [Hv] float32.
        norm_weight: [V], plain, not zero-centred.
        eps: of the gated norm.
        conv_states: [num_slots, C, W - 1], oldest input first; place slots[b] gets the shifted inputs.
        recurrent_states: [num_slots, Hv, K, V] float32; place slots[b] gets the state after row b.
        slots: [B] int32 or int64, each row's place in both pools, none twice. -1 marks a padding row of a CUDA graph's
            fixed batch: it touches no state, and its output is zero.
        sources: [B] of slots' dtype, the place of the states that each row continues from; None for its own. Either its
            own place, or that of the row before it: then this row is the same sequence's next token.
        num_k_heads: Hk, a divisor of Hv.

    Returns:
        [B, Hv * V] in mixed's dtype.
    """
    num_v_heads, key_dim, value_dim = recurrent_states.shape[1:]
    out = mixed.new_zeros(mixed.shape[0], num_v_heads * value_dim)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        if sources is not None:
            conv_states[slot], recurrent_states[slot] = conv_states[sources[row]], recurrent_states[sources[row]]
        qkv, z, b, a = split_projection(mixed[row : row + 1].float(), conv_weight.shape[0], num_v_heads)
        qkv = causal_conv1d_step(qkv, conv_weight, conv_states[slot : slot + 1])
        q, k, v = split_heads(qkv, num_k_heads, key_dim, value_dim)
        g, beta = gdn_gates(a, b, A_log, dt_bias)
        o = gated_delta_step(q, k, v, g, beta, recurrent_states[slot : slot + 1])
        out[row] = gated_rms_norm(o, z.view_as(o), norm_weight, eps).flatten()
    return out


def split_projection(mixed: torch.Tensor, channels: int, num_v_heads: int) -> tuple[torch.Tensor, ...]:
    """Splits in_proj's output into q | k | v together, z, b and a, as views."""
    return mixed.split((channels, mixed.shape[1] - channels - 2 * num_v_heads, num_v_heads, num_v_heads), dim=1)


def split_heads(
    qkv: torch.Tensor, num_k_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, C] -> q, k [N, Hk, K] and v [N, Hv, V], as views."""
    keys = num_k_heads * key_dim
    q, k, v = qkv.split((keys, keys, qkv.shape[1] - 2 * keys), dim=1)
    return q.unflatten(1, (-1, key_dim)), k.unflatten(1, (-1, key_dim)), v.unflatten(1, (-1, value_dim))


def _normalise(x: torch.Tensor) -> torch.Tensor:
    x32 = x.float()
    return x32 / torch.sqrt((x32 * x32).sum(dim=-1, keepdim=True) + L2_EPS)
