"""Mixture of experts with integer weights: the products of `moe`, with tiles as in `integers`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.integers import constants_of, halved, neighbours, products
from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, launch
from qwen35mm_kernels.gpu.moe import Pairs, columns_of_tile, group, over_pairs, rows_of_tile, store_tile

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
    """One tile of pairs, BLOCK_N rows of an expert's matrix; see `columns_of_tile`."""
    expert, pairs, is_row = rows_of_tile(  # pyright: ignore
        chosen_ptr, pairs_ptr, tiles_ptr, stride_token, stride_choice, num_tokens, TOP_K, TOP_K_PADDED, GROUPED, BLOCK_M
    )
    if tl.max(is_row.to(tl.int32)) == 0:
        return
    columns, matrix_rows, _, _, out_columns = columns_of_tile(WIDTH, SWIGLU, BLOCK_N)  # pyright: ignore
    words_ptr += expert.to(tl.int64) * stride_word_expert
    scales_ptr += expert.to(tl.int64) * stride_scale_expert
    minima_ptr += expert.to(tl.int64) * stride_scale_expert
    rows = (pairs // TOP_K if SWIGLU else pairs).to(tl.int64)
    total = products(
        x_ptr, words_ptr, scales_ptr, minima_ptr, rows * stride_x, matrix_rows * stride_word_row,
        matrix_rows * stride_scale_row, is_row, columns < WIDTH,
        0, DEPTH, DEPTH, BITS, GROUP, HAS_MINIMA, BIAS, SHARED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    store_tile(total, out_ptr, pairs, is_row, out_columns, WIDTH, SWIGLU, BLOCK_M, BLOCK_N)


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
