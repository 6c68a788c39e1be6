"""The torch version of one recurrent step."""

from __future__ import annotations

import torch

from qwen35mm_kernels.dispatch import implements
from qwen35mm_kernels.gated_delta_rule.naive import L2_EPS


@implements("recurrent_gated_delta_step", "torch")
def recurrent_gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Reads the old state once for k and q together: S'^T q = exp(g) S^T q + (k . q) delta."""
    group = v.shape[1] // k.shape[1]
    keys_queries = torch.stack([k, q], dim=2).float()
    keys_queries *= torch.rsqrt(keys_queries.square().sum(dim=-1, keepdim=True) + L2_EPS)
    keys_queries[:, :, 1] *= k.shape[2] ** -0.5
    overlap = (keys_queries[:, :, 0] * keys_queries[:, :, 1]).sum(dim=-1, keepdim=True)
    if group > 1:
        keys_queries = keys_queries.repeat_interleave(group, dim=1)
        overlap = overlap.repeat_interleave(group, dim=1)
    decay = g.exp()[..., None, None]
    read = (keys_queries @ state).mul_(decay)
    delta = (v.float() - read[:, :, 0]).mul_(beta.float()[..., None])
    state.mul_(decay).addcmul_(keys_queries[:, :, 0, :, None], delta[:, :, None])
    return read[:, :, 1].addcmul_(overlap, delta).to(v.dtype)
