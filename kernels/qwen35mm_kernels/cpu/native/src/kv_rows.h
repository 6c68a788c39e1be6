// Formats of keys and values in the cache; see kv_formats.py.
#pragma once

#include <type_traits>
#include <utility>

#include "scratch.h"
#include "simd.h"
#include "tiles.h"

// The formats of kv_formats.py in the order of their numbers; `qwen_kv_rows` checks that they agree.
#define KV_FORMATS(FORMAT)        \
    FORMAT(KV_FLOAT32, float32)   \
    FORMAT(KV_BF16, bf16)         \
    FORMAT(KV_F16, f16)           \
    FORMAT(KV_FP8, fp8)           \
    FORMAT(KV_FP8_E5M2, fp8_e5m2) \
    FORMAT(KV_INT8, int8)         \
    FORMAT(KV_INT4, int4)         \
    FORMAT(KV_INT4R, int4r)       \
    FORMAT(KV_TQ4, tq4)           \
    FORMAT(KV_TQ3, tq3)
#define KV_NUMBER(number, name) number,
enum KVFormat : long { KV_FORMATS(KV_NUMBER) };

constexpr long KV_GROUP = 32, KV_SCALE_BYTES = 2;

// Whether rows are stored rotated: H D x instead of x.
INLINE bool is_rotated(long format) { return format >= KV_INT4R; }

// x [dim] -> H x, the normalised Walsh-Hadamard transform, its own inverse. dim is a power of two, 32 or more.
INLINE void hadamard(float *x, long dim) {
    float *from = x, *to = scratch<float, 48>(dim);
    for (long stage = 1; stage < dim; stage *= 2, std::swap(from, to))
        for (long i = 0; i < dim / 2; i += LANES) {
            const vf first = load(from + i), second = load(from + dim / 2 + i);
            store(to + 2 * i, interleave_low(first + second, first - second));
            store(to + 2 * i + LANES, interleave_high(first + second, first - second));
        }
    const float factor = float(1.0 / std::sqrt(double(dim)));
    for (long d = 0; d < dim; d += LANES) store(x + d, load(from + d) * factor);
}

// x -> D x, with the signs of kv_formats.py.
INLINE void give_signs(float *x, long dim) {
    for (long d = 0; d < dim; d++)
        if (__builtin_parityl(d & d >> 1 & 0x5555)) x[d] = -x[d];
}

INLINE void rotate_row(float *x, long dim) { give_signs(x, dim), hadamard(x, dim); }
INLINE void rotate_row_back(float *x, long dim) { hadamard(x, dim), give_signs(x, dim); }

// Lloyd-Max levels of a Gaussian with variance one.
template <int BITS>
struct Levels;
template <>
struct Levels<3> {
    alignas(64) static constexpr float ALL[8] = {-2.1519456f, -1.3439093f, -0.7560053f, -0.2450942f,
                                                 0.2450942f,  0.7560053f,  1.3439093f,  2.1519456f};
};
template <>
struct Levels<4> {
    alignas(64) static constexpr float ALL[16] = {
        -2.7325895f, -2.0690172f, -1.6180464f, -1.2562312f, -0.9423404f, -0.6567591f, -0.3880483f, -0.128395f,
        0.128395f,   0.3880483f,  0.6567591f,  0.9423404f,  1.2562312f,  1.6180464f,  2.0690172f,  2.7325895f};
};

// The levels of codes.
template <int BITS>
INLINE vf levels_of(vu codes) {
    const float *levels = Levels<BITS>::ALL;
#if defined(__AVX512F__)
    const __m512 table = BITS == 4 ? _mm512_load_ps(levels) : _mm512_broadcast_f32x8(_mm256_load_ps(levels));
    return (vf)_mm512_permutexvar_ps((__m512i)codes, table);
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(levels), (__m256i)codes);
    if constexpr (BITS == 3) return (vf)low;
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(levels + (1 << BITS) - 8), (__m256i)codes);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
    vf found = {};
    for (int i = 0; i < LANES; i++) found[i] = levels[codes[i]];
    return found;
#endif
}

// A tensor of rows. The strides between tokens and between heads are in bytes.
struct KVRows {
    const uint8_t *data;
    long row, head, format;

    const uint8_t *at(long token, long kv_head) const { return data + token * row + kv_head * head; }
};

// Converts half precision in the lower 16 bits of lanes exactly. A product moves the exponent, which is also exact for
// subnormal numbers.
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

// A row of codes in a format, and behind them a scale for each group. from(row, dim, d, some) gives its values from d
// on.
template <long FORMAT>
struct KVRow {
    static constexpr bool IS_GROUPED = true;
    static constexpr long NUMBER = FORMAT;
    static constexpr long CODE_BYTES = FORMAT == KV_INT4 ? KV_GROUP / 2 : KV_GROUP;

    // The first byte of the codes of value d's group.
    static long offset(long d) { return d / KV_GROUP * CODE_BYTES; }

    // The scale of that group.
    static long scale_at(long dim, long d) { return offset(dim) + d / KV_GROUP * KV_SCALE_BYTES; }

    template <class Some>
    static INLINE_MEMBER vf from(const uint8_t *row, long dim, long d, Some) {
        const uint8_t *codes = row + offset(d);
        const long i = d % KV_GROUP;
        bf16 bits;
        memcpy(&bits, row + scale_at(dim, d), sizeof bits);
        const vf scale = splat(bf16_to_float(bits));
        if constexpr (FORMAT == KV_INT4) {
            const vu nibbles = load_bytes(codes + i % 16) >> int(i / 16 * 4) & 15u;
            return (to_float(reinterpret_cast<vi>(nibbles)) - 8.0f) * scale;
        } else if constexpr (FORMAT == KV_INT8) {
            // Shifting up and down extends the sign.
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

// The codes of levels, then one scale.
template <int BITS>
struct LevelRow {
    static constexpr bool IS_GROUPED = false;

    static long offset(long d) { return d * BITS / 8; }

    template <class Some>
    static INLINE_MEMBER vf from(const uint8_t *row, long dim, long d, Some) {
        bf16 bits;
        memcpy(&bits, row + offset(dim), sizeof bits);
        const float scale = bf16_to_float(bits);
        const uint8_t *codes = row + offset(d / KV_GROUP * KV_GROUP);
        const long i = d % KV_GROUP;
        if constexpr (BITS == 4) return levels_of<4>(load_bytes(codes + i % 16) >> int(i / 16 * 4) & 15u) * scale;
        // Three bytes have eight codes. A word that begins with them stays inside the row, which ends with the scale.
        const auto word = [&](long some) {
            uint32_t bits;
            memcpy(&bits, codes + some / 8 * 3, sizeof bits);
            return splat_int(int32_t(bits));
        };
        const vi lanes = lane_index() + int32_t(i % 8);
        const vi words = LANES == 16 ? (lanes < 8 ? word(i) : word(i + 8)) : word(i);
        return levels_of<3>(reinterpret_cast<vu>(words) >> reinterpret_cast<vu>(3 * (lanes & 7)) & 7u) * scale;
    }
};
template <>
struct KVRow<KV_TQ4> : LevelRow<4> {};
template <>
struct KVRow<KV_TQ3> : LevelRow<3> {};

template <class T>
struct PlainRow {
    static constexpr bool IS_GROUPED = false;

    static long offset(long d) { return d * long(sizeof(T)); }

    template <class Some>
    static INLINE_MEMBER vf from(const uint8_t *row, long, long d, Some some) {
        return load(reinterpret_cast<const T *>(row) + d, some);
    }
};
template <>
struct KVRow<KV_FLOAT32> : PlainRow<float> {};
template <>
struct KVRow<KV_BF16> : PlainRow<bf16> {};
template <>
struct KVRow<KV_F16> {
    static constexpr bool IS_GROUPED = false;

    static long offset(long d) { return d * 2; }

    template <class Some>
    static INLINE_MEMBER vf from(const uint8_t *row, long, long d, Some some) {
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

// Calls work(KVRow<FORMAT>()) for a format.
template <class Work>
INLINE void with_format(long format, const Work &work) {
    switch (format) {
        case KV_FLOAT32: return work(KVRow<KV_FLOAT32>());
        case KV_BF16: return work(KVRow<KV_BF16>());
        case KV_F16: return work(KVRow<KV_F16>());
        case KV_FP8: return work(KVRow<KV_FP8>());
        case KV_FP8_E5M2: return work(KVRow<KV_FP8_E5M2>());
        case KV_INT8: return work(KVRow<KV_INT8>());
        case KV_TQ4: return work(KVRow<KV_TQ4>());
        case KV_TQ3: return work(KVRow<KV_TQ3>());
        default: return work(KVRow<KV_INT4>());
    }
}

// Bytes of one head of one token.
INLINE long row_bytes(long format, long dim) {
    long bytes = 0;
    with_format(format, [&](auto row) { bytes = row.offset(dim); });
    return bytes;
}
