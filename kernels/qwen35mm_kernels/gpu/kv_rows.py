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
# Four-byte words of a group's codes.
_WORDS, _INT4_WORDS = tl.constexpr(GROUP // 4), tl.constexpr(GROUP // 8)
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
        # Codes are read four bytes at a time at least.
        assert not format.bits or not any(n % 4 for n in (cache.data_ptr(), *cache.stride()[:2]))
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
        NUM_GROUPS: tl.constexpr = HEAD_DIM // _GROUP
        WORDS: tl.constexpr = _INT4_WORDS if FORMAT == "int4" else _WORDS
        words = (rows + offset).to(tl.pointer_type(tl.uint32)) + tl.arange(0, NUM_GROUPS * WORDS)[None, :]
        word = tl.reshape(_load(words, mask), (words.shape[0], NUM_GROUPS, WORDS))
        scales = (rows + (offset + NUM_GROUPS * WORDS * 4)).to(tl.pointer_type(tl.uint16))
        kept = _load(scales + tl.arange(0, NUM_GROUPS)[None, :], mask)
        scale = (kept.to(tl.uint32) << 16).to(tl.float32, bitcast=True)[:, :, None]
        if FORMAT == "int4":
            # A byte has codes of both halves of its group.
            first = _interleaved(word, 0, scale, dtype, FORMAT)  # pyright: ignore
            second = _interleaved(word, 4, scale, dtype, FORMAT)  # pyright: ignore
            values = tl.permute(tl.join(first, second), (0, 1, 3, 2))
        else:
            values = _interleaved(word, 0, scale, dtype, FORMAT)  # pyright: ignore
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
        CODES: tl.constexpr = 4 * (_INT4_WORDS if FORMAT == "int4" else _WORDS)
        group = tl.arange(0, HEAD_DIM // _GROUP)[None, :]
        scales = (rows + HEAD_DIM // _GROUP * CODES).to(tl.pointer_type(tl.uint16))
        tl.store(scales + group, kept.to(tl.uint16, bitcast=True), mask=mask)
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
        codes = tl.reshape(code.to(tl.uint8), (values.shape[0], HEAD_DIM // _GROUP * CODES))
        tl.store(rows + tl.arange(0, HEAD_DIM // _GROUP * CODES)[None, :], codes, mask=mask)
    else:
        if FORMAT == "f16":
            values = tl.where(values != values, values, _clamped(values, -65504.0, 65504.0))
        kept = round_to(values, rows.dtype.scalar.element_ty)
        tl.store(rows + tl.arange(0, HEAD_DIM)[None, :], kept, mask=mask)


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)


@triton.jit
def _interleaved(word, SHIFT: tl.constexpr, scale, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Values of the codes that begin at bit SHIFT of each byte of words [N, G, n]: [N, G, 4 n]."""
    if FORMAT == "int4":
        values = tl.join(
            tl.join(_values_4(word >> SHIFT, scale, dtype), _values_4(word >> (SHIFT + 16), scale, dtype)),
            tl.join(_values_4(word >> (SHIFT + 8), scale, dtype), _values_4(word >> (SHIFT + 24), scale, dtype)),
        )
    else:
        values = tl.join(
            tl.join(_values_8(word << 8, scale, dtype, FORMAT), _values_8(word >> 8, scale, dtype, FORMAT)),
            tl.join(_values_8(word, scale, dtype, FORMAT), _values_8(word >> 16, scale, dtype, FORMAT)),
        )
    return tl.reshape(values, (values.shape[0], values.shape[1], 4 * values.shape[2]))


@triton.jit
def _values_8(word, scale, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Values of codes in the second bytes of words. Moves an exact power of two into a scale."""
    if FORMAT == "int8":
        # The bits as the lowest of a large float: a conversion would take four times an addition's time.
        large = (((word >> 8) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True)
        values = (large - 8388736.0) * scale
    elif FORMAT == "fp8_e5m2":
        values = (word & 0xFF00).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * scale
    else:
        tl.static_assert(FORMAT == "fp8")
        # A float16 with the same bits has an exponent lower by eight.
        steps = ((word & 0x8000) | ((word & 0x7F00) >> 1)).to(tl.uint16).to(tl.float16, bitcast=True)
        values = steps.to(tl.float32) * (scale * 256.0)
    return round_to(values, dtype)


@triton.jit
def _values_4(bits, scale, dtype: tl.constexpr):
    large = ((bits & 15) ^ 0x4B000000).to(tl.float32, bitcast=True)
    return round_to((large - 8388616.0) * scale, dtype)


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
