"""A long prompt through few heads leaves most of a card idle: its segments then run side by side.

Over a segment the state changes by S <- P S + R. P and R need no earlier segment, and with them the state before each
segment is a short loop of small products; from there every segment is scanned as if it were a sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.gdn_prepare import Prepared
from qwen35mm_kernels.gpu.gdn_scan import Segments, scan
from qwen35mm_kernels.gpu.launch import Config, config_for, launch


def segment_states(
    k: torch.Tensor,
    v: torch.Tensor,
    prepared: Prepared,
    segments: Segments,
    initial_state: torch.Tensor | None,
    num_sequences: int,
    config: Config,
) -> torch.Tensor:
    """The state before each segment, [segments, Hv, K, V] float32.

    Each segment but a sequence's last is run twice, all at once: from zeros, and without values from the identity.
    """
    num_v_heads, v_dim, k_dim = v.shape[1], v.shape[2], k.shape[2]
    added = v.new_empty(segments.count, num_v_heads, k_dim, v_dim, dtype=torch.float32)
    transition = v.new_empty(segments.count, num_v_heads, k_dim, k_dim, dtype=torch.float32)
    states = torch.empty_like(added)
    scan(k, k, v, prepared, segments, None, added, None, config)
    scan(k, k, None, prepared, segments, None, transition, None, config)
    before = initial_state if initial_state is not None else states
    default = Config({"BLOCK_V": 16}, num_warps=4, num_stages=1)
    combine_config = config_for("gdn_combine", v.device, f"K{k_dim}_V{v_dim}", default)
    launch(
        _combine_kernel,
        (v_dim // combine_config.blocks["BLOCK_V"], num_v_heads, num_sequences),
        transition,
        added,
        before,
        states,
        segments.bounds,
        *before.stride()[:3],
        segments.count,
        config=combine_config,
        K=k_dim,
        V=v_dim,
        GIVEN_STATE=initial_state is not None,
        PACKED=segments.bounds is not None,
        PRECISION="tf32x3",
    )
    return states


@triton.jit(do_not_specialize=["num_segments"])
def _combine_kernel(
    transition_ptr,
    added_ptr,
    initial_ptr,
    states_ptr,
    bounds_ptr,
    initial_row,
    initial_head,
    initial_k,
    num_segments,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GIVEN_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S <- P S + R over one sequence's segments: transition [segments, Hv, K, K], added and states [.., K, V]."""
    column, head, sequence = tl.program_id(0) * BLOCK_V, tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    k_range = tl.arange(0, K)
    v_range = tl.arange(0, BLOCK_V)
    if PACKED:
        first = tl.load(bounds_ptr + sequence)
        last = tl.load(bounds_ptr + sequence + 1) - 1
    else:
        first = sequence * 0
        last = first + num_segments - 1
    if GIVEN_STATE:
        state_at = initial_ptr + sequence.to(tl.int64) * initial_row + head.to(tl.int64) * initial_head + column
        state = tl.load(state_at + k_range[:, None].to(tl.int64) * initial_k + v_range[None, :])
    else:
        state = tl.zeros((K, BLOCK_V), dtype=tl.float32)
    tile = k_range[:, None] * V + column + v_range[None, :]
    square = k_range[:, None] * K + k_range[None, :]
    for i in range(last - first):
        index = (first.to(tl.int64) + i) * num_heads + head
        tl.store(states_ptr + index * (K * V) + tile, state)
        transition = tl.load(transition_ptr + index * (K * K) + square)
        added = tl.load(added_ptr + index * (K * V) + tile)
        state = tl.dot(transition, state, acc=added, input_precision=PRECISION)
    tl.store(states_ptr + (last.to(tl.int64) * num_heads + head) * (K * V) + tile, state)
