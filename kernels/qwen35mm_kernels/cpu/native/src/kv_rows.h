// How keys and values lie in the cache: kv_formats.py has the same list, and says what the bytes mean.
#pragma once

#include <type_traits>

#include "simd.h"

enum KVFormat : long { KV_FLOAT32, KV_BF16, KV_F16, KV_FP8, KV_FP8_E5M2, KV_INT8, KV_INT4 };

constexpr long KV_GROUP = 32, KV_SCALE_BYTES = 2;

// Where a tensor of rows lies; strides between tokens and between heads, in bytes.
struct KVRows {
    const uint8_t *data;
    long row, head, format;

    const uint8_t *at(long token, long kv_head) const { return data + token * row + kv_head * head; }
};

// Half precision, widened exactly from the lower sixteen bits of lanes: the exponent is moved by a product, which is
// exact for numbers below its normal ones, too.
INLINE vf half_to_float(vu bits) {
    vf magnitude = bits_to_float((bits & 0x7fffu) << 13) * 5.192296858534828e33f;  // 2^112
    return bits_to_float(reinterpret_cast<vu>(magnitude) | (bits & 0x8000u) << 16);
}

INLINE vu load_bytes(const uint8_t *p) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
#else
    typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const bytes *>(p), vu);
#endif
}

// A row of codes in a format: from(row, d, some) are its values from d on.
template <long FORMAT>
struct KVRow {
    static constexpr bool IS_CODED = true;
    static constexpr long NUMBER = FORMAT;
    static constexpr long CODE_BYTES = FORMAT == KV_INT4 ? KV_GROUP / 2 : KV_GROUP;
    static constexpr long BLOCK = KV_SCALE_BYTES + CODE_BYTES;

    // The first byte of value d.
    static long offset(long d) { return d / KV_GROUP * BLOCK; }

    template <class Some>
    static INLINE_MEMBER vf from(const uint8_t *row, long d, Some) {
        const uint8_t *block = row + offset(d), *codes = block + KV_SCALE_BYTES;
        const long i = d % KV_GROUP;
        bf16 bits;
        memcpy(&bits, block, sizeof bits);
        const vf scale = splat(bf16_to_float(bits));
        if constexpr (FORMAT == KV_INT4) {
            const vu nibbles = load_bytes(codes + i % 16) >> int(i / 16 * 4) & 15u;
            return (to_float(reinterpret_cast<vi>(nibbles)) - 8.0f) * scale;
        } else if constexpr (FORMAT == KV_INT8) {
            // Shifted up and down again, a byte has its sign.
            return to_float(reinterpret_cast<vi>(load_bytes(codes + i) << 24) >> 24) * scale;
        } else if constexpr (FORMAT == KV_FP8_E5M2) {
            return half_to_float(load_bytes(codes + i) << 8) * scale;
        } else {
            const vu code = load_bytes(codes + i);
            vf magnitude = bits_to_float((code & 0x7fu) << 20) * 1.329227995784916e36f;  // 2^120
            return bits_to_float(reinterpret_cast<vu>(magnitude) | (code & 0x80u) << 24) * scale;
        }
    }
};

template <class T>
struct PlainRow {
    static constexpr bool IS_CODED = false;

    static long offset(long d) { return d * long(sizeof(T)); }

    template <class Some>
    static INLINE_MEMBER vf from(const uint8_t *row, long d, Some some) {
        return load(reinterpret_cast<const T *>(row) + d, some);
    }
};
template <>
struct KVRow<KV_FLOAT32> : PlainRow<float> {};
template <>
struct KVRow<KV_BF16> : PlainRow<bf16> {};
template <>
struct KVRow<KV_F16> {
    static constexpr bool IS_CODED = false;

    static long offset(long d) { return d * 2; }

    template <class Some>
    static INLINE_MEMBER vf from(const uint8_t *row, long d, Some some) {
        const bf16 *bits = reinterpret_cast<const bf16 *>(row) + d;
        if constexpr (std::is_same_v<Some, Part>) {
            bf16 lanes[LANES] = {};
            memcpy(lanes, bits, some.n * sizeof(bf16));
            return whole(load_wide(lanes));
        } else {
            return whole(load_wide(bits));
        }
    }

    // NaN stays NaN.
    static INLINE_MEMBER vf whole(vu bits) {
        const vu special = reinterpret_cast<vu>((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
        return bits_to_float(reinterpret_cast<vu>(half_to_float(bits)) | special);
    }
};

// work(KVRow<FORMAT>()) for a format.
template <class Work>
INLINE void with_format(long format, const Work &work) {
    switch (format) {
        case KV_FLOAT32: return work(KVRow<KV_FLOAT32>());
        case KV_BF16: return work(KVRow<KV_BF16>());
        case KV_F16: return work(KVRow<KV_F16>());
        case KV_FP8: return work(KVRow<KV_FP8>());
        case KV_FP8_E5M2: return work(KVRow<KV_FP8_E5M2>());
        case KV_INT8: return work(KVRow<KV_INT8>());
        default: return work(KVRow<KV_INT4>());
    }
}

// Of one head of one token.
INLINE long row_bytes(long format, long dim) {
    long bytes = 0;
    with_format(format, [&](auto row) { bytes = row.offset(dim); });
    return bytes;
}
