"""The causal convolution and SiLU.

Each output is computed separately in a fixed order, so splits of the sequence and other sequences can't change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, launch

# The second grid dimension is limited to 65,535: enough for 2 million tokens.
_PREFILL = Config({"BLOCK_T": 32, "BLOCK_C": 128}, num_warps=4, num_stages=1)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Rows of x may have any stride, and states any strides."""
    num_rows, channels = x.shape
    width = weight.shape[1]
    assert weight.shape[0] == channels
    assert states.shape[1:] == (channels, width - 1)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    config = config_for("causal_conv1d", x.device, f"C{channels}", _PREFILL)
    block_rows = config.blocks["BLOCK_T"]
    row_blocks = cdiv(max(num_rows - (width - 1), 0), block_rows)
    # Whole blocks: masks of their stores would cost the registers of a program.
    out = torch.empty(width - 1 + row_blocks * block_rows, channels, dtype=x.dtype, device=x.device)
    launch(
        _causal_conv1d_kernel,
        (cdiv(channels, config.blocks["BLOCK_C"]), 1 + row_blocks),
        *(x, weight, states, slots, counts, out, x.stride(0), *states.stride()),
        config=config,
        C=channels,
        WIDTH=width,
    )
    return out[:num_rows]


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _load_input(x, state, times, count, stride_x, stride_state_w, valid, BEFORE: tl.constexpr):
    """The channels' inputs at one time, float32: from x, or from the state for times before 0."""
    inputs = tl.load(x + times * stride_x, mask=valid & (times >= 0) & (times < count), other=0.0).to(tl.float32)
    before = state + (times + BEFORE) * stride_state_w
    return inputs + tl.load(before, mask=valid & (times < 0), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots", "counts"])
def _causal_conv1d_kernel(
    x,  # [T, C], rows of any stride
    weight,  # [C, WIDTH]
    states,  # [slots, C, WIDTH - 1]
    slots,
    counts,
    out,  # [whole blocks, C]
    stride_x,
    stride_slot,
    stride_state_c,
    stride_state_w,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (blocks of channels, 1 + blocks of rows).

    The first program along the rows does all work with the state: the first WIDTH - 1 rows and the state after the
    piece. The others share the remaining rows. Their shifted loads overlap and hit the L1 cache.
    """
    BEFORE: tl.constexpr = WIDTH - 1
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = channels < C
    count = tl.load(counts).to(tl.int32)
    x += channels
    weight += channels * WIDTH
    out += channels
    if tl.program_id(1) == 0:
        state = states + tl.load(slots).to(tl.int64) * stride_slot + channels * stride_state_c
        zero = tl.zeros([BLOCK_C], dtype=tl.int64)
        for row in tl.static_range(BEFORE):  # pyright: ignore[reportGeneralTypeIssues]
            first = tl.zeros([BLOCK_C], dtype=tl.float32)
            for index in tl.static_range(WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
                time = zero + (row + index - BEFORE)
                known = _load_input(x, state, time, count, stride_x, stride_state_w, valid, BEFORE)
                first += known * tl.load(weight + index, mask=valid, other=0.0).to(tl.float32)
            first = tl.where(row < count, _silu(first), 0.0)
            tl.store(out + row * C, first.to(out.dtype.element_ty), mask=valid)
        for index in tl.static_range(BEFORE):  # pyright: ignore[reportGeneralTypeIssues]
            time = zero + (count - BEFORE + index)
            last = _load_input(x, state, time, count, stride_x, stride_state_w, valid, BEFORE)
            # A place is written after it was read, also by threads that share a channel.
            tl.debug_barrier()
            tl.store(state + index * stride_state_w, last.to(states.dtype.element_ty), mask=valid)
    else:
        first_row = BEFORE + (tl.program_id(1) - 1) * BLOCK_T
        rows = first_row.to(tl.int64) + tl.arange(0, BLOCK_T)
        mask = (tl.arange(0, BLOCK_T) < count - first_row)[:, None] & valid[None, :]
        total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
        for index in tl.static_range(WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
            before = (rows + (index - BEFORE))[:, None] * stride_x
            inputs = tl.load(x[None, :] + before, mask=mask, other=0.0).to(tl.float32)
            tap = tl.load(weight + index, mask=valid, other=0.0).to(tl.float32)
            total += inputs * tap[None, :]
        tl.store(out[None, :] + rows[:, None] * C, _silu(total).to(out.dtype.element_ty), mask=mask)
        if count < first_row + BLOCK_T:
            zeros = tl.zeros([BLOCK_T, BLOCK_C], out.dtype.element_ty)
            padding = (tl.arange(0, BLOCK_T) >= count - first_row)[:, None] & valid[None, :]
            tl.store(out[None, :] + rows[:, None] * C, zeros, mask=padding)
