"""Products with 8-bit float weights, on cards that multiply them (compute capability 8.9 and newer).

Rows are first rounded to e4m3, with a scale for each 128 neighbours. Few rows use a matrix-vector kernel, which
converts weights to floats in registers and is memory-bound. More rows use the matrix units, whose sums of 128 products
are scaled and added in float32. A row's bits depend on the number of rows, which selects the kernel and tile, but not
on the other rows' values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import dot, round_to
from qwen35mm_kernels.gpu.launch import Config, capability, cdiv, config_for, launch
from qwen35mm_kernels.reference.fp8 import GROUP, LARGEST, LEAST_MAXIMUM, scale_of_rows

# The largest number of rows for the matrix-vector kernel.
MAX_VECTORS = 4
_LARGEST, _LEAST_MAXIMUM = tl.constexpr(LARGEST), tl.constexpr(LEAST_MAXIMUM)

# 8 KB of weights at a time: a matrix of 4,096 rows has 32 KB in flight to each of 132 multiprocessors.
_VECTORS = Config({"BLOCK_N": 8, "GROUPS": 8}, 4, 1)
# By rows of a tile.
_TILES = {
    16: Config({"BLOCK_N": 32}, 4, 5),
    64: Config({"BLOCK_N": 64}, 4, 4),
    128: Config({"BLOCK_N": 128}, 8, 3),
}


@triton.jit
def _round_kernel(
    x_ptr, codes_ptr, scales_ptr, stride_x, DEPTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK groups of one row: x [N, DEPTH] -> codes [N, DEPTH] e4m3, scales [N, groups] float32, both dense."""
    num_groups: tl.constexpr = (DEPTH + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * stride_x + columns, mask=columns < DEPTH, other=0.0).to(tl.float32)
    # Exact division: the fast one is off by an ulp, which changes the rounding between two codes.
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), _LEAST_MAXIMUM), _LARGEST)
    # Makes the result NaN, however a card converts NaN to 8 bits.
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=1) != 0
    scale = tl.where(is_finite, scale, float("nan"))
    codes = round_to(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * DEPTH + columns, codes, mask=columns < DEPTH)
    tl.store(scales_ptr + row * num_groups + groups, scale, mask=groups < num_groups)


@triton.jit(do_not_specialize=["num_rows"])
def _vectors_kernel(
    codes_ptr, code_scales_ptr, values_ptr, scales_ptr, out_ptr, num_rows, stride_values, stride_scale, stride_group,
    stride_out, WIDTH: tl.constexpr, DEPTH: tl.constexpr, ROWS_OF_SCALE: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of out [up to ROWS, WIDTH]: scales the sum of each group's products and adds them up."""
    num_groups: tl.constexpr = (DEPTH + GROUP - 1) // GROUP
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < WIDTH
    some, inside = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    places = tl.arange(0, ROWS)
    weights = values_ptr + columns.to(tl.int64)[:, None, None] * stride_values
    weight_scales = scales_ptr + (columns // ROWS_OF_SCALE)[:, None] * stride_scale
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for first in range(0, num_groups, GROUPS):
        groups = first + some
        depth = groups[:, None] * GROUP + inside[None, :]
        mask = is_column[:, None, None] & (depth < DEPTH)[None, :, :]
        weight = tl.load(weights + depth[None, :, :], mask=mask, other=0.0).to(tl.float32)
        is_scale = is_column[:, None] & (groups < num_groups)[None, :]
        scale = tl.load(weight_scales + groups[None, :] * stride_group, mask=is_scale, other=0.0)
        for row in tl.static_range(ROWS):  # pyright: ignore
            # Missing rows repeat the last one.
            place = tl.minimum(num_rows - 1, row)
            code = tl.load(codes_ptr + place * DEPTH + depth, mask=depth < DEPTH, other=0.0).to(tl.float32)
            of_row = tl.load(code_scales_ptr + place * num_groups + groups, mask=groups < num_groups, other=0.0)
            sums = tl.sum(weight * code[None, :, :], axis=2) * (of_row[None, :] * scale)
            total += tl.where(places[None, :] == row, tl.sum(sums, axis=1)[:, None], 0.0)  # pyright: ignore
    out_ptrs = out_ptr + places.to(tl.int64)[None, :] * stride_out + columns[:, None]
    mask = is_column[:, None] & (places < num_rows)[None, :]
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def products(
    codes_ptr, code_scales_ptr, values_ptr, scales_ptr, rows, matrix_rows, first, second, is_row, is_column,
    stride_values, stride_scale, stride_group, DEPTH: tl.constexpr, ROWS_OF_SCALE: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rounded rows of x times BLOCK_N rows of a matrix, float32 [BLOCK_M, BLOCK_N].

    rows, matrix_rows: of x and of the matrix, int64; is_row, is_column: which of them there are.

    first, second: where blocks of rows share a scale, rows of the matrix that have the scale of all others in even and
    in odd eights. One load in place of one for each row.
    """
    num_groups: tl.constexpr = (DEPTH + GROUP - 1) // GROUP
    depth = tl.arange(0, GROUP)
    code_ptrs = codes_ptr + rows[:, None] * DEPTH + depth[None, :]
    weight_ptrs = values_ptr + matrix_rows[None, :] * stride_values + depth[:, None]
    code_scale_ptrs = code_scales_ptr + rows * num_groups
    scale_ptrs = scales_ptr + matrix_rows * stride_scale
    first_ptr = scales_ptr + first // ROWS_OF_SCALE * stride_scale
    second_ptr = scales_ptr + second // ROWS_OF_SCALE * stride_scale
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(num_groups):
        code_mask, mask = is_row[:, None], is_column[None, :]
        if DEPTH % GROUP != 0:
            is_inside = group * GROUP + depth < DEPTH
            code_mask, mask = code_mask & is_inside[None, :], mask & is_inside[:, None]
        code = tl.load(code_ptrs + group * GROUP, mask=code_mask, other=0.0)
        weight = tl.load(weight_ptrs + group * GROUP, mask=mask, other=0.0)
        of_row = tl.load(code_scale_ptrs + group, mask=is_row, other=0.0)
        if ROWS_OF_SCALE == 1:
            scale = tl.load(scale_ptrs + group * stride_group, mask=is_column, other=0.0)
        else:
            is_first = tl.arange(0, BLOCK_N) // 8 % 2 == 0
            both = tl.load(first_ptr + group * stride_group), tl.load(second_ptr + group * stride_group)
            scale = tl.where(is_first, both[0], both[1])
        if BLOCK_M < 64:
            # A Hopper card's matrix units take 64 rows: those of the matrix.
            sums = tl.trans(dot(tl.trans(weight), tl.trans(code), None, PRECISION))
        else:
            sums = dot(code, weight, None, PRECISION)
        total += sums * (of_row[:, None] * scale[None, :])
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _tiles_kernel(
    codes_ptr, code_scales_ptr, values_ptr, scales_ptr, out_ptr, num_rows, stride_values, stride_scale, stride_group,
    stride_out, WIDTH: tl.constexpr, DEPTH: tl.constexpr, ROWS_OF_SCALE: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows and BLOCK_N columns of out [N, WIDTH]. Consecutive programs share their weights."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    first = tl.program_id(1) * BLOCK_N
    columns = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_row, is_column = rows < num_rows, columns < WIDTH
    total = products(
        codes_ptr, code_scales_ptr, values_ptr, scales_ptr, rows, columns, first, first, is_row, is_column,
        stride_values, stride_scale, stride_group, DEPTH, ROWS_OF_SCALE, GROUP, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    out_ptrs = out_ptr + rows[:, None] * stride_out + columns[None, :]
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def rows_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [N, in] -> codes [N, in] e4m3, and scales [N, ceil(in / 128)] float32."""
    num_rows, depth = x.shape
    num_groups = cdiv(depth, GROUP)
    codes = torch.empty(num_rows, depth, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    block = 8
    launch(
        _round_kernel, (num_rows, cdiv(num_groups, block)), x, codes, scales, x.stride(0),
        config=Config(num_warps=4), DEPTH=depth, GROUP=GROUP, BLOCK=block,
    )  # fmt: skip
    return codes, scales


def fp8_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Two launches. The last dimension of x, values and out must be dense."""
    (num_rows, depth), num_out = x.shape, len(values)
    out = x.new_empty(num_rows, num_out) if out is None else out
    assert capability(x.device) >= 89, capability(x.device)
    assert values.shape == (num_out, depth)
    assert out.shape == (num_rows, num_out)
    assert out.dtype == x.dtype
    assert x.stride(1) == values.stride(1) == out.stride(1) == 1
    constants = {"WIDTH": num_out, "DEPTH": depth, "ROWS_OF_SCALE": scale_of_rows(values, scales), "GROUP": GROUP}
    stride_group = 0 if scales.shape[1] == 1 else scales.stride(1)
    if num_rows == 0:
        return out
    codes, code_scales = rows_to_fp8(x)
    arguments = codes, code_scales, values, scales, out, num_rows
    strides = values.stride(0), scales.stride(0), stride_group, out.stride(0)
    shape = f"N{num_out}_K{depth}"
    if num_rows <= MAX_VECTORS:
        config = config_for("fp8_vectors", x.device, shape, _VECTORS)
        grid = (cdiv(num_out, config.blocks["BLOCK_N"]),)
        rows = 1 if num_rows == 1 else MAX_VECTORS
        launch(_vectors_kernel, grid, *arguments, *strides, config=config, ROWS=rows, **constants)
        return out
    block_m = 16 if num_rows <= 16 else 64 if num_rows <= 256 else 128
    default = with_scales(_TILES[block_m], constants["ROWS_OF_SCALE"])
    config = config_for("fp8_tiles", x.device, f"M{block_m}_{shape}", default)
    grid = cdiv(num_rows, block_m), cdiv(num_out, config.blocks["BLOCK_N"])
    launch(_tiles_kernel, grid, *arguments, *strides, config=config, BLOCK_M=block_m, PRECISION="tf32", **constants)
    return out


def with_scales(config: Config, rows_of_scale: int) -> Config:
    """The configuration, with at most 64 columns where each has a scale of its own, which takes registers."""
    blocks = {"BLOCK_N": min(config.blocks["BLOCK_N"], 64 if rows_of_scale == 1 else GROUP)}
    return Config(blocks, config.num_warps, config.num_stages)
