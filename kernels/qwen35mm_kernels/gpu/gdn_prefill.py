"""The gated delta rule over whole sequences, on a card: `gdn_prepare` for all chunks at once, then `gdn_scan`.

Sequences are packed one after the other; chunks of 64 tokens start at each sequence's start, so what a sequence gives
doesn't depend on what is beside it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from qwen35mm_kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from qwen35mm_kernels.dispatch import implements
from qwen35mm_kernels.gpu.gdn_prepare import CHUNK, Gates, prepare
from qwen35mm_kernels.gpu.gdn_scan import Segments, scan, scan_config
from qwen35mm_kernels.gpu.gdn_segments import segment_states
from qwen35mm_kernels.gpu.launch import num_multiprocessors

_DIMS = (16, 32, 64, 128)
# Segments cost 2.2 times the arithmetic: worth it from here on, where programs fill at most a quarter of the card.
_SEGMENTS_FROM_TOKENS = 8192
_SEGMENT_TOKENS = 2048


def gated_delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | None = None,
    final_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gdn_gates` and `chunk_gated_delta_rule` in one, for one sequence or for N packed ones.

    Args:
        q, k: [T, Hk, K], float32 or bfloat16, raw: L2 norm and scale happen here. K is 16, 32, 64 or 128.
        v: [T, Hv, V] of q's dtype; Hv is a multiple of Hk, and V one of the sizes that K may have.
        a, b: [T, Hv], float32 or bfloat16, the projections of the gates.
        A_log, dt_bias: [Hv], float32 or bfloat16.
        initial_state: [N, Hv, K, V] float32, or [Hv, K, V] without cu_seqlens; None: zeros. Of any strides, but
            contiguous in V, as q, k, v, a and b are in their last dimension.
        cu_seqlens: N + 1 bounds of the sequences on the host: from 0, rising, the last one is T. None: one sequence.
        final_state: where the final state goes, of the shape of initial_state. It may be initial_state itself, but must
            not overlap it otherwise.

    Returns:
        o: [T, Hv, V] in v's dtype.
        final_state: [N, Hv, K, V] or [Hv, K, V] float32, the one given or a new tensor.

    Raises:
        ValueError, TypeError: no token, or a shape, dtype or layout that doesn't fit.
    """
    for name, tensor in (("a", a), ("A_log", A_log), ("dt_bias", dt_bias)):
        check_dtype(name, tensor, FLOAT_DTYPES)
    check_shape("A_log", A_log, (v.shape[1],), "[Hv]")
    check_shape("dt_bias", dt_bias, (v.shape[1],), "[Hv]")
    gates = Gates(a, b, A_log.contiguous(), dt_bias.contiguous())
    return _prefill(q, k, v, gates, ("a", "b"), initial_state, cu_seqlens, final_state)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule with its gates given, for one sequence or for N packed ones.

    Args:
        q, k, v, initial_state, cu_seqlens: as in `gated_delta_prefill`.
        g: [T, Hv] float32, log decay, at most 0.
        beta: [T, Hv], float32 or bfloat16, how much of a value is written, 0 to 1.

    Returns:
        o: [T, Hv, V] in v's dtype.
        final_state: [N, Hv, K, V] or [Hv, K, V] float32, a new tensor.

    Raises:
        ValueError, TypeError: no token, or a shape, dtype or layout that doesn't fit.
    """
    check_dtype("g", g, (torch.float32,))
    return _prefill(q, k, v, Gates(g, beta, None, None), ("g", "beta"), initial_state, cu_seqlens, None)


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: Gates,
    gate_names: tuple[str, str],
    initial_state: torch.Tensor | None,
    cu_seqlens: Sequence[int] | None,
    final_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_inputs(q, k, v, gates, gate_names)
    num_tokens, num_v_heads, v_dim = v.shape
    bounds = (0, num_tokens) if cu_seqlens is None else tuple(cu_seqlens)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_tokens or any(map(int.__ge__, bounds, bounds[1:])):
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {num_tokens}, one bound more than there are sequences, and each must "
            f"have a token; got {list(bounds)}."
        )
    shape = num_v_heads, q.shape[2], v_dim
    shape = shape if cu_seqlens is None else (len(bounds) - 1, *shape)
    for name, state in (("initial_state", initial_state), ("final_state", final_state)):
        if state is not None:
            check_dtype(name, state, (torch.float32,))
            check_shape(name, state, shape, "[Hv, K, V]" if cu_seqlens is None else "[N, Hv, K, V]")
            _check_last_dim(name, state)
    if final_state is None:
        final_state = v.new_empty(shape, dtype=torch.float32)
    before, after = initial_state, final_state
    if cu_seqlens is None:
        before, after = None if before is None else before[None], after[None]

    config = scan_config(v, q.shape[2])
    programs = num_v_heads * (v_dim // config.blocks["BLOCK_V"])
    may_cut = 4 * programs <= num_multiprocessors(v.device)
    plan = _plan(bounds, v.device, _SEGMENTS_FROM_TOKENS if may_cut else num_tokens + 1, _SEGMENT_TOKENS)
    prepared = prepare(q, k, gates, plan.chunks, plan.num_chunks)
    out = v.new_empty(v.shape)
    if plan.segments.count > len(bounds) - 1:
        before = segment_states(k, v, prepared, plan.segments, before, len(bounds) - 1, config)
    scan(q, k, v, prepared, plan.segments, before, after, out, config)
    return out, final_state


class _Plan(NamedTuple):
    """How sequences are cut: chunks as `prepare` takes them, and segments."""

    chunks: torch.Tensor | None
    num_chunks: int
    segments: Segments


def _plan(bounds: tuple[int, ...], device: torch.device, cut_from: int, segment_tokens: int) -> _Plan:
    """Cuts sequences of at least `cut_from` tokens every `segment_tokens` tokens."""
    if len(bounds) > 2:
        return _packed_plan(bounds, device, cut_from, segment_tokens)
    # One sequence needs no table: nothing is copied to the card, and a CUDA graph can take this in.
    num_tokens = max(bounds)
    num_chunks = -(-num_tokens // CHUNK)
    segment_tokens = segment_tokens if num_tokens >= cut_from else num_chunks * CHUNK
    return _Plan(None, num_chunks, Segments(None, -(-num_tokens // segment_tokens), segment_tokens, None))


@functools.lru_cache(maxsize=16)
def _packed_plan(bounds: tuple[int, ...], device: torch.device, cut_from: int, segment_tokens: int) -> _Plan:
    """Made once for all layers of a pass: its tables are copied to the card."""
    chunks: list[tuple[int, int]] = []
    segments: list[tuple[int, ...]] = []
    firsts = [0]
    for sequence, (start, stop) in enumerate(itertools.pairwise(bounds)):
        length = segment_tokens if stop - start >= cut_from else stop - start
        for first in range(start, stop, length):
            end = min(first + length, stop)
            segments.append((first, end, len(chunks) + (first - start) // CHUNK, sequence, int(end == stop)))
        chunks += [(first, stop) for first in range(start, stop, CHUNK)]
        firsts.append(len(segments))
    tables = (torch.tensor(rows, dtype=torch.int32).to(device) for rows in (chunks, segments, firsts))
    chunk_table, segment_table, first_segments = tables
    return _Plan(chunk_table, len(chunks), Segments(segment_table, len(segments), segment_tokens, first_segments))


def _check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: Gates, gate_names: tuple[str, str]) -> None:
    check_dtype("q", q, FLOAT_DTYPES)
    check_dtype("k", k, (q.dtype,))
    check_dtype("v", v, (q.dtype,))
    check_dtype(gate_names[1], gates.rate, FLOAT_DTYPES)
    check_shape("q", q, (None, None, None), "[T, Hk, K]")
    check_shape("k", k, q.shape, "the shape of q")
    check_shape("v", v, (q.shape[0], None, None), "[T, Hv, V]")
    named_gates = (gate_names[0], gates.log_decay), (gate_names[1], gates.rate)
    for name, tensor in named_gates:
        check_shape(name, tensor, v.shape[:2], "[T, Hv]")
    for name, tensor in (("q", q), ("k", k), ("v", v), *named_gates):
        _check_last_dim(name, tensor)
    if q.shape[0] == 0:
        raise ValueError("q must hold at least one token, got T = 0; skip the call when there is nothing to prefill.")
    if q.shape[1] == 0 or v.shape[1] == 0 or v.shape[1] % q.shape[1]:
        raise ValueError(f"value heads must be a multiple of key heads, got Hv = {v.shape[1]} and Hk = {q.shape[1]}.")
    if q.shape[2] not in _DIMS or v.shape[2] not in _DIMS:
        raise ValueError(f"K and V must be among {list(_DIMS)}, got K = {q.shape[2]} and V = {v.shape[2]}.")


def _check_last_dim(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {list(tensor.stride())}; "
            "pass a view of rows as the projection or the convolution made them."
        )


@implements("gated_delta_prefill", "triton")
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
    out, _ = gated_delta_prefill(q, k, v, a, b, A_log, dt_bias, state, final_state=state)
    return out


@implements("chunk_gated_delta_rule", "triton")
def _chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if chunk_size != CHUNK:
        raise ValueError(f"On a GPU chunks have {CHUNK} tokens; got chunk_size = {chunk_size}.")
    return chunk_gated_delta_rule(q, k, v, g, beta, initial_state)
