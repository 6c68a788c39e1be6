"""The gated delta rule in chunks, as matrix products instead of a loop over tokens; and a decode step.

In a chunk of C tokens, let c_i be the sum of the log decays up to token i, and S the state before the chunk. The tokens
write D [C, V], their values minus the predictions from the state and earlier tokens. D solves a triangular system (the
WY or UT form of arXiv:2406.06484, with the decays of arXiv:2412.06464):

    (I + M) D = beta (V - exp(c) K S),   M_ij = beta_i exp(c_i - c_j) k_i.k_j   for i > j
    O = exp(c) Q S + A D,                A_ij = exp(c_i - c_j) q_i.k_j          for i >= j
    S <- exp(c_C) S + K^T (exp(c_C - c) D)

M, A and (I + M)^-1 need no state and are computed for several chunks at once; the scan over chunks does the rest. The
inverse comes from a triangular solve. The doubling (I - M)(I + M^2)(I + M^4)... is many times slower here. If keys
resemble each other (a repeated token, a blank wall), its powers also grow until the result has no correct digit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from qwen35mm_kernels.cpu.conv1d import causal_conv1d_step
from qwen35mm_kernels.cpu.norm import gated_rms_norm
from qwen35mm_kernels.reference.gated_delta_rule import L2_EPS, split_heads, split_projection

CHUNK_SIZE = 64

# More at once means fewer operations, which helps small models. At 16 heads of 128, 1 to 16 take the same time.
_CHUNKS_AT_ONCE = 8
# A shorter last chunk is padded to a multiple of this many tokens.
_RAGGED_MULTIPLE = 16


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
    g, beta = gdn_gates(a, b, A_log, dt_bias)
    group = v.shape[1] // k.shape[1]
    # Value heads that share key heads run one after the other: running[j] holds heads j, j + group, ...
    running = [state[member::group].clone() for member in range(group)]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    out[num_tokens:] = 0
    start = 0
    while start < num_tokens:
        num_chunks = min(_CHUNKS_AT_ONCE, (num_tokens - start) // CHUNK_SIZE)
        stop = start + num_chunks * CHUNK_SIZE if num_chunks else num_tokens
        rows = slice(start, stop)
        size = CHUNK_SIZE if num_chunks else -(-(stop - start) // _RAGGED_MULTIPLE) * _RAGGED_MULTIPLE
        _run_chunks(q[rows], k[rows], v[rows], g[rows], beta[rows], running, out[rows], size)
        start = stop
    for member, final_state in enumerate(running):
        state[member::group] = final_state
    return out


def gdn_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.gated_delta_rule.gdn_gates`."""
    return F.softplus(a.float() + dt_bias.float()) * -A_log.float().exp(), b.float().sigmoid()


def _run_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: list[torch.Tensor],
    out: torch.Tensor,
    size: int,
) -> None:
    """Writes `out` and updates `states` for whole chunks of `size` tokens, or for a single shorter one."""
    group, scale = len(states), k.shape[2] ** -0.5
    keys_queries = torch.cat([_to_chunks(k, size), _to_chunks(q, size)], dim=2)  # [chunks, Hk, 2C, K]
    norms = torch.linalg.vector_norm(keys_queries, dim=-1, keepdim=True)
    keys_queries *= norms.square_().add_(L2_EPS).rsqrt_()
    keys = keys_queries[:, :, :size]
    products = (keys_queries @ keys.transpose(-1, -2)).unflatten(2, (2, size)).tril_()  # k.k and q.k
    products[:, :, 1] *= scale
    identity = torch.eye(size, device=k.device)
    log_decay = _to_chunks(g[..., None], size).cumsum(dim=2)  # [chunks, Hv, C, 1]
    rates = _to_chunks(beta[..., None], size)
    for member, state in enumerate(states):
        heads = slice(member, None, group)
        c, rate = log_decay[:, heads], rates[:, heads]
        # Mask future tokens before exp, since their exponents may overflow.
        decay = (c - c.transpose(-1, -2)).tril_().exp_()
        system, attention = (products * decay[:, :, None]).unbind(2)
        inverse = torch.linalg.solve_triangular(
            system * rate, identity.expand_as(system), upper=False, unitriangular=True
        ).mul_(rate.transpose(-1, -2))
        values = _to_chunks(v[:, heads], size)
        into, out_of = c.exp(), (c[:, :, -1:] - c).exp_()
        for i in range(len(values)):
            read = keys_queries[i] @ state  # [Hk, 2C, V]
            written = inverse[i] @ values[i].addcmul_(read[:, :size], into[i], value=-1)
            attended = (attention[i] @ written).addcmul_(read[:, size:], into[i], value=scale)
            tokens = out[i * size : (i + 1) * size, heads]
            tokens.copy_(attended.transpose(0, 1)[: len(tokens)])
            state.mul_(into[i, :, -1:]).baddbmm_(keys[i].transpose(-1, -2), written.mul_(out_of[i]))


def _to_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[T, H, D] -> [chunks, H, size, D] float32, a new tensor, padded with zeros, which change nothing."""
    if len(x) % size:
        x = F.pad(x, (0, 0, 0, 0, 0, -len(x) % size))
    chunks = x.unflatten(0, (-1, size)).transpose(1, 2)
    return chunks.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


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
    num_v_heads, key_dim, value_dim = recurrent_states.shape[1:]
    out = mixed.new_zeros(mixed.shape[0], num_v_heads * value_dim)
    places = slots.tolist()
    sources_of = places if sources is None else sources.tolist()
    # Where slots follow each other their states are one view of the pool, and none is copied.
    for rows, run in _slot_runs(places, sources_of):
        if sources_of[rows.start] != run.start:
            for states in (conv_states, recurrent_states):
                states[run.start] = states[sources_of[rows.start]]
        qkv, z, b, a = split_projection(mixed[rows].float(), conv_weight.shape[0], num_v_heads)
        qkv = causal_conv1d_step(qkv, conv_weight, conv_states[run])
        q, k, v = split_heads(qkv, num_k_heads, key_dim, value_dim)
        o = gated_delta_step(q, k, v, *gdn_gates(a, b, A_log, dt_bias), recurrent_states[run])
        out[rows] = gated_rms_norm(o, z.reshape(o.shape), norm_weight, eps).flatten(1)
    return out


def _slot_runs(slots: list[int], sources: list[int]) -> Iterator[tuple[slice, slice]]:
    """Yields (rows of the batch, rows of the pools) for each run of consecutive slots, without padding.

    A row that continues from another slot is a run of its own.
    """
    start = 0
    for row in range(1, len(slots) + 1):
        is_apart = row == len(slots) or slots[row] != sources[row] or slots[row - 1] != sources[row - 1]
        if is_apart or slots[row] != slots[row - 1] + 1 or slots[row - 1] < 0:
            if slots[start] >= 0:
                yield slice(start, row), slice(slots[start], slots[start] + row - start)
            start = row


def gated_delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """See `reference.gated_delta_rule.gated_delta_step`.

    Reads the old state once for both k and q: S'^T q = exp(g) S^T q + (k . q) delta.
    """
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
