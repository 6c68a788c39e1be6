"""Mixture of experts with integer weights: the products of `moe`, with tiles as in `integers`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import dot, round_to
from qwen35mm_kernels.gpu.integers import constants_of, halved, neighbours, tile
from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, launch
from qwen35mm_kernels.gpu.moe import Pairs, direct_rows, group, grouped_rows, over_pairs

# By rows of a tile. One token's eight experts make 128 and 256 programs in 35B-A3B; 64 rows of a matrix and 4 warps are
# what a Hopper card's matrix units take.
_DEFAULTS = {
    16: Config({"BLOCK_N": 64, "BLOCK_K": 128}, 4, 4),
    64: Config({"BLOCK_N": 64, "BLOCK_K": 128}, 4, 3),
    128: Config({"BLOCK_N": 128, "BLOCK_K": 64}, 8, 3),
}


@triton.jit(do_not_specialize=["num_tokens"])
def _integer_experts_kernel(
    x_ptr, words_ptr, scales_ptr, minima_ptr, out_ptr, chosen_ptr, pairs_ptr, tiles_ptr, stride_x, stride_word_expert,
    stride_word_row, stride_scale_expert, stride_scale_row, stride_token, stride_choice, num_tokens,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr,
    BIAS: tl.constexpr, SHARED: tl.constexpr, SWIGLU: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PADDED: tl.constexpr,
    GROUPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of pairs, BLOCK_N rows of an expert's matrix: as many columns of out [pairs, WIDTH], dense.

    SWIGLU: half as many; eight rows of gate come before their eight of up, so that a thread has both of its column.
    """
    if GROUPED:
        expert, pairs, is_row = grouped_rows(pairs_ptr, tiles_ptr, tl.program_id(1), BLOCK_M)  # pyright: ignore
    else:
        expert, pairs, is_row = direct_rows(  # pyright: ignore
            chosen_ptr, stride_token, stride_choice, num_tokens, tl.program_id(1), TOP_K, TOP_K_PADDED, BLOCK_M
        )
    if tl.max(is_row.to(tl.int32)) == 0:
        return
    places, depth = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if SWIGLU:
        columns = tl.program_id(0) * (BLOCK_N // 2) + places // 16 * 8 + places % 8
        matrix_rows = (columns + places // 8 % 2 * WIDTH).to(tl.int64)
        out_columns = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        columns = tl.program_id(0) * BLOCK_N + places
        matrix_rows, out_columns = columns.to(tl.int64), columns
    words_ptr += expert.to(tl.int64) * stride_word_expert
    scales_ptr += expert.to(tl.int64) * stride_scale_expert
    minima_ptr += expert.to(tl.int64) * stride_scale_expert
    word_rows, scale_rows = matrix_rows * stride_word_row, matrix_rows * stride_scale_row
    rows = (pairs // TOP_K if SWIGLU else pairs).to(tl.int64)
    x_ptrs = x_ptr + rows[None, :] * stride_x + depth[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, DEPTH, BLOCK_K):
        x_mask = is_row[None, :]
        if DEPTH % BLOCK_K != 0:
            x_mask &= (first + depth < DEPTH)[:, None]
        x = tl.load(x_ptrs + first, mask=x_mask, other=0.0)
        weight = tile(
            words_ptr, scales_ptr, minima_ptr, word_rows, scale_rows, columns < WIDTH, first,
            DEPTH, BITS, GROUP, HAS_MINIMA, BIAS, SHARED, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = dot(round_to(weight, x.dtype), x, total, PRECISION)
    if SWIGLU:
        both = tl.permute(tl.reshape(total, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
        gate, up = tl.split(both)
        total = tl.reshape(gate / (1 + tl.exp(-gate)) * up, (BLOCK_N // 2, BLOCK_M))
    out_ptrs = out_ptr + pairs.to(tl.int64)[None, :] * WIDTH + out_columns[:, None]
    mask = is_row[None, :] & (out_columns < WIDTH)[:, None]
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=mask)


def integer_experts(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, ...],
    down: tuple[torch.Tensor, ...],
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    formats: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """The last dimension of all but chosen and weights must be dense; other strides are free."""
    num_tokens, hidden = x.shape
    num_experts, width = gate_up[0].shape[0], gate_up[0].shape[1] // 2
    assert weights.shape == chosen.shape
    assert len(chosen) == num_tokens
    assert down[0].shape[:2] == (num_experts, hidden)
    assert x.dtype == weights.dtype
    assert x.stride(-1) == 1

    pairs = group(chosen, num_experts)
    default = halved(_DEFAULTS[pairs.block_m], x.dtype)
    shapes = [
        f"M{pairs.block_m}_b{bits}_K{hidden}_N{width}" + ("_fp32" if x.dtype == torch.float32 else "")
        for bits, _ in formats
    ]
    configs = (
        config_for("integer_gate_up", x.device, shapes[0], default),
        config_for("integer_down", x.device, shapes[1], default),
    )

    def multiply(source: torch.Tensor, target: torch.Tensor, pairs: Pairs, *, swiglu: bool) -> None:
        index = 0 if swiglu else 1
        words, scales, *rest = (gate_up, down)[index]
        config, (bits, group_width), minima = configs[index], formats[index], rest[0] if rest else None
        constants = constants_of(words, scales, minima, source.shape[1], bits=bits, width=group_width)
        columns = config.blocks["BLOCK_N"] // (2 if swiglu else 1)
        launch(
            _integer_experts_kernel,
            (cdiv(target.shape[1], columns), pairs.num_tiles),
            *(source, words, scales, scales if minima is None else minima, target, *pairs.tensors),
            *(source.stride(0), *words.stride()[:2], *scales.stride()[:2], *pairs.sizes),
            config=config,
            WIDTH=target.shape[1],
            SHARED=neighbours(group_width, config),
            SWIGLU=swiglu,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            **constants,
            **pairs.constants,
        )

    return over_pairs(multiply, x, width, weights, pairs)
