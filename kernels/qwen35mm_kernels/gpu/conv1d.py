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
    x: torch.Tensor, weight: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x may have any stride, and initial_state any strides."""
    num_tokens, channels = x.shape
    width = weight.shape[1]
    assert num_tokens > 0
    assert weight.shape[0] == channels
    assert initial_state.shape == (channels, width - 1)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_state = torch.empty(channels, width - 1, dtype=initial_state.dtype, device=x.device)
    config = config_for("causal_conv1d", x.device, f"C{channels}", _PREFILL)
    token_blocks = cdiv(max(num_tokens - (width - 1), 0), config.blocks["BLOCK_T"])
    launch(
        _causal_conv1d_kernel,
        (cdiv(channels, config.blocks["BLOCK_C"]), 1 + token_blocks),
        *(x, weight, initial_state, out, final_state, num_tokens, x.stride(0), *initial_state.stride()),
        config=config,
        C=channels,
        WIDTH=width,
    )
    return out, final_state


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _load_input(x, initial_state, time, num_tokens, stride_x, stride_state_w, valid, BEFORE: tl.constexpr):
    """The channels' inputs at one time, float32: from x, or from the state for times before 0."""
    times = tl.zeros(valid.shape, dtype=tl.int64) + time
    inputs = tl.load(x + times * stride_x, mask=valid & (times >= 0) & (times < num_tokens), other=0.0).to(tl.float32)
    before = initial_state + (times + BEFORE) * stride_state_w
    return inputs + tl.load(before, mask=valid & (times < 0), other=0.0).to(tl.float32)


# No specialisation on num_tokens: all lengths must run the same instructions.
@triton.jit(do_not_specialize=["num_tokens"])
def _causal_conv1d_kernel(
    x,  # [T, C], rows of any stride
    weight,  # [C, WIDTH]
    initial_state,  # [C, WIDTH - 1]
    out,  # [T, C]
    final_state,  # [C, WIDTH - 1]
    num_tokens,
    stride_x,
    stride_state_c,
    stride_state_w,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (blocks of channels, 1 + blocks of tokens).

    The first program along the tokens does all work with states: the first WIDTH - 1 tokens and the final state. The
    others share the remaining tokens. Their shifted loads overlap and hit the L1 cache.
    """
    BEFORE: tl.constexpr = WIDTH - 1
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid = channels < C
    x += channels
    weight += channels * WIDTH
    out += channels
    initial_state += channels * stride_state_c
    if tl.program_id(1) == 0:
        for token in tl.static_range(BEFORE):  # pyright: ignore[reportGeneralTypeIssues]
            first = tl.zeros([BLOCK_C], dtype=tl.float32)
            for index in tl.static_range(WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
                time = token + index - BEFORE
                known = _load_input(x, initial_state, time, num_tokens, stride_x, stride_state_w, valid, BEFORE)
                first += known * tl.load(weight + index, mask=valid, other=0.0).to(tl.float32)
            exists = tl.full([BLOCK_C], token, tl.int32) < num_tokens
            tl.store(out + token * C, _silu(first).to(out.dtype.element_ty), mask=valid & exists)
        for index in tl.static_range(BEFORE):  # pyright: ignore[reportGeneralTypeIssues]
            time = num_tokens - BEFORE + index
            last = _load_input(x, initial_state, time, num_tokens, stride_x, stride_state_w, valid, BEFORE)
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
