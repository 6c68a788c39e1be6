"""Products with weights that are integers beside scales (the layout: `reference.integers`).

A row alone goes through a matrix-vector kernel, which makes floats of integers in registers; several go through the
matrix units, a tile of weights at a time made numbers of x's dtype. A row's bits depend on which kernel and tile it
gets by the number of rows, and not on what the others hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import dot, round_to
from qwen35mm_kernels.gpu.launch import (
    Config,
    capability,
    cdiv,
    config_for,
    launch,
    next_power_of_2,
    num_multiprocessors,
)

# By the most words of a row that it is for: four a thread, and a row in one step up to the last.
_VECTOR = {warps: Config({"BLOCK_N": 4, "WORDS": 128 * warps}, warps, 1) for warps in (1, 2, 4)}
# By the most rows that a form is for, the last for all more: for few columns of out, of which narrow tiles make enough
# programs for a card, and for many.
_TILES = {
    16: (Config({"BLOCK_N": 16, "BLOCK_K": 128}, 4, 4), Config({"BLOCK_N": 32, "BLOCK_K": 128}, 4, 4)),
    64: (Config({"BLOCK_N": 32, "BLOCK_K": 128}, 4, 3), Config({"BLOCK_N": 64, "BLOCK_K": 64}, 4, 3)),
    256: (Config({"BLOCK_N": 32, "BLOCK_K": 128}, 4, 2), Config({"BLOCK_N": 64, "BLOCK_K": 64}, 4, 3)),
    512: (Config({"BLOCK_N": 128, "BLOCK_K": 64}, 8, 3),) * 2,
}
# From Hopper on, whose matrix units read shared memory: half the threads hold all sums, and two programs take turns,
# one making floats while the other multiplies.
_HOPPER = {**_TILES, 512: (Config({"BLOCK_N": 128, "BLOCK_K": 64}, 4, 3),) * 2}
# Columns to a multiprocessor up to which they are few.
_FEW_COLUMNS = 64


@triton.jit
def _values(word, S: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr):
    """Values S of words, float32: placed into the lowest bits of a large float, which is taken away again."""
    FIT: tl.constexpr = 23 // BITS
    PLACE: tl.constexpr = BITS * (S % FIT)
    # 2^(23 - PLACE), and of eight bits the sign turned over.
    MAGIC: tl.constexpr = (150 - PLACE) * 2**23 + (BITS // 8) * 2 ** (PLACE + 7)
    MASK: tl.constexpr = (2**BITS - 1) << PLACE
    LARGE: tl.constexpr = 2.0 ** (23 - PLACE) + BIAS
    if S >= FIT:
        word = word >> (BITS * FIT)
    return ((word & MASK) ^ MAGIC).to(tl.float32, bitcast=True) - LARGE


@triton.jit
def _vector_kernel(
    x_ptr, words_ptr, scales_ptr, minima_ptr, out_ptr, stride_words, stride_scale,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr,
    BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of out [1, WIDTH]. Threads add up their own columns of the matrix, and once each other's.

    Four words of a row are a thread's. With 128 of them to a warp x lies in the threads that it is multiplied in.

    BIAS: that unsigned codes have. PARTS: groups in four words, 1 or 2.
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
            for step in tl.static_range(STEPS):  # pyright: ignore
                depth = (first + places) // 4 * UNIT + 4 * (part * STEPS + step) + places % 4
                x = tl.load(x_ptr + depth, mask=depth < DEPTH, other=0.0).to(tl.float32)
                sums += _values(word, part * STEPS + step, BITS, BIAS) * x[None, :]
            own_depth = units * UNIT + part * (UNIT // PARTS)
            is_scale = is_column[:, None] & (own_depth < DEPTH)[None, :]
            scale_ptrs = scale_rows + (own_depth // GROUP)[None, :]
            scale = tl.load(scales_ptr + scale_ptrs, mask=is_scale, other=0.0).to(tl.float32)
            # What a thread has, summed up.
            total += tl.sum(tl.reshape(sums, (BLOCK_N, WORDS // 4, 4)), axis=2) * scale
            if HAS_MINIMA:
                # Read once more: sums of x beside those of its products would go from thread to thread at each step.
                own = own_depth[:, None] + tl.arange(0, UNIT // PARTS)[None, :]
                x_sums = tl.sum(tl.load(x_ptr + own, mask=own < DEPTH, other=0.0).to(tl.float32), axis=1)
                minimum = tl.load(minima_ptr + scale_ptrs, mask=is_scale, other=0.0).to(tl.float32)
                total += tl.expand_dims(x_sums, 0) * minimum
    tl.store(out_ptr + columns, round_to(tl.sum(total, axis=1), out_ptr.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["num_rows"])
def _tiles_kernel(
    x_ptr, words_ptr, scales_ptr, minima_ptr, out_ptr, num_rows, stride_words, stride_scale, stride_x, stride_out,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr,
    BIAS: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows and BLOCK_N columns of out [N, WIDTH]. Programs that follow each other have the same weights.

    SHARED: neighbours in BLOCK_K that have a scale in common.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    UNITS: tl.constexpr = BLOCK_K // (4 * PER_WORD)
    NUM_UNITS: tl.constexpr = (DEPTH + 4 * PER_WORD - 1) // (4 * PER_WORD)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth, is_row, is_column = tl.arange(0, BLOCK_K), rows < num_rows, columns < WIDTH
    units, four = tl.arange(0, UNITS), tl.arange(0, 4)
    parts = tl.arange(0, BLOCK_K // SHARED)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x + depth[None, :]
    word_ptrs = words_ptr + columns.to(tl.int64)[:, None, None] * stride_words
    word_ptrs += (4 * units[:, None] + four[None, :])[None, :, :]
    scale_rows = columns.to(tl.int64)[:, None] * stride_scale
    shifts = BITS * tl.arange(0, PER_WORD)[None, None, :, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, DEPTH, BLOCK_K):
        x_mask, mask, scale_mask = is_row[:, None], is_column[:, None, None], is_column[:, None]
        group = (first + parts * SHARED) // GROUP
        if DEPTH % BLOCK_K != 0:
            x_mask &= (first + depth < DEPTH)[None, :]
            mask &= (first // (4 * PER_WORD) + units < NUM_UNITS)[None, :, None]
            scale_mask &= (first + parts * SHARED < DEPTH)[None, :]
        x = tl.load(x_ptrs + first, mask=x_mask, other=0.0)
        word = tl.load(word_ptrs + first // PER_WORD, mask=mask, other=0)
        scale = tl.load(scales_ptr + scale_rows + group[None, :], mask=scale_mask, other=0.0).to(tl.float32)
        code = (word[:, :, None, :] >> shifts) & (2**BITS - 1)
        # As in `_values`.
        large = (code ^ (0x4B000080 if BITS == 8 else 0x4B000000)).to(tl.float32, bitcast=True)
        weight = tl.reshape(large - (8388608.0 + BIAS), (BLOCK_N, BLOCK_K // SHARED, SHARED)) * scale[:, :, None]
        if HAS_MINIMA:
            minimum = tl.load(minima_ptr + scale_rows + group[None, :], mask=scale_mask, other=0.0).to(tl.float32)
            weight += minimum[:, :, None]
        rounded = round_to(tl.reshape(weight, (BLOCK_N, BLOCK_K)), x.dtype)
        total = dot(x, tl.trans(rounded), total, PRECISION)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


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
    """In one launch. The last dimension of x, words, scales, minima and out is dense."""
    (num_rows, depth), num_out = x.shape, len(words)
    out = x.new_empty(num_rows, num_out) if out is None else out
    assert bits in (4, 8)
    assert width == 16 or width % 32 == 0
    assert words.shape == (num_out, cdiv(depth, 32) * bits)
    assert scales.shape == (num_out, cdiv(depth, width))
    assert minima is None or (minima.shape, minima.stride()) == (scales.shape, scales.stride())
    assert out.shape == (num_rows, num_out)
    assert out.dtype == x.dtype
    # A column of one is dense whatever its stride.
    assert x.stride(1) == words.stride(1) == out.stride(1) == 1
    assert scales.stride(1) == 1 or scales.shape[1] == 1
    if num_rows == 0:
        return out
    arguments = x, words, scales, scales if minima is None else minima, out
    strides = words.stride(0), scales.stride(0)
    constants = {"WIDTH": num_out, "DEPTH": depth, "BITS": bits, "GROUP": width, "HAS_MINIMA": minima is not None}
    constants["BIAS"] = 128 if bits == 8 else 8 if minima is None else 0
    shape = f"b{bits}_N{num_out}_K{depth}"
    if num_rows == 1:
        default = _VECTOR[min(4, next_power_of_2(cdiv(words.shape[1], 128)))]
        config = config_for("integer_vector", x.device, shape, default)
        constants["PARTS"] = max(1, 128 // bits // width)
        grid = (cdiv(num_out, config.blocks["BLOCK_N"]),)
        launch(_vector_kernel, grid, *arguments, *strides, config=config, **constants)
        return out
    form = next((most for most in _TILES if num_rows <= most), max(_TILES))
    block_m = min(form, 128)
    is_wide = num_out > _FEW_COLUMNS * num_multiprocessors(x.device)
    default = (_TILES if capability(x.device) < 90 else _HOPPER)[form][is_wide]
    config = config_for("integer_tiles", x.device, f"R{form}_M{block_m}_{shape}", default)
    grid = cdiv(num_rows, block_m), cdiv(num_out, config.blocks["BLOCK_N"])
    # The largest power of two that divides the width.
    constants["SHARED"] = min(width & -width, config.blocks["BLOCK_K"])
    constants["PRECISION"] = "ieee" if x.dtype == torch.float32 else "tf32"
    sizes = num_rows, *strides, x.stride(0), out.stride(0)
    launch(_tiles_kernel, grid, *arguments, *sizes, config=config, BLOCK_M=block_m, **constants)
    return out
