"""Reads and writes rows of keys and values in each of the cache's formats (`qwen35mm_kernels.kv_formats`).

A format's name is a constexpr: plain numbers of the wanted type need only a load or a store. Codes become floats by
integer arithmetic and float16, the same on every card. Only cards of compute capability 8.9 or newer convert e4m3 in
hardware; elsewhere Triton chooses the rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.arithmetic import round_to
from qwen35mm_kernels.kv_formats import FORMATS, GROUP, KVFormat, KVFormats, formats_of

_GROUP = tl.constexpr(GROUP)
# Two-byte words of a block: one of its scale, and those of its codes.
_WORDS, _INT4_WORDS = tl.constexpr(1 + GROUP // 2), tl.constexpr(1 + GROUP // 4)
_INT8_LARGEST = tl.constexpr(FORMATS["int8"].largest)
_E4M3_LARGEST = tl.constexpr(FORMATS["fp8"].largest)
_E5M2_LARGEST = tl.constexpr(FORMATS["fp8_e5m2"].largest)
# Adding and subtracting it rounds a number of up to 2^22 to an integer, ties to even.
_TO_WHOLE = tl.constexpr(12582912.0)


def known_formats(formats: KVFormats | None, k_cache: torch.Tensor, v_cache: torch.Tensor, head_dim: int) -> KVFormats:
    """The formats of a layer's cache. Asserts that kernels support them and that the tensors' rows fit."""
    found = formats_of(formats, k_cache, v_cache)
    assert k_cache.shape[:2] == v_cache.shape[:2]
    for format, cache in zip(found, (k_cache, v_cache), strict=True):
        assert format.on_cards, format
        assert (cache.dtype, cache.shape[2]) == (format.dtype, format.row_width(head_dim))
        assert cache.stride(2) == 1
        # Codes are read two bytes at a time.
        assert not format.bits or not any(n % 2 for n in (cache.data_ptr(), *cache.stride()[:2]))
    return found


def kept_as(dtype: torch.dtype, k_format: KVFormat, v_format: KVFormat) -> str:
    """The part of a shape's name in a card's table for the formats of keys and values; empty for the model's type."""
    return "" if k_format.dtype == v_format.dtype == dtype else f"_{k_format.name}_{v_format.name}"


@triton.jit
def load_rows(rows, offset, mask, dtype: tl.constexpr, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Loads values [N, HEAD_DIM] in `dtype`. Rounds each product of code and scale once.

    rows + offset: pointers [N, 1] to the starts of rows; mask: [N, 1] or None; masked rows give zeros.
    """
    if rows.dtype.scalar.element_ty == tl.uint8:
        # Blocks begin at even bytes, so a load takes at most two bytes.
        NUM_GROUPS: tl.constexpr = HEAD_DIM // _GROUP
        WORDS: tl.constexpr = _INT4_WORDS if FORMAT == "int4" else _WORDS
        block = (rows + offset).to(tl.pointer_type(tl.uint16)) + WORDS * tl.arange(0, NUM_GROUPS)[None, :]
        scale = (_load(block, mask).to(tl.uint32) << 16).to(tl.float32, bitcast=True)[:, :, None]
        words = block[:, :, None] + (1 + tl.arange(0, WORDS - 1)[None, None, :])
        word = _load(words, None if mask is None else mask[:, :, None])
        if FORMAT == "int4":
            first = _joined(_values_4(word, scale, dtype), _values_4(word >> 8, scale, dtype))
            second = _joined(_values_4(word >> 4, scale, dtype), _values_4(word >> 12, scale, dtype))
            values = tl.permute(tl.join(first, second), (0, 1, 3, 2))
        else:
            values = _joined(_values_8(word << 8, scale, dtype, FORMAT), _values_8(word & 0xFF00, scale, dtype, FORMAT))
        values = tl.reshape(values, (values.shape[0], HEAD_DIM))
    else:
        values = _load(rows + (offset + tl.arange(0, HEAD_DIM)[None, :]), mask)
        if values.dtype != dtype:
            values = round_to(values.to(tl.float32), dtype)
    return values


@triton.jit
def store_rows(rows, values, mask, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Writes float32 values [N, HEAD_DIM], rounded once, to rows [N, 1] under mask [N, 1]. NaN stays NaN."""
    if rows.dtype.scalar.element_ty == tl.uint8:
        groups = tl.reshape(values, (values.shape[0], HEAD_DIM // _GROUP, _GROUP))
        top, bottom = tl.max(groups, axis=2), tl.min(groups, axis=2)
        extreme = tl.where(top > -bottom, top, bottom)  # pyright: ignore
        if FORMAT == "int4":
            scale = extreme * -0.125
        else:
            largest: tl.constexpr = (
                _INT8_LARGEST if FORMAT == "int8" else _E4M3_LARGEST if FORMAT == "fp8" else _E5M2_LARGEST
            )
            scale = tl.div_rn(tl.abs(extreme), tl.full(extreme.shape, largest, tl.float32))
        # A maximum treats NaN differently from card to card.
        is_nan = tl.max((groups != groups).to(tl.int32), axis=2) != 0
        kept = round_to(tl.where(is_nan, float("nan"), scale), tl.bfloat16)  # pyright: ignore
        scale = kept.to(tl.float32)
        divides = (tl.abs(scale) > 0) & (tl.abs(scale) < float("inf"))
        divisor = tl.broadcast_to(tl.where(divides, scale, 1.0)[:, :, None], groups.shape)
        steps = tl.where(divides[:, :, None], tl.div_rn(groups, divisor), 0.0)
        WORDS: tl.constexpr = _INT4_WORDS if FORMAT == "int4" else _WORDS
        block = rows + 2 * WORDS * tl.arange(0, HEAD_DIM // _GROUP)[None, :]
        bits = kept.to(tl.uint16, bitcast=True)
        tl.store(block, (bits & 0xFF).to(tl.uint8), mask=mask)
        tl.store(block + 1, (bits >> 8).to(tl.uint8), mask=mask)
        if FORMAT == "int4":
            whole = (_clamped(steps, -8.0, 7.0) + _TO_WHOLE) - _TO_WHOLE + 8.0
            halves = tl.reshape(whole.to(tl.int32), (values.shape[0], HEAD_DIM // _GROUP, 2, _GROUP // 2))
            low, high = tl.split(tl.permute(halves, (0, 1, 3, 2)))
            code = low | (high << 4)
        elif FORMAT == "int8":
            code = ((_clamped(steps, -_INT8_LARGEST, _INT8_LARGEST) + _TO_WHOLE) - _TO_WHOLE).to(tl.int32) & 0xFF
        elif FORMAT == "fp8_e5m2":
            code = _float_code(_clamped(steps, -_E5M2_LARGEST, _E5M2_LARGEST), 2, 15)
        else:
            tl.static_assert(FORMAT == "fp8")
            code = _float_code(_clamped(steps, -_E4M3_LARGEST, _E4M3_LARGEST), 3, 7)
        place = 2 + tl.arange(0, code.shape[2])[None, None, :]
        tl.store(block[:, :, None] + place, code.to(tl.uint8), mask=mask[:, :, None])
    else:
        if FORMAT == "f16":
            values = tl.where(values != values, values, _clamped(values, -65504.0, 65504.0))
        kept = round_to(values, rows.dtype.scalar.element_ty)
        tl.store(rows + tl.arange(0, HEAD_DIM)[None, :], kept, mask=mask)


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)


@triton.jit
def _values_8(bits, scale, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Values of codes in the upper bytes of uint16, lower bytes zero. Moves an exact power of two into the scale."""
    if FORMAT == "int8":
        steps, unit = bits.to(tl.int16, bitcast=True), 2.0**-8
    elif FORMAT == "fp8_e5m2":
        steps, unit = bits.to(tl.float16, bitcast=True), 1.0
    else:
        tl.static_assert(FORMAT == "fp8")
        # A float16 with the same bits has an exponent lower by eight.
        steps, unit = ((bits & 0x8000) | ((bits & 0x7F00) >> 1)).to(tl.float16, bitcast=True), 256.0
    return round_to(steps.to(tl.float32) * (scale * unit), dtype)


@triton.jit
def _values_4(bits, scale, dtype: tl.constexpr):
    return round_to(((bits & 15).to(tl.float32) - 8.0) * scale, dtype)


@triton.jit
def _joined(first, second):
    """Interleaves two [N, G, n] -> [N, G, 2 n]."""
    return tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * first.shape[2]))


@triton.jit
def _clamped(x, least, most):
    return tl.minimum(tl.maximum(x, least), most)


@triton.jit
def _float_code(x, MANTISSA, BIAS):
    """Bits of the nearest 8-bit float, ties to even, for float32 within the format's range."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    SHIFT: tl.constexpr = 23 - MANTISSA
    even = (size >> SHIFT) & 1
    normal = ((size + ((0x400000 >> MANTISSA) - 1) + even) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # For subnormals: add a power of two whose last bit is worth the smallest of them. The code is in the lowest bits.
    UNIT: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    small = (tl.abs(x) + UNIT).to(tl.uint32, bitcast=True) & 0xFF
    return tl.where(tl.abs(x) < 2.0 ** (1 - BIAS), small, normal) | ((bits >> 24) & 0x80)
