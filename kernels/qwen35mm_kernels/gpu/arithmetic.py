"""Products and rounding with the same results compiled and interpreted, and shared functions of kernels."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter multiplies bfloat16's bits as integers, and truncates where a card rounds.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b in float32; acc may be None."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 to the nearest of `dtype`.

    Triton's interpreter would truncate to bfloat16. To e4m3 (up to 448), it rounds ties up and truncates below 2^-6.
    """
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # Clears the low bits, which would turn zeros into the smallest numbers.
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    if _INTERPRETED and dtype == tl.float8e4nv:
        bits = x.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        # Near 16384, float32's last bit is worth 2^-9.
        small = tl.where(x < 0, (x - 16384.0) + 16384.0, (x + 16384.0) - 16384.0)
        x = tl.where(x != x, x, tl.where(tl.abs(x) < 0.015625, small, normal))
    return x.to(dtype)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also precise for tiny results, where 1 + exp(x) would lose them."""
    t = tl.exp(-tl.abs(x))
    series = t * (1.0 - t * (1.0 / 2 - t * (1.0 / 3 - t * (1.0 / 4 - t * (1.0 / 5)))))
    return tl.maximum(x, 0.0) + tl.where(t < 0.05, series, tl.log(1.0 + t))
