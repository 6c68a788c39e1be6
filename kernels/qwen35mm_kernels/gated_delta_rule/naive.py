"""The specification of the gated delta rule: one token after the other, all in float32."""

from __future__ import annotations

import torch

L2_EPS = 1e-6


def naive_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as `chunk_gated_delta_rule`: o [T, Hv, V] in v's dtype, final state [Hv, K, V] float32."""
    state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float32)
    if initial_state is not None:
        state = initial_state.clone()
    out = [
        naive_gated_delta_step(q[t, None], k[t, None], v[t, None], g[t, None], beta[t, None], state[None])[0]
        for t in range(q.shape[0])
    ]
    return torch.stack(out), state


def naive_gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Shapes as `recurrent_gated_delta_step`: o [B, Hv, V] in v's dtype; state [B, Hv, K, V] is updated in place."""
    group = v.shape[1] // k.shape[1]
    q32 = _normalise(q).repeat_interleave(group, dim=1) * k.shape[2] ** -0.5
    k32 = _normalise(k).repeat_interleave(group, dim=1)
    state *= g.exp()[..., None, None]
    predicted = torch.einsum("bhkv,bhk->bhv", state, k32)
    delta = (v.float() - predicted) * beta.float()[..., None]
    state += torch.einsum("bhk,bhv->bhkv", k32, delta)
    return torch.einsum("bhkv,bhk->bhv", state, q32).to(v.dtype)


def naive_gdn_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as `gdn_gates`: g and beta, [T, Hv] float32."""
    step = torch.log1p(torch.exp(a.double() + dt_bias.double()))
    return (-A_log.double().exp() * step).float(), (1 / (1 + torch.exp(-b.double()))).float()


def _normalise(x: torch.Tensor) -> torch.Tensor:
    x32 = x.float()
    return x32 / torch.sqrt((x32 * x32).sum(dim=-1, keepdim=True) + L2_EPS)
