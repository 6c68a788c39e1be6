"""Mixture of experts with 8-bit float weights: the products of `moe`, with tiles and rounded rows as in `fp8`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.fp8 import products, rows_to_fp8, with_scales
from qwen35mm_kernels.gpu.launch import Config, capability, cdiv, config_for, launch
from qwen35mm_kernels.gpu.moe import Pairs, columns_of_tile, group, over_pairs, rows_of_tile, store_tile
from qwen35mm_kernels.reference.fp8 import GROUP, scale_of_rows

# By rows of a tile. One token's eight experts make 128 and 256 programs in 35B-A3B.
_DEFAULTS = {
    16: Config({"BLOCK_N": 64}, 4, 5),
    64: Config({"BLOCK_N": 64}, 4, 4),
    128: Config({"BLOCK_N": 128}, 8, 3),
}


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_experts_kernel(
    codes_ptr, code_scales_ptr, values_ptr, scales_ptr, out_ptr, chosen_ptr, pairs_ptr, tiles_ptr, stride_expert,
    stride_row, stride_scale_expert, stride_scale, stride_group, stride_token, stride_choice, num_tokens,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, ROWS_OF_SCALE: tl.constexpr, GROUP: tl.constexpr, SWIGLU: tl.constexpr,
    TOP_K: tl.constexpr, TOP_K_PADDED: tl.constexpr, GROUPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of pairs, BLOCK_N rows of an expert's matrix; see `columns_of_tile`."""
    expert, pairs, is_row = rows_of_tile(  # pyright: ignore
        chosen_ptr, pairs_ptr, tiles_ptr, stride_token, stride_choice, num_tokens, TOP_K, TOP_K_PADDED, GROUPED, BLOCK_M
    )
    if tl.max(is_row.to(tl.int32)) == 0:
        return
    columns, matrix_rows, first, second, out_columns = columns_of_tile(WIDTH, SWIGLU, BLOCK_N)  # pyright: ignore
    values_ptr += expert.to(tl.int64) * stride_expert
    scales_ptr += expert.to(tl.int64) * stride_scale_expert
    rows = (pairs // TOP_K if SWIGLU else pairs).to(tl.int64)
    total = products(
        codes_ptr, code_scales_ptr, values_ptr, scales_ptr, rows, matrix_rows, first, second, is_row, columns < WIDTH,
        stride_row, stride_scale, stride_group, DEPTH, ROWS_OF_SCALE, GROUP, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    store_tile(tl.trans(total), out_ptr, pairs, is_row, out_columns, WIDTH, SWIGLU, BLOCK_M, BLOCK_N)


def fp8_experts(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The last dimension of all but chosen and weights must be dense; other strides are free."""
    num_experts, hidden, width = down[0].shape
    assert capability(x.device) >= 89, capability(x.device)
    assert x.shape == (len(chosen), hidden)
    assert gate_up[0].shape == (num_experts, 2 * width, hidden)
    assert weights.shape == chosen.shape
    assert x.dtype == weights.dtype
    assert x.stride(1) == gate_up[0].stride(2) == down[0].stride(2) == 1

    pairs = group(chosen, num_experts)
    rows_of_scales = [scale_of_rows(*matrices) for matrices in (gate_up, down)]
    defaults = [with_scales(_DEFAULTS[pairs.block_m], rows) for rows in rows_of_scales]
    shape = f"M{pairs.block_m}_K{hidden}_N{width}"
    configs = (
        config_for("fp8_gate_up", x.device, shape, defaults[0]),
        config_for("fp8_down", x.device, shape, defaults[1]),
    )

    def multiply(source: torch.Tensor, target: torch.Tensor, pairs: Pairs, *, swiglu: bool) -> None:
        index = 0 if swiglu else 1
        (values, scales), config, rows_of_scale = (gate_up, down)[index], configs[index], rows_of_scales[index]
        columns = config.blocks["BLOCK_N"] // (2 if swiglu else 1)
        # A tile's rows of gate share a scale, and so do those of up.
        assert rows_of_scale == 1 or not swiglu or width % columns == 0
        launch(
            _fp8_experts_kernel,
            (cdiv(target.shape[1], columns), pairs.num_tiles),
            *(*rows_to_fp8(source), values, scales, target, *pairs.tensors),
            *(*values.stride()[:2], *scales.stride()[:2], 0 if scales.shape[2] == 1 else scales.stride(2)),
            *pairs.sizes,
            config=config,
            DEPTH=source.shape[1],
            WIDTH=target.shape[1],
            ROWS_OF_SCALE=rows_of_scale,
            GROUP=GROUP,
            SWIGLU=swiglu,
            PRECISION="tf32",
            **pairs.constants,
        )

    return over_pairs(multiply, x, width, weights, pairs)
