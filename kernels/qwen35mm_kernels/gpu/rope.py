"""Rotary positions: the angles of a step, and the rotation alone, for the vision tower."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, launch, next_power_of_2

_COS_SIN = Config({"BLOCK_T": 4}, num_warps=4)
_ROTATE = Config({"BLOCK_ROWS": 32}, num_warps=4)


def mrope_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, mrope_section: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions may have any strides."""
    num_tokens, num_pairs = positions.shape[1], inv_freq.shape[0]
    cos, sin = inv_freq.new_empty(2, num_tokens, num_pairs).unbind()
    config = config_for("mrope_cos_sin", positions.device, f"R{2 * num_pairs}", _COS_SIN)
    launch(
        _mrope_cos_sin_kernel,
        (cdiv(num_tokens, config.blocks["BLOCK_T"]),),
        *(positions, inv_freq.contiguous(), cos, sin, num_tokens, *positions.stride()),
        config=config,
        NUM_PAIRS=num_pairs,
        HEIGHT_PAIRS=mrope_section[1],
        WIDTH_PAIRS=mrope_section[2],
        BLOCK_PAIRS=next_power_of_2(num_pairs),
    )
    return cos, sin


def apply_partial_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    num_tokens, num_heads, head_dim = x.shape
    assert len(cos) == num_tokens
    assert 2 * cos.shape[1] <= head_dim
    assert cos.dtype == sin.dtype == torch.float32
    assert x.stride(2) == cos.stride(1) == 1
    assert cos.stride() == sin.stride()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_pairs = cos.shape[1]
    num_others = head_dim - 2 * num_pairs
    config = config_for("apply_partial_rope", x.device, f"D{head_dim}", _ROTATE)
    launch(
        _rotate_kernel,
        (cdiv(num_tokens * num_heads, config.blocks["BLOCK_ROWS"]),),
        *(x, cos, sin, out, num_tokens * num_heads, *x.stride()[:2], cos.stride(0)),
        config=config,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=num_pairs,
        BLOCK_PAIRS=next_power_of_2(max(1, num_pairs)),
        BLOCK_OTHERS=next_power_of_2(num_others) if num_others else 0,
    )
    return out


# Positions may be a row of a table, with any alignment.
@triton.jit(do_not_specialize=["num_tokens", "stride_axis"], do_not_specialize_on_alignment=["positions"])
def _mrope_cos_sin_kernel(
    positions,
    inv_freq,
    cos,
    sin,
    num_tokens,
    stride_axis,
    stride_token,
    NUM_PAIRS: tl.constexpr,
    HEIGHT_PAIRS: tl.constexpr,
    WIDTH_PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # The first HEIGHT_PAIRS of the pairs 3 j + 1 use height, the first WIDTH_PAIRS of the pairs 3 j + 2 use width.
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (token < num_tokens) & (pair < NUM_PAIRS)
    by_height = (pair % 3 == 1) & (pair < 3 * HEIGHT_PAIRS)
    by_width = (pair % 3 == 2) & (pair < 3 * WIDTH_PAIRS)
    axis = tl.where(by_height, 1, tl.where(by_width, 2, 0))
    position = tl.load(positions + axis * stride_axis + token * stride_token, mask=exists, other=0)
    frequency = tl.load(inv_freq + pair, mask=pair < NUM_PAIRS, other=0.0)
    # tl.cos and tl.sin reduce the angle exactly: it reaches 262,144 radians.
    angle = position.to(tl.float32) * frequency
    tl.store(cos + token * NUM_PAIRS + pair, tl.cos(angle), mask=exists)
    tl.store(sin + token * NUM_PAIRS + pair, tl.sin(angle), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_kernel(
    x,
    cos,
    sin,
    out,
    num_rows,
    stride_token,
    stride_head,
    stride_angle,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # A row is a head of a token; out is [rows, D].
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    token, head = row // NUM_HEADS, row % NUM_HEADS
    x += token * stride_token + head * stride_head
    out += row * HEAD_DIM
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    exists = (row < num_rows) & (pair < NUM_PAIRS)
    c = tl.load(cos + token * stride_angle + pair, mask=exists, other=0.0)
    s = tl.load(sin + token * stride_angle + pair, mask=exists, other=0.0)
    first = tl.load(x + pair, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(x + NUM_PAIRS + pair, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + pair, first * c - second * s, mask=exists)
    tl.store(out + NUM_PAIRS + pair, second * c + first * s, mask=exists)
    if BLOCK_OTHERS > 0:
        other = 2 * NUM_PAIRS + tl.arange(0, BLOCK_OTHERS)[None, :]
        exists = (row < num_rows) & (other < HEAD_DIM)
        tl.store(out + other, tl.load(x + other, mask=exists), mask=exists)
