"""The causal convolution and SiLU. Every number is computed by itself, in one order: where a sequence is cut or what
stands beside it in a batch can't change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.dispatch import implements
from qwen35mm_kernels.gpu.launch import Config, config_for, launch

# A card's second grid dimension ends at 65,535: enough for 2 million tokens.
_PREFILL = Config({"BLOCK_T": 32, "BLOCK_C": 128}, num_warps=4, num_stages=1)
_STEP = Config({"BLOCK_C": 256}, num_warps=4, num_stages=1)


@implements("causal_conv1d", "triton")
def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, initial_state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `causal_conv1d.causal_conv1d`. Rows of x may have any stride, and initial_state any strides."""
    num_tokens, channels = x.shape
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    width = weight.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state_dtype = x.dtype if initial_state is None else initial_state.dtype
    final_state = torch.empty(channels, width - 1, dtype=state_dtype, device=x.device)
    config = config_for("causal_conv1d", x.device, f"C{channels}", _PREFILL)
    token_blocks = triton.cdiv(max(num_tokens - (width - 1), 0), config.blocks["BLOCK_T"])
    launch(
        _causal_conv1d_kernel,
        (triton.cdiv(channels, config.blocks["BLOCK_C"]), 1 + token_blocks),
        x,
        weight,
        initial_state,
        out,
        final_state,
        num_tokens,
        x.stride(0),
        *((0, 0) if initial_state is None else initial_state.stride()),
        config=config,
        C=channels,
        WIDTH=width,
        HAS_STATE=initial_state is not None,
    )
    return out, final_state


@implements("causal_conv1d_step", "triton")
def causal_conv1d_step(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """See `causal_conv1d.causal_conv1d_step`. Rows of x may have any stride, and `state` any strides."""
    batch, channels = x.shape
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = config_for("causal_conv1d_step", x.device, f"C{channels}", _STEP)
    launch(
        _causal_conv1d_step_kernel,
        (batch, triton.cdiv(channels, config.blocks["BLOCK_C"])),
        x,
        weight,
        state,
        out,
        x.stride(0),
        *state.stride(),
        config=config,
        C=channels,
        WIDTH=weight.shape[1],
    )
    return out


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _load_input(
    x, initial_state, time, num_tokens, stride_x, stride_state_w, valid, BEFORE: tl.constexpr, HAS_STATE: tl.constexpr
):
    """The channels' inputs at one time, float32: from x, or from the state for times before 0."""
    times = tl.zeros(valid.shape, dtype=tl.int64) + time
    inputs = tl.load(x + times * stride_x, mask=valid & (times >= 0) & (times < num_tokens), other=0.0).to(tl.float32)
    if HAS_STATE:
        before = initial_state + (times + BEFORE) * stride_state_w
        inputs += tl.load(before, mask=valid & (times < 0), other=0.0).to(tl.float32)
    return inputs


# No variant of its own for one token or for a multiple of 16: all lengths must run the same instructions.
@triton.jit(do_not_specialize=["num_tokens"])
def _causal_conv1d_kernel(
    x,  # [T, C], rows any distance apart
    weight,  # [C, WIDTH]
    initial_state,  # [C, WIDTH - 1], only with HAS_STATE
    out,  # [T, C]
    final_state,  # [C, WIDTH - 1]
    num_tokens,
    stride_x,
    stride_state_c,
    stride_state_w,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (blocks of channels, 1 + blocks of tokens).

    The first program along the tokens does all that touches states: the first WIDTH - 1 tokens and the final state.
    The others share the tokens after those; their shifted loads overlap, and hit the first-level cache.
    """
    BEFORE: tl.constexpr = WIDTH - 1
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = channels < C
    x += channels
    weight += channels * WIDTH
    out += channels
    if HAS_STATE:
        initial_state += channels * stride_state_c
    if tl.program_id(1) == 0:
        for token in tl.static_range(BEFORE):  # pyright: ignore[reportGeneralTypeIssues]
            first = tl.zeros([BLOCK_C], dtype=tl.float32)
            for index in tl.static_range(WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
                known = _load_input(
                    x,
                    initial_state,
                    token + index - BEFORE,
                    num_tokens,
                    stride_x,
                    stride_state_w,
                    valid,
                    BEFORE,
                    HAS_STATE,
                )
                first += known * tl.load(weight + index, mask=valid, other=0.0).to(tl.float32)
            exists = tl.full([BLOCK_C], token, tl.int32) < num_tokens
            tl.store(out + token * C, _silu(first).to(out.dtype.element_ty), mask=valid & exists)
        for index in tl.static_range(BEFORE):  # pyright: ignore[reportGeneralTypeIssues]
            time = num_tokens - BEFORE + index
            last = _load_input(x, initial_state, time, num_tokens, stride_x, stride_state_w, valid, BEFORE, HAS_STATE)
            tl.store(final_state + channels * BEFORE + index, last.to(final_state.dtype.element_ty), mask=valid)
    else:
        tokens = BEFORE + (tl.program_id(1).to(tl.int64) - 1) * BLOCK_T + tl.arange(0, BLOCK_T)
        mask = (tokens < num_tokens)[:, None] & valid[None, :]
        total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
        for index in tl.static_range(WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
            rows = (tokens + (index - BEFORE))[:, None] * stride_x
            inputs = tl.load(x[None, :] + rows, mask=mask, other=0.0).to(tl.float32)
            tap = tl.load(weight + index, mask=valid, other=0.0).to(tl.float32)
            total += inputs * tap[None, :]
        tl.store(out[None, :] + tokens[:, None] * C, _silu(total).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _causal_conv1d_step_kernel(
    x,  # [B, C], rows any distance apart
    weight,  # [C, WIDTH]
    state,  # [B, C, WIDTH - 1]
    out,  # [B, C]
    stride_x,
    stride_state_b,
    stride_state_c,
    stride_state_w,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (B, blocks of channels)."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channels < C
    state += row * stride_state_b + channels * stride_state_c
    new = tl.load(x + row * stride_x + channels, mask=mask, other=0.0)
    total = tl.zeros([BLOCK_C], dtype=tl.float32)
    for index in tl.static_range(WIDTH - 1):  # pyright: ignore[reportGeneralTypeIssues]
        old = tl.load(state + index * stride_state_w, mask=mask, other=0.0)
        # Another thread may have read this too: it must have, before it is replaced.
        tl.debug_barrier()
        if index > 0:
            tl.store(state + (index - 1) * stride_state_w, old, mask=mask)
        tap = tl.load(weight + channels * WIDTH + index, mask=mask, other=0.0).to(tl.float32)
        total += old.to(tl.float32) * tap
    tl.store(state + (WIDTH - 2) * stride_state_w, new.to(state.dtype.element_ty), mask=mask)
    tap = tl.load(weight + channels * WIDTH + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)
    total += new.to(tl.float32) * tap
    tl.store(out + row * C + channels, _silu(total).to(out.dtype.element_ty), mask=mask)
