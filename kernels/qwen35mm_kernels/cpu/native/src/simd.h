// Vectors of floats and bytes, with GCC's and Clang's vector extensions, and intrinsics for the rest.
//
// Every source is compiled once for each instruction set, by -m flags, into a separate shared library; nothing is
// selected at run time. LANES is the width of a vector of floats: 16 with AVX-512, 8 with AVX2, else 4. A vector is one
// register: GCC keeps longer ones in memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

using bf16 = uint16_t;

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE vf load(const float *p) { return *reinterpret_cast<const vf *>(p); }
INLINE void store(float *p, vf x) { *reinterpret_cast<vf *>(p) = x; }
INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat_int(int32_t x) { return x - vi{}; }
INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }
INLINE vf bits_to_float(vu x) { return reinterpret_cast<vf>(x); }

// a * b + c, rounded once: every instruction set here has it, and the compiler contracts it (-ffp-contract=fast).
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }

INLINE float bf16_to_float(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// To nearest, ties to even, as in torch; NaN stays NaN.
INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40u);
    return bf16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
INLINE bf16 to_bf16(bf16 x) { return x; }

// Loads and widens: on AVX2, GCC makes five instructions of __builtin_convertvector instead of one.
INLINE vu load_wide(const bf16 *p) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#else
    return __builtin_convertvector(*reinterpret_cast<const vh *>(p), vu);
#endif
}

INLINE vf load(const bf16 *p) { return bits_to_float(load_wide(p) << 16); }

INLINE void store(bf16 *p, vf x) {
#if defined(__AVX512BF16__)
    // The same, but treats floats below 2^-126 as zero, like bfloat16's products.
    *reinterpret_cast<vh *>(p) = (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = reinterpret_cast<vu>(x);
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vu is_nan = reinterpret_cast<vu>((bits & 0x7fffffffu) > 0x7f800000u);
    vu chosen = (is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & rounded);
    *reinterpret_cast<vh *>(p) = __builtin_convertvector(chosen, vh);
#endif
}

// Calls work(T()) for the type of a call's values.
template <class Work>
INLINE void with_type(bool is_bf16, const Work &work) {
    is_bf16 ? work(bf16()) : work(float());
}

// A whole vector, or the last n < LANES values of a row followed by zeros.
struct Whole {};
struct Part {
    long n;
};

template <class T>
INLINE vf load(const T *p, Whole) {
    return load(p);
}

template <class T>
INLINE vf load(const T *p, Part part) {
    T lanes[LANES] = {};
    memcpy(lanes, p, part.n * sizeof(T));
    return load(lanes);
}

template <class T>
INLINE void store(T *p, vf x, Whole) {
    store(p, x);
}

template <class T>
INLINE void store(T *p, vf x, Part part) {
    T lanes[LANES];
    store(lanes, x);
    memcpy(p, lanes, part.n * sizeof(T));
}

// Calls body(i, Whole or Part) for the vectors of a row of n.
template <class Body>
INLINE void over_vectors(long n, const Body &body) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) body(i, Whole{});
    if (i < n) body(i, Part{n - i});
}

INLINE float get(const float *p) { return *p; }
INLINE float get(const bf16 *p) { return bf16_to_float(*p); }
INLINE void put(float *p, float x) { *p = x; }
INLINE void put(bf16 *p, float x) { *p = to_bf16(x); }

// Reduces lanes by halves, quarters, ..., in an order that depends only on LANES. Uses intrinsics, since GCC compiles a
// loop over lanes to reads of single lanes.
#if defined(__AVX2__)
template <class Combine>
INLINE float combine_lanes(vf x, const Combine &combine) {
#if LANES == 16
    const __m512d bits = _mm512_castps_pd((__m512)x);
    __m256 half = combine(_mm512_castps512_ps256((__m512)x), _mm256_castpd_ps(_mm512_extractf64x4_pd(bits, 1)));
#else
    __m256 half = (__m256)x;
#endif
    __m256 quarter = combine(half, _mm256_permute2f128_ps(half, half, 1));
    __m256 pair = combine(quarter, _mm256_permute_ps(quarter, 0x4e));
    return _mm256_cvtss_f32(combine(pair, _mm256_permute_ps(pair, 0xb1)));
}
INLINE float sum(vf x) {
    return combine_lanes(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
// May lose a NaN, depending on its lane.
INLINE float max_lane(vf x) {
    return combine_lanes(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
#else
INLINE float sum(vf x) {
    float lanes[LANES];
    store(lanes, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
INLINE float max_lane(vf x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}
#endif

// The lower eight bits of each lane, whose values fit.
#if defined(__AVX2__) && LANES == 8
INLINE void store_bytes(int8_t *p, vi x) {
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(halves, halves));
}
#else
INLINE void store_bytes(int8_t *p, vi x) { *reinterpret_cast<vb *>(p) = __builtin_convertvector(x, vb); }
#endif

// To the nearest integer, ties to even, below 2^22: adding 1.5 * 2^23 to a float drops its bits below one.
constexpr float ROUNDING = 12582912.0f;
INLINE vf round(vf x) { return (x + ROUNDING) - ROUNDING; }

INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE vf min(vf a, vf b) { return a < b ? a : b; }

// e^x to about one unit in the last place (Cephes' split of ln 2 and its polynomial); 0 below -87.3, and e^88.3 above.
// NaN stays NaN: a comparison with NaN is false and selects the second.
INLINE vf exp(vf x) {
    vf bounded = min(splat(88.37626f), max(splat(-87.33654f), x));
    vf scaled = bounded * 1.44269504088896341f;
    vi power = __builtin_convertvector(scaled + (scaled < 0.0f ? splat(-0.5f) : splat(0.5f)), vi);
    vf whole = to_float(power);
    vf rest = bounded - whole * 0.693359375f;
    rest = rest - whole * -2.12194440e-4f;
    vf series = splat(1.9875691500e-4f);
    series = fma(series, rest, splat(1.3981999507e-3f));
    series = fma(series, rest, splat(8.3334519073e-3f));
    series = fma(series, rest, splat(4.1665795894e-2f));
    series = fma(series, rest, splat(1.6666665459e-1f));
    series = fma(series, rest, splat(5.0000001201e-1f));
    series = fma(series, rest * rest, rest + 1.0f);
    vf result = series * bits_to_float(reinterpret_cast<vu>((power + 127) << 23));
    return x < splat(-87.33654f) ? vf{} : result;
}

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }
INLINE vf silu(vf x) { return x * sigmoid(x); }
