// Writes floats to a row of the cache, bit for bit like `quantise` of kv_formats.py.
#pragma once

#include <algorithm>

#include "kv_rows.h"

// The extremes of a group of values.
struct GroupRange {
    float top, bottom;
};

// NaN if any value is NaN: comparisons would lose it.
INLINE GroupRange range_of(const float *x) {
    GroupRange range{x[0], x[0]};
    bool is_number = true;
    for (long i = 0; i < KV_GROUP; i++) {
        is_number &= x[i] == x[i];
        range.top = std::max(range.top, x[i]), range.bottom = std::min(range.bottom, x[i]);
    }
    return is_number ? range : GroupRange{NAN, NAN};
}

// The code of a float with `MANTISSA` bits and exponents from 1 - BIAS on, to nearest, ties to even.
template <int MANTISSA, int BIAS>
INLINE uint8_t small_float(float x) {
    constexpr int DROPPED = 23 - MANTISSA;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    float positive;
    memcpy(&positive, &magnitude, 4);
    if (magnitude < uint32_t(128 - BIAS) << 23)  // subnormal numbers have equal steps
        return uint8_t(sign | uint32_t(std::nearbyint(positive * float(1 << (BIAS - 1 + MANTISSA)))));
    const uint32_t rounded = (magnitude + (1u << (DROPPED - 1)) - 1 + (magnitude >> DROPPED & 1)) >> DROPPED;
    return uint8_t(sign | (rounded - (uint32_t(127 - BIAS) << MANTISSA)));
}

// Half precision, rounded as in torch, for values up to 65504.
INLINE uint16_t to_half(float x) {
    if (x != x) return 0x7e00u;
    const float bounded = std::min(65504.0f, std::max(-65504.0f, x));
    uint32_t bits;
    memcpy(&bits, &bounded, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude < 113u << 23) {
        const float positive = bounded < 0 ? -bounded : bounded;
        return uint16_t(sign | uint32_t(std::nearbyint(positive * 16777216.0f)));  // 2^24
    }
    return uint16_t(sign | (((magnitude + 0xfffu + (magnitude >> 13 & 1)) >> 13) - (112u << 10)));
}

template <long FORMAT>
INLINE void write_group(const float *x, uint8_t *to, uint8_t *scale_to) {
    constexpr float LARGEST = FORMAT == KV_INT8 ? 127.0f : FORMAT == KV_FP8 ? 448.0f : 57344.0f;
    const GroupRange range = range_of(x);
    const float extreme = range.top > -range.bottom ? range.top : range.bottom;
    const bf16 stored = to_bf16(FORMAT == KV_INT4 ? extreme / -8.0f : std::fabs(extreme) / LARGEST);
    const float scale = bf16_to_float(stored);
    memcpy(scale_to, &stored, sizeof stored);
    float steps[KV_GROUP];
    for (long i = 0; i < KV_GROUP; i++) steps[i] = std::fabs(scale) > 0.0f ? x[i] / scale : 0.0f;
    const auto bounded = [&](long i, float low, float high) { return std::min(high, std::max(low, steps[i])); };
    if constexpr (FORMAT == KV_INT4) {
        const auto code = [&](long i) { return uint8_t(std::nearbyint(bounded(i, -8, 7)) + 8.0f); };
        for (long i = 0; i < KV_GROUP / 2; i++) to[i] = uint8_t(code(i) | code(i + KV_GROUP / 2) << 4);
    } else if constexpr (FORMAT == KV_INT8) {
        for (long i = 0; i < KV_GROUP; i++) to[i] = uint8_t(int8_t(std::nearbyint(bounded(i, -127, 127))));
    } else {
        constexpr int MANTISSA = FORMAT == KV_FP8 ? 3 : 2, BIAS = FORMAT == KV_FP8 ? 7 : 15;
        for (long i = 0; i < KV_GROUP; i++) to[i] = small_float<MANTISSA, BIAS>(bounded(i, -LARGEST, LARGEST));
    }
}

// Writes a rotated row.
template <int BITS>
INLINE void write_levels(const float *x, long dim, uint8_t *row) {
    double squares = 0.0;
    for (long d = 0; d < dim; d++) squares += double(x[d]) * double(x[d]);
    const bf16 stored = to_bf16(float(std::sqrt(squares / double(dim))));
    memcpy(row + dim * BITS / 8, &stored, sizeof stored);
    const float scale = bf16_to_float(stored), *levels = Levels<BITS>::ALL;
    const bool has_steps = scale > 0.0f && scale < INFINITY;
    for (long first = 0; first < dim; first += KV_GROUP, row += KV_GROUP * BITS / 8) {
        int32_t codes[KV_GROUP];
        for (long i = 0; i < KV_GROUP; i += LANES) {
            const vf steps = has_steps ? load(x + first + i) / scale : vf{};
            vi count = {};
            for (int e = 1; e < 1 << BITS; e++) count -= steps > (levels[e - 1] + levels[e]) / 2;
            memcpy(codes + i, &count, sizeof count);
        }
        if constexpr (BITS == 4) {
            for (long i = 0; i < KV_GROUP / 2; i++) row[i] = uint8_t(codes[i] | codes[i + KV_GROUP / 2] << 4);
        } else {
            for (long i = 0; i < KV_GROUP; i += 8) {
                uint32_t word = 0;
                for (int j = 0; j < 8; j++) word |= uint32_t(codes[i + j]) << 3 * j;
                for (int byte = 0; byte < 3; byte++) row[i / 8 * 3 + byte] = uint8_t(word >> 8 * byte);
            }
        }
    }
}

// Overwrites x if the format is rotated.
INLINE void write_row(long format, float *x, long dim, uint8_t *row) {
    if (is_rotated(format)) rotate_row(x, dim);
    if (format == KV_TQ4) return write_levels<4>(x, dim, row);
    if (format == KV_TQ3) return write_levels<3>(x, dim, row);
    if (format <= KV_BF16)
        return with_type(format == KV_BF16, [&](auto type) {
            over_vectors(dim, [&](long d, auto some) {
                store(reinterpret_cast<decltype(type) *>(row) + d, load(x + d, some), some);
            });
        });
    if (format == KV_F16) {
        for (long d = 0; d < dim; d++) {
            const uint16_t half = to_half(x[d]);
            memcpy(row + 2 * d, &half, 2);
        }
        return;
    }
    with_format(format, [&](auto kept) {
        using Row = decltype(kept);
        if constexpr (Row::IS_GROUPED)
            for (long d = 0; d < dim; d += KV_GROUP)
                write_group<Row::NUMBER>(x + d, row + Row::offset(d), row + Row::scale_at(dim, d));
    });
}
