"""A Gated DeltaNet layer's decode step in one kernel.

Reading and writing the recurrent states takes nearly all the time: at 128 x 128, a value head has 64 KiB, read once and
written once. A program owns a key head with its value heads, so no other program reads the conv state that it shifts.
It walks through the states in tiles of columns (columns of S are independent) and prefetches the next tile. Two
programs fit on a multiprocessor, so that one computes while the other waits for memory. Only the norm at the end needs
whole rows of V. Splitting V among programs would need a second kernel, so V isn't split even for a single sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import softplus
from qwen35mm_kernels.gpu.early import starts_early, wait_for_inputs
from qwen35mm_kernels.gpu.launch import Config, config_for, launch, next_power_of_2
from qwen35mm_kernels.reference.gated_delta_rule import L2_EPS


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
    """K and V must be powers of two, V at least 16. Rows and slots may have any stride but are contiguous inside."""
    num_v_heads, key_dim, value_dim = recurrent_states.shape[1:]
    channels = 2 * num_k_heads * key_dim + num_v_heads * value_dim
    assert next_power_of_2(key_dim) == key_dim
    assert next_power_of_2(value_dim) == value_dim >= 16
    assert num_v_heads % num_k_heads == 0
    assert mixed.shape == (slots.shape[0], channels + num_v_heads * (value_dim + 2))
    assert conv_weight.shape[0] == channels
    assert conv_states.shape == (recurrent_states.shape[0], channels, conv_weight.shape[1] - 1)
    assert A_log.dtype == dt_bias.dtype == recurrent_states.dtype == torch.float32
    assert mixed.stride(1) == slots.stride(0) == 1
    assert sources is None or (sources.dtype, sources.stride(0)) == (slots.dtype, 1)
    whole = (conv_states[:1], recurrent_states[:1], conv_weight, A_log, dt_bias, norm_weight)
    assert all(tensor.is_contiguous() for tensor in whole)
    group = num_v_heads // num_k_heads
    out = mixed.new_empty(mixed.shape[0], num_v_heads * value_dim)
    launch(
        _gdn_decode_step_kernel,
        (mixed.shape[0], num_k_heads),
        mixed,
        conv_weight,
        A_log,
        dt_bias,
        norm_weight,
        conv_states,
        recurrent_states,
        slots,
        slots if sources is None else sources,
        out,
        mixed.stride(0),
        conv_states.stride(0),
        recurrent_states.stride(0),
        out.stride(0),
        eps,
        config=config_for(
            "gdn_decode_step", mixed.device, f"G{group}_K{key_dim}_V{value_dim}", _default(group, key_dim, value_dim)
        ),
        L2_EPS=L2_EPS,
        NUM_K_HEADS=num_k_heads,
        GROUP=group,
        GROUP_POW2=next_power_of_2(group),
        K=key_dim,
        V=value_dim,
        WIDTH=conv_weight.shape[1],
        WIDTH_POW2=next_power_of_2(conv_weight.shape[1] - 1),
        SEVERAL=sources is not None,
        EARLY=starts_early(mixed.device),
    )
    return out


def _default(group: int, key_dim: int, value_dim: int) -> Config:
    """Independent of the batch: a sequence's sums must have the same order in any batch."""
    # The widest block that leaves registers for two programs. More heads keep more values and outputs.
    block_v = min(64 if group <= 2 else 32, value_dim)
    # At least four numbers of a tile a thread. With fewer, threads would share numbers, and one could read a number
    # that another has already replaced.
    num_warps = max(1, min(8, key_dim * block_v // 128))
    return Config({"BLOCK_V": block_v}, num_warps=num_warps, num_stages=1)


@triton.jit
def _load_history(conv_state, weight, channels, valid, WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr):
    """Old inputs and their taps [channels, WIDTH_POW2], 0 from WIDTH - 1 on; the new input's tap [channels]."""
    time = tl.arange(0, WIDTH_POW2)[None, :]
    mask = valid[:, None] & (time < WIDTH - 1)
    old = tl.load(conv_state + channels[:, None] * (WIDTH - 1) + time, mask=mask, other=0.0)
    taps = tl.load(weight + channels[:, None] * WIDTH + time, mask=mask, other=0.0)
    return old, taps, tl.load(weight + channels * WIDTH + WIDTH - 1, mask=valid, other=0.0)


@triton.jit
def _conv(old, taps, new, tap):
    """silu(sum of inputs * taps): [channels] float32."""
    total = tl.sum(old.to(tl.float32) * taps.to(tl.float32), axis=1) + new.to(tl.float32) * tap.to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _shift(old, new, conv_state, channels, valid, WIDTH: tl.constexpr):
    """Stores the inputs without the oldest as the conv state."""
    time = tl.arange(0, old.shape[1])[None, :]
    first = conv_state + channels * (WIDTH - 1)
    tl.store(first[:, None] + time - 1, old, mask=valid[:, None] & (time >= 1) & (time < WIDTH - 1))
    tl.store(first + WIDTH - 2, new.to(conv_state.dtype.element_ty), mask=valid)


@triton.jit
def _l2_normalise(x, L2_EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + L2_EPS)


@triton.jit
def _pick(values, index):
    """values[index] along the first axis, for a tensor in registers."""
    rows = tl.arange(0, values.shape[0])
    if len(values.shape) == 2:
        rows = rows[:, None]
    return tl.sum(tl.where(rows == index, values, 0.0), axis=0)


@triton.jit
def _tile_start(index, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Offset of a tile in the heads' states: head by head, from left to right."""
    return (index // (V // BLOCK_V)) * (K * V) + (index % (V // BLOCK_V)) * BLOCK_V


@triton.jit
def _step_row(
    mixed,
    conv_weight,
    A_log,
    dt_bias,
    norm_weight,
    conv_from,
    conv_to,
    state_from,
    state_to,
    out,
    k_head,
    eps,
    L2_EPS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_POW2: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One row: its `mixed` and `out`, the states that it continues from, and those that it writes; both may be one."""
    TILES: tl.constexpr = V // BLOCK_V  # of one value head
    CHANNELS: tl.constexpr = NUM_K_HEADS * (2 * K + GROUP * V)
    NUM_V_HEADS: tl.constexpr = NUM_K_HEADS * GROUP
    members = tl.arange(0, GROUP_POW2)
    columns = tl.arange(0, GROUP_POW2 * V)  # of the GROUP value heads together
    head_valid, valid = members < GROUP, columns < GROUP * V
    first_column = k_head * GROUP * V
    out += first_column
    state_from += k_head.to(tl.int64) * (GROUP * K * V)
    state_to += k_head.to(tl.int64) * (GROUP * K * V)

    # Issue all loads before waiting for any: first what is there before the projection is.
    rows = tl.arange(0, K)
    every = rows >= 0
    q_channels, k_channels = k_head * K + rows, (NUM_K_HEADS + k_head) * K + rows
    v_channels = 2 * NUM_K_HEADS * K + first_column + columns
    q_old, q_taps, q_tap = _load_history(conv_from, conv_weight, q_channels, every, WIDTH, WIDTH_POW2)  # pyright: ignore
    k_old, k_taps, k_tap = _load_history(conv_from, conv_weight, k_channels, every, WIDTH, WIDTH_POW2)
    v_old, v_taps, v_tap = _load_history(conv_from, conv_weight, v_channels, valid, WIDTH, WIDTH_POW2)
    heads = k_head * GROUP + members
    rate = tl.load(A_log + heads, mask=head_valid, other=0.0)
    bias = tl.load(dt_bias + heads, mask=head_valid, other=0.0)
    weight = tl.load(norm_weight + tl.arange(0, V))
    tile = rows[:, None] * V + tl.arange(0, BLOCK_V)[None, :]
    old = tl.load(state_from + tile)
    wait_for_inputs(EARLY)
    q_new, k_new = tl.load(mixed + q_channels), tl.load(mixed + k_channels)
    v_new = tl.load(mixed + v_channels, mask=valid, other=0.0)
    gates = mixed + CHANNELS + NUM_V_HEADS * V + heads
    b = tl.load(gates, mask=head_valid, other=0.0).to(tl.float32)
    a = tl.load(gates + NUM_V_HEADS, mask=head_valid, other=0.0).to(tl.float32)
    z = tl.load(mixed + CHANNELS + first_column + columns, mask=valid, other=0.0)

    decays = tl.exp(-tl.exp(rate) * softplus(a + bias))
    betas = 1.0 / (1.0 + tl.exp(-b))
    q = _l2_normalise(_conv(q_old, q_taps, q_new, q_tap), L2_EPS) * (K**-0.5)
    k = _l2_normalise(_conv(k_old, k_taps, k_new, k_tap), L2_EPS)
    overlap = tl.sum(q * k, axis=0)
    v = tl.reshape(_conv(v_old, v_taps, v_new, v_tap), [GROUP_POW2 * TILES, BLOCK_V])

    # Several threads may read the same input, so all must have read before any shifts.
    tl.debug_barrier()
    _shift(q_old, q_new, conv_to, q_channels, every, WIDTH)
    _shift(k_old, k_new, conv_to, k_channels, every, WIDTH)
    _shift(v_old, v_new, conv_to, v_channels, valid, WIDTH)

    tile_rows = tl.arange(0, GROUP_POW2 * TILES)[:, None]
    o = tl.zeros([GROUP_POW2 * TILES, BLOCK_V], dtype=tl.float32)
    for index in range(GROUP * TILES):
        head = index // TILES
        following = state_from + _tile_start(index + 1, K, V, BLOCK_V) + tile
        coming = tl.load(following, mask=tl.full([K, 1], index, tl.int32) < GROUP * TILES - 1)
        decay, beta = _pick(decays, head), _pick(betas, head)
        read_k, read_q = tl.split(tl.sum(tl.join(old * k[:, None], old * q[:, None]), axis=0))
        delta = beta * (_pick(v, index) - decay * read_k)
        pointers = state_to + _tile_start(index, K, V, BLOCK_V) + tile
        tl.store(pointers, decay * old + k[:, None] * delta[None, :])
        # S^T q of the new state, computed from the old state, which is read only once.
        o = tl.where(tile_rows == index, (decay * read_q + overlap * delta)[None, :], o)
        old = coming

    o = tl.reshape(o, [GROUP_POW2, V])
    o *= tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)[:, None]
    z = tl.reshape(z, [GROUP_POW2, V]).to(tl.float32)
    o *= weight.to(tl.float32)[None, :] * (z / (1.0 + tl.exp(-z)))
    tl.store(out + columns, tl.reshape(o, [GROUP_POW2 * V]).to(out.dtype.element_ty), mask=valid)


@triton.jit
def _rows_of_sequence(slots, sources, first):
    """How many rows a sequence has from its first one on: each continues from the row before it."""
    row, goes_on = first, True
    while goes_on:
        before = tl.load(slots + row)
        row += 1
        is_there = row < tl.num_programs(0)
        goes_on = (tl.load(sources + row, mask=is_there, other=-1) == before) & (
            tl.load(slots + row, mask=is_there, other=-1) != before
        )
    return row - first


@triton.jit
def _gdn_decode_step_kernel(
    mixed,  # [B, q | k | v | z | b | a]
    conv_weight,  # [C, WIDTH]
    A_log,  # [Hv]
    dt_bias,  # [Hv]
    norm_weight,  # [V]
    conv_states,  # [num_slots, C, WIDTH - 1]
    recurrent_states,  # [num_slots, Hv, K, V]
    slots,  # [B]
    sources,  # [B], read if SEVERAL
    out,  # [B, Hv * V]
    stride_mixed,
    stride_conv_slot,
    stride_recurrent_slot,
    stride_out,
    eps,
    L2_EPS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_POW2: tl.constexpr,
    SEVERAL: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (B, Hk): a row's key head and its GROUP adjacent value heads; a sequence's first row does all its rows."""
    row, k_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        wait_for_inputs(EARLY)
        columns = tl.arange(0, GROUP_POW2 * V)
        first = out + row * stride_out + k_head * GROUP * V
        tl.store(first + columns, tl.zeros([GROUP_POW2 * V], dtype=out.dtype.element_ty), mask=columns < GROUP * V)
        return
    source = slot
    if SEVERAL:
        source = tl.load(sources + row).to(tl.int64)
        if (source != slot) & (source == tl.load(slots + row - 1, mask=row > 0, other=-1)):
            wait_for_inputs(EARLY)
            return
    num_rows = _rows_of_sequence(slots, sources, row) if SEVERAL else 1
    # Not in a loop: the compiler may move a loop's loads before a wait in it.
    ROW_EARLY: tl.constexpr = EARLY and not SEVERAL  # pyright: ignore[reportAssignmentType]
    if SEVERAL:
        wait_for_inputs(EARLY)
    for _ in range(num_rows):
        _step_row(
            mixed + row * stride_mixed,
            conv_weight,
            A_log,
            dt_bias,
            norm_weight,
            conv_states + source * stride_conv_slot,
            conv_states + slot * stride_conv_slot,
            recurrent_states + source * stride_recurrent_slot,
            recurrent_states + slot * stride_recurrent_slot,
            out + row * stride_out,
            k_head,
            eps,
            L2_EPS,
            NUM_K_HEADS,
            GROUP,
            GROUP_POW2,
            K,
            V,
            WIDTH,
            WIDTH_POW2,
            ROW_EARLY,
            BLOCK_V,
        )
        if SEVERAL:
            row, source = row + 1, slot
            slot = tl.load(slots + row, mask=row < tl.num_programs(0), other=-1).to(tl.int64)
            # The next row reads what all threads have written.
            tl.debug_barrier()
