"""Products with integer weights and scales (layout: `reference.integers`).

One row uses a matrix-vector kernel, which converts integers to floats in registers. Several rows use the matrix units,
converting a tile of weights at a time to x's dtype: weights are their first operand, which Hopper takes from registers,
so that no weight goes through shared memory once more. Few columns of out give few programs, so their sums are cut into
parts, which a second kernel adds in order. For more rows than a tile has, tiles would convert weights repeatedly. So
weights are converted once, a slice of the matrix at a time, and multiplied by cuBLAS. A row's bits depend on the number
of rows, which selects the kernel, but not on the other rows' values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import dot, round_to
from qwen35mm_kernels.gpu.launch import (
    Config,
    cdiv,
    config_for,
    launch,
    next_power_of_2,
    num_multiprocessors,
)

# By number of warps, which grows with the words of a row. A thread takes four words at a time.
_VECTOR = {warps: Config({"BLOCK_N": 4, "WORDS": 128 * warps}, warps, 1) for warps in (1, 2, 4)}
# By the largest number of rows: (for few columns of out, where a program must have more in flight; for many). 64
# columns and 4 warps are what a Hopper card's matrix units take.
_TILES = {
    16: (Config({"BLOCK_N": 64, "BLOCK_K": 128}, 4, 6), Config({"BLOCK_N": 64, "BLOCK_K": 128}, 4, 4)),
    64: (Config({"BLOCK_N": 64, "BLOCK_K": 128}, 4, 3), Config({"BLOCK_N": 64, "BLOCK_K": 128}, 4, 3)),
}
_UNPACKED = Config({"BLOCK_N": 16, "BLOCK_K": 256}, 4, 1)
# Weights of a slice: 32 MiB in bfloat16, which fits into a large card's L2 cache.
_SLICE = 2**24
# So many columns a multiprocessor count as few.
_FEW_COLUMNS = 64
# Parts of a sum: by turns of so many columns of x, for programs of so many columns of out. At most so many parts and
# programs; and so many turns fewer must be worth a second launch. Parts decide bits: no card's own numbers are here.
_TURN, _COLUMNS, _MAX_PARTS, _PROGRAMS, _WORTH = 128, 64, 8, 256, 8


@triton.jit
def _values(word, S: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr):
    """Values S of words as float32: puts the bits into the lowest bits of a large float, then subtracts that float."""
    FIT: tl.constexpr = 23 // BITS
    PLACE: tl.constexpr = BITS * (S % FIT)
    # 2^(23 - PLACE), with the sign bit flipped for 8 bits.
    MAGIC: tl.constexpr = (150 - PLACE) * 2**23 + (BITS // 8) * 2 ** (PLACE + 7)
    MASK: tl.constexpr = (2**BITS - 1) << PLACE
    LARGE: tl.constexpr = 2.0 ** (23 - PLACE) + BIAS
    if S >= FIT:
        word = word >> (BITS * FIT)
    return ((word & MASK) ^ MAGIC).to(tl.float32, bitcast=True) - LARGE


@triton.jit
def _pair(word, S: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr):
    """Values S and S + 1 of words, in a last dimension."""
    return tl.join(_values(word, S, BITS, BIAS), _values(word, S + 1, BITS, BIAS))


@triton.jit
def _vector_kernel(
    x_ptr, words_ptr, scales_ptr, minima_ptr, out_ptr, stride_words, stride_scale,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr,
    BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of out [1, WIDTH]. Threads sum their own columns of the matrix and combine the sums once.

    A thread has four words of a row. With 128 words a warp, x is in the threads that use it.

    BIAS: bias of unsigned codes. PARTS: groups in four words, 1 or 2.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    UNIT: tl.constexpr = 4 * PER_WORD
    NUM_WORDS: tl.constexpr = 4 * ((DEPTH + UNIT - 1) // UNIT)
    STEPS: tl.constexpr = PER_WORD // PARTS
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < WIDTH
    places, fours = tl.arange(0, WORDS), tl.arange(0, WORDS // 4)
    word_rows = words_ptr + columns.to(tl.int64)[:, None] * stride_words
    scale_rows = columns.to(tl.int64)[:, None] * stride_scale
    total = tl.zeros((BLOCK_N, WORDS // 4), tl.float32)
    for first in range(0, NUM_WORDS, WORDS):
        mask = is_column[:, None] & (first + places < NUM_WORDS)[None, :]
        word = tl.load(word_rows + (first + places)[None, :], mask=mask, other=0)
        units = first // 4 + fours
        for part in tl.static_range(PARTS):  # pyright: ignore
            sums = tl.zeros((BLOCK_N, WORDS), tl.float32)
            for step in tl.static_range(0, STEPS, 2):  # pyright: ignore
                # Eight neighbours of x for a thread's four words.
                depth = units[:, None] * UNIT + 4 * (part * STEPS + step) + tl.arange(0, 8)[None, :]
                eight = tl.load(x_ptr + depth, mask=depth < DEPTH, other=0.0).to(tl.float32)
                x, next_x = tl.split(tl.reshape(eight, (WORDS // 4, 4, 2)))
                x, next_x = tl.reshape(x, (WORDS,)), tl.reshape(next_x, (WORDS,))
                sums += _values(word, part * STEPS + step, BITS, BIAS) * x[None, :]
                sums += _values(word, part * STEPS + step + 1, BITS, BIAS) * next_x[None, :]
            own_depth = units * UNIT + part * (UNIT // PARTS)
            is_scale = is_column[:, None] & (own_depth < DEPTH)[None, :]
            scale_ptrs = scale_rows + (own_depth // GROUP)[None, :]
            scale = tl.load(scales_ptr + scale_ptrs, mask=is_scale, other=0.0).to(tl.float32)
            # Sum within a thread.
            total += tl.sum(tl.reshape(sums, (BLOCK_N, WORDS // 4, 4)), axis=2) * scale
            if HAS_MINIMA:
                # Read x again: summing it beside its products would exchange data between threads at each step.
                own = own_depth[:, None] + tl.arange(0, UNIT // PARTS)[None, :]
                x_sums = tl.sum(tl.load(x_ptr + own, mask=own < DEPTH, other=0.0).to(tl.float32), axis=1)
                minimum = tl.load(minima_ptr + scale_ptrs, mask=is_scale, other=0.0).to(tl.float32)
                total += tl.expand_dims(x_sums, 0) * minimum
    tl.store(out_ptr + columns, round_to(tl.sum(total, axis=1), out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _tile(
    words_ptr, scales_ptr, minima_ptr, word_rows, scale_rows, is_row, first, DEPTH: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights `first` to first + BLOCK_K of BLOCK_N rows of a matrix, float32 [BLOCK_N, BLOCK_K].

    word_rows, scale_rows: where the rows begin, int64 [BLOCK_N].

    Only joins and views lie between the words and the result: Triton can read the words in a product's own layout.

    SHARED: neighbours in BLOCK_K that share a scale.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    UNITS: tl.constexpr = BLOCK_K // (4 * PER_WORD)
    NUM_UNITS: tl.constexpr = (DEPTH + 4 * PER_WORD - 1) // (4 * PER_WORD)
    units, four, parts = tl.arange(0, UNITS), tl.arange(0, 4), tl.arange(0, BLOCK_K // SHARED)
    word_ptrs = words_ptr + word_rows[:, None, None]
    word_ptrs += (4 * units[:, None] + four[None, :])[None, :, :] + first // PER_WORD
    groups = first // GROUP + parts if SHARED == GROUP else (first + parts * SHARED) // GROUP
    scale_ptrs = scale_rows[:, None] + groups[None, :]
    mask, scale_mask = is_row[:, None, None], is_row[:, None]
    if DEPTH % BLOCK_K != 0:
        mask &= (first // (4 * PER_WORD) + units < NUM_UNITS)[None, :, None]
        scale_mask &= (first + parts * SHARED < DEPTH)[None, :]
    word = tl.load(word_ptrs, mask=mask, other=0)
    scale = tl.load(scales_ptr + scale_ptrs, mask=scale_mask, other=0.0).to(tl.float32)
    values = tl.join(_pair(word, 0, BITS, BIAS), _pair(word, 2, BITS, BIAS))  # pyright: ignore
    values = tl.permute(values, (0, 1, 4, 2, 3))
    if BITS == 4:
        others = tl.join(_pair(word, 4, BITS, BIAS), _pair(word, 6, BITS, BIAS))  # pyright: ignore
        values = tl.join(values, tl.permute(others, (0, 1, 4, 2, 3)))
        values = tl.permute(values, (0, 1, 5, 2, 3, 4))
    weight = tl.reshape(values, (BLOCK_N, BLOCK_K // SHARED, SHARED)) * scale[:, :, None]
    if HAS_MINIMA:
        minimum = tl.load(minima_ptr + scale_ptrs, mask=scale_mask, other=0.0).to(tl.float32)
        weight += minimum[:, :, None]
    return tl.reshape(weight, (BLOCK_N, BLOCK_K))


@triton.jit
def products(
    x_ptr, words_ptr, scales_ptr, minima_ptr, x_rows, word_rows, scale_rows, is_row, is_column, begin, end,
    DEPTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr, BIAS: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of a matrix times BLOCK_M rows of x, float32 [BLOCK_N, BLOCK_M], over columns `begin` to `end`.

    x_rows, word_rows, scale_rows: where rows of x and of the matrix begin, int64.

    is_row, is_column: which rows of x and of the matrix there are.
    """
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_rows[None, :] + depth[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(begin, end, BLOCK_K):
        x_mask = is_row[None, :]
        if DEPTH % BLOCK_K != 0:
            x_mask &= (first + depth < DEPTH)[:, None]
        x = tl.load(x_ptrs + first, mask=x_mask, other=0.0)
        weight = _tile(
            words_ptr, scales_ptr, minima_ptr, word_rows, scale_rows, is_column, first,
            DEPTH, BITS, GROUP, HAS_MINIMA, BIAS, SHARED, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = dot(round_to(weight, x.dtype), x, total, PRECISION)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _tiles_kernel(
    x_ptr, words_ptr, scales_ptr, minima_ptr, out_ptr, num_rows, stride_words, stride_scale, stride_x, stride_out,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr,
    BIAS: tl.constexpr, SHARED: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows and BLOCK_N columns of out [N, WIDTH].

    SPAN: columns of x in a part of the sum; below DEPTH out is [parts, N, WIDTH], dense.
    """
    begin, end = 0, DEPTH
    if SPAN < DEPTH:
        begin = tl.program_id(0) * SPAN
        end = tl.minimum(begin + SPAN, DEPTH)
        out_ptr += tl.program_id(0) * num_rows * WIDTH
    rows = tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < WIDTH
    x_rows = rows.to(tl.int64) * stride_x
    word_rows, scale_rows = columns.to(tl.int64) * stride_words, columns.to(tl.int64) * stride_scale
    total = products(
        x_ptr, words_ptr, scales_ptr, minima_ptr, x_rows, word_rows, scale_rows, is_row, is_column, begin, end,
        DEPTH, BITS, GROUP, HAS_MINIMA, BIAS, SHARED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * stride_out + columns[:, None]
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(
    parts_ptr, out_ptr, num_rows, stride_out, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """One row, BLOCK columns: the sum of parts [PARTS, N, WIDTH] in their order, dense."""
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):  # pyright: ignore
        total += tl.load(parts_ptr + (part * num_rows + row) * WIDTH + columns, mask=columns < WIDTH, other=0.0)
    out_ptrs = out_ptr + row.to(tl.int64) * stride_out + columns
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _unpacked_kernel(
    words_ptr, scales_ptr, minima_ptr, matrix_ptr, stride_words, stride_scale,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr,
    BIAS: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows and BLOCK_K columns of the matrix [WIDTH, DEPTH] in its dtype."""
    columns, first = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_K
    word_rows, scale_rows = columns.to(tl.int64) * stride_words, columns.to(tl.int64) * stride_scale
    weight = _tile(
        words_ptr, scales_ptr, minima_ptr, word_rows, scale_rows, columns < WIDTH, first,
        DEPTH, BITS, GROUP, HAS_MINIMA, BIAS, SHARED, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    depth = first + tl.arange(0, BLOCK_K)
    matrix_ptrs = matrix_ptr + columns.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    mask = (columns < WIDTH)[:, None] & (depth < DEPTH)[None, :]
    tl.store(matrix_ptrs, round_to(weight, matrix_ptr.dtype.element_ty), mask=mask)


def integer_linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    bits: int,
    width: int,
) -> torch.Tensor:
    """One launch for up to 64 rows, or two; for more, one and a product for each slice of up to 2^24 weights.

    The last dimension of x, words, scales, minima and out must be dense.
    """
    (num_rows, depth), num_out = x.shape, len(words)
    out = x.new_empty(num_rows, num_out) if out is None else out
    assert words.shape[1] == cdiv(depth, 32) * bits
    assert out.shape == (num_rows, num_out)
    assert out.dtype == x.dtype
    assert x.stride(1) == out.stride(1) == 1
    constants = {"WIDTH": num_out, **constants_of(words, scales, minima, depth, bits=bits, width=width)}
    if num_rows == 0:
        return out
    arguments = x, words, scales, scales if minima is None else minima, out
    strides = words.stride(0), scales.stride(0)
    shape = f"b{bits}_N{num_out}_K{depth}"
    if num_rows == 1:
        default = _VECTOR[min(4, next_power_of_2(cdiv(words.shape[1], 128)))]
        config = config_for("integer_vector", x.device, shape, default)
        constants["PARTS"] = max(1, 128 // bits // width)
        grid = (cdiv(num_out, config.blocks["BLOCK_N"]),)
        launch(_vector_kernel, grid, *arguments, *strides, config=config, **constants)
        return out
    form = next((most for most in _TILES if num_rows <= most), None)
    if form is None:
        step = max(1, _SLICE // depth)
        matrix = x.new_empty(min(step, num_out), depth)
        config, constants["SHARED"] = _UNPACKED, neighbours(width, _UNPACKED)
        for first in range(0, num_out, step):
            rows = slice(first, min(first + step, num_out))
            constants["WIDTH"] = rows.stop - rows.start
            parts = words[rows], scales[rows], (scales if minima is None else minima)[rows]
            grid = cdiv(constants["WIDTH"], config.blocks["BLOCK_N"]), cdiv(depth, config.blocks["BLOCK_K"])
            launch(_unpacked_kernel, grid, *parts, matrix, *strides, config=config, **constants)
            torch.mm(x, matrix[: constants["WIDTH"]].T, out=out[:, rows])
        return out
    is_wide = num_out > _FEW_COLUMNS * num_multiprocessors(x.device)
    default = halved(_TILES[form][is_wide], x.dtype)
    config = config_for("integer_tiles", x.device, f"M{form}_{shape}", default)
    assert _TURN % config.blocks["BLOCK_K"] == 0, f"a turn of {_TURN} columns must be whole blocks, got {config}"
    constants["SHARED"] = neighbours(width, config)
    constants["PRECISION"] = "ieee" if x.dtype == torch.float32 else "tf32"
    constants["SPAN"] = span = columns_of_a_part(num_out, depth)
    num_parts = cdiv(depth, span)
    sums = out if num_parts == 1 else x.new_empty(num_parts, num_rows, num_out, dtype=torch.float32)
    grid = num_parts, cdiv(num_out, config.blocks["BLOCK_N"])
    sizes = num_rows, *strides, x.stride(0), sums.stride(-2)
    launch(_tiles_kernel, grid, *arguments[:4], sums, *sizes, config=config, BLOCK_M=form, **constants)
    if num_parts > 1:
        grid = num_rows, cdiv(num_out, 512)
        how = {"WIDTH": num_out, "PARTS": num_parts, "BLOCK": 512}
        launch(_sum_kernel, grid, sums, out, num_rows, out.stride(0), config=Config(num_warps=4), **how)
    return out


def columns_of_a_part(num_out: int, depth: int) -> int:
    """Columns of x in a part of a tile's sum, a multiple of a turn's; `depth` where the sum stays whole."""
    turns = cdiv(depth, _TURN)
    fewer = cdiv(turns, max(1, min(_MAX_PARTS, _PROGRAMS // cdiv(num_out, _COLUMNS))))
    return fewer * _TURN if turns - fewer >= _WORTH else depth


def constants_of(
    words: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, depth: int, *, bits: int, width: int
) -> dict[str, Any]:
    """A format's constants in the kernels, for matrices [..., M, depth]."""
    assert bits in (4, 8)
    assert width == 16 or width % 32 == 0
    assert words.shape == (*scales.shape[:-1], cdiv(depth, 32) * bits)
    assert scales.shape[-1] == cdiv(depth, width)
    assert minima is None or (minima.shape, minima.stride()) == (scales.shape, scales.stride())
    # A dimension of size 1 is dense with any stride.
    assert words.stride(-1) == 1
    assert scales.stride(-1) == 1 or scales.shape[-1] == 1
    bias = 128 if bits == 8 else 8 if minima is None else 0
    return {"DEPTH": depth, "BITS": bits, "GROUP": width, "HAS_MINIMA": minima is not None, "BIAS": bias}


def neighbours(width: int, config: Config) -> int:
    """SHARED of a tile: the largest power of two that divides a group's columns, at most the tile's."""
    return min(width & -width, config.blocks["BLOCK_K"])


def halved(config: Config, dtype: torch.dtype) -> Config:
    """A configuration for bfloat16; in float32 with half as many columns at a time, which take the same memory."""
    if dtype != torch.float32:
        return config
    blocks = {**config.blocks, "BLOCK_K": config.blocks["BLOCK_K"] // 2}
    return Config(blocks, config.num_warps, config.num_stages)
