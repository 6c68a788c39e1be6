"""Multiplies up to four rows, with or without a norm before, for a memory-bound decode step.

The inverse root mean square scales the finished sums. So squares are summed beside the products, without a separate
pass over the rows. Threads sum their own columns of the matrix and combine the sums once. The matrix's first tile is
requested before the kernel waits for its rows, and each other one while the tile before it is worked on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import round_to
from qwen35mm_kernels.gpu.early import starts_early, wait_for_inputs
from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, launch

# More rows go to the matrix units.
MAX_ROWS = 4
# By rows of x. A thread loads 16 bytes of each matrix row at a time. Several rows of x use more matrix rows, to share
# the norm.
_DEFAULTS = {1: Config({"BLOCK_N": 4, "BLOCK_K": 1024}, 4, 1), 4: Config({"BLOCK_N": 8, "BLOCK_K": 1024}, 4, 1)}
# Without a norm there is nothing to share, and matrices with few rows give more programs.
_PLAIN = _DEFAULTS[1]


@triton.jit
def _load_tile(rows_ptr, is_column, depth, DEPTH: tl.constexpr):
    return tl.load(rows_ptr + depth[None, :], mask=is_column[:, None] & (depth < DEPTH)[None, :], other=0.0)


@triton.jit
def _eighths(x):
    """[..., 2, 2, 2] as eight tensors [...], in one order for all."""
    a, b = tl.split(x)
    a0, a1 = tl.split(a)
    b0, b1 = tl.split(b)
    return tl.split(a0) + tl.split(a1) + tl.split(b0) + tl.split(b1)


@triton.jit
def _add_row(
    total, squares, weight, scale, x_ptr, delta_ptr, sum_ptr, place, stride_x, stride_delta, depth, sum_stop,
    DEPTH: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Adds one row's products with some columns of the matrix, and its squares there, eight in a thread."""
    is_depth = depth < DEPTH
    values = tl.load(x_ptr + place * stride_x + depth, mask=is_depth, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + place * stride_delta + depth, mask=is_depth, other=0.0).to(tl.float32)
        # Rounded before the norm, so that the norm uses the stored values.
        values = round_to(values.to(tl.float32) + delta, values.dtype)
        tl.store(sum_ptr + place * DEPTH + depth, values, mask=depth < sum_stop)
    values = values.to(tl.float32)
    if NORM:
        squares += tl.sum(tl.reshape(values * values, (BLOCK_K // 8, 8)), axis=1)
        values *= scale
    # One instruction a product: `tl.sum` would multiply and add apart.
    weights = _eighths(tl.reshape(weight, (BLOCK_N, BLOCK_K // 8, 2, 2, 2)))
    numbers = _eighths(tl.reshape(values, (BLOCK_K // 8, 2, 2, 2)))
    for i in tl.static_range(8):  # pyright: ignore
        total += weights[i] * numbers[i][None, :]
    return total, squares


@triton.jit(do_not_specialize=["num_rows"])
def _norm_linear_kernel(
    x_ptr, delta_ptr, norm_ptr, matrix_ptr, sum_ptr, out_ptr, num_rows, stride_x, stride_delta, stride_matrix, eps,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, SWIGLU: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of the matrix, with SWIGLU half gates and half up: some columns of out [up to ROWS, WIDTH], dense.

    x and delta are [num_rows, DEPTH]; the first program writes their sum, dense.
    """
    OWN: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    inner = tl.arange(0, BLOCK_N)
    columns = tl.program_id(0) * OWN + inner % OWN
    # The first program writes the sums.
    sum_stop = tl.where(tl.program_id(0) == 0, DEPTH, 0)
    is_column = columns < WIDTH
    rows_ptr = matrix_ptr + (columns + inner // OWN * WIDTH).to(tl.int64)[:, None] * stride_matrix
    places = tl.arange(0, BLOCK_K)
    # One variable for each row: as a dimension of one tile, they would go through shared memory.
    last = num_rows - 1
    total_0 = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    squares_0 = tl.zeros((BLOCK_K // 8,), tl.float32)
    total_1, total_2, total_3 = total_0, total_0, total_0
    squares_1, squares_2, squares_3 = squares_0, squares_0, squares_0
    coming = _load_tile(rows_ptr, is_column, places, DEPTH)
    wait_for_inputs(EARLY)
    for first in range(0, DEPTH, BLOCK_K):
        depth = first + places
        weight = coming.to(tl.float32)
        if not NORM:
            coming = _load_tile(rows_ptr, is_column, depth + BLOCK_K, DEPTH)
        scale = 1.0
        if NORM:
            scale += tl.load(norm_ptr + depth, mask=depth < DEPTH, other=0.0).to(tl.float32)
        total_0, squares_0 = _add_row(  # pyright: ignore
            total_0, squares_0, weight, scale, x_ptr, delta_ptr, sum_ptr, 0, stride_x, stride_delta, depth, sum_stop,
            DEPTH, NORM, ADD, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if ROWS > 1:
            # Missing rows repeat the last one.
            total_1, squares_1 = _add_row(  # pyright: ignore
                total_1, squares_1, weight, scale, x_ptr, delta_ptr, sum_ptr, tl.minimum(last, 1), stride_x,
                stride_delta, depth, sum_stop, DEPTH, NORM, ADD, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            total_2, squares_2 = _add_row(  # pyright: ignore
                total_2, squares_2, weight, scale, x_ptr, delta_ptr, sum_ptr, tl.minimum(last, 2), stride_x,
                stride_delta, depth, sum_stop, DEPTH, NORM, ADD, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            total_3, squares_3 = _add_row(  # pyright: ignore
                total_3, squares_3, weight, scale, x_ptr, delta_ptr, sum_ptr, tl.minimum(last, 3), stride_x,
                stride_delta, depth, sum_stop, DEPTH, NORM, ADD, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if NORM:
            # Not sooner: registers for both would leave room for half as many programs.
            coming = _load_tile(rows_ptr, is_column, depth + BLOCK_K, DEPTH)
    _finish(out_ptr, total_0, squares_0, 0, last, columns, eps, WIDTH, DEPTH, NORM, SWIGLU, BLOCK_N)
    if ROWS > 1:
        _finish(out_ptr, total_1, squares_1, 1, last, columns, eps, WIDTH, DEPTH, NORM, SWIGLU, BLOCK_N)
        _finish(out_ptr, total_2, squares_2, 2, last, columns, eps, WIDTH, DEPTH, NORM, SWIGLU, BLOCK_N)
        _finish(out_ptr, total_3, squares_3, 3, last, columns, eps, WIDTH, DEPTH, NORM, SWIGLU, BLOCK_N)


@triton.jit
def _finish(
    out_ptr, total, squares, place, last, columns, eps,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes row `place`'s columns of out from the threads' sums."""
    sums = tl.sum(total, axis=1)
    if NORM:
        sums *= tl.rsqrt(tl.sum(squares, axis=0) / DEPTH + eps)
    mask = columns < tl.where(place <= last, WIDTH, 0)
    if SWIGLU:
        # The other half's value at each gate's position.
        inner = tl.arange(0, BLOCK_N)
        pairs = inner[:, None] + BLOCK_N // 2 == inner[None, :]
        up = tl.sum(tl.where(pairs, sums[None, :], 0.0), axis=1)  # pyright: ignore
        sums = sums * tl.sigmoid(sums) * up
        mask = mask & (inner < BLOCK_N // 2)
    tl.store(out_ptr + place * WIDTH + columns, round_to(sums, out_ptr.dtype.element_ty), mask=mask)


def norm_linear(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    matrix: torch.Tensor,
    *,
    swiglu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch. The last dimension of x, delta and the matrix must be dense."""
    (num_rows, depth), width = x.shape, len(matrix) // (1 + swiglu)
    assert 1 <= num_rows <= MAX_ROWS, num_rows
    assert delta is None or delta.shape == x.shape
    assert matrix.shape == (width * (1 + swiglu), depth)
    assert norm_weight is None or (norm_weight.shape, norm_weight.stride()) == ((depth,), (1,))
    assert x.stride(1) == matrix.stride(1) == 1
    assert delta is None or delta.stride(1) == 1
    total = x if delta is None else torch.empty(num_rows, depth, dtype=x.dtype, device=x.device)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    form = 1 if num_rows == 1 else MAX_ROWS
    shape, default = f"R{form}_K{depth}", _DEFAULTS[form]
    if norm_weight is None:
        shape, default = f"{shape}_plain", _PLAIN
    config = config_for("norm_linear", x.device, shape, default)
    launch(
        _norm_linear_kernel,
        (cdiv(width, config.blocks["BLOCK_N"] // (1 + swiglu)),),
        *(x, x if delta is None else delta, x if norm_weight is None else norm_weight, matrix, total, out),
        *(num_rows, x.stride(0), 0 if delta is None else delta.stride(0), matrix.stride(0), eps),
        config=config,
        WIDTH=width,
        DEPTH=depth,
        NORM=norm_weight is not None,
        ADD=delta is not None,
        SWIGLU=swiglu,
        ROWS=form,
        EARLY=starts_early(x.device),
    )
    return total, out
