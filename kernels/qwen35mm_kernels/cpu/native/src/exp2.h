// Powers of two, for attention's weights.
#pragma once

#include "simd.h"

// 2^x for x up to 0, to about a unit in the last place; at least 2^-126. Half the work of `exp`, which would be a fifth
// of attention's work for heads of 64 dimensions.
INLINE vf exp2(vf x) {
#if defined(__AVX512F__)
    vf whole = (vf)_mm512_roundscale_ps((__m512)x, 0), rest = max(x - whole, splat(-1.0f));
#else
    // The sum has the integer in its lower bits.
    vf bounded = max(x, splat(-126.0f)), shifted = bounded + ROUNDING;
    vf rest = bounded - (shifted - ROUNDING);
#endif
    vf series = splat(1.540353039e-4f);
    series = fma(series, rest, splat(1.333355815e-3f));
    series = fma(series, rest, splat(9.618129108e-3f));
    series = fma(series, rest, splat(5.550410866e-2f));
    series = fma(series, rest, splat(2.402265070e-1f));
    series = fma(series, rest, splat(6.931471806e-1f));
    series = fma(series, rest, splat(1.0f));
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)series, (__m512)whole);
#else
    return bits_to_float(reinterpret_cast<vu>(series) + (reinterpret_cast<vu>(shifted) << 23));
#endif
}
