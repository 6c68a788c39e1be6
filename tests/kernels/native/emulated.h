// Instructions that this machine may lack, in plain C++ under their intrinsics' names, after Intel's manual: included
// before a source of the compiled part (-include), they let its own code for AVX-512 and AMX run on a machine with AVX2.
//
// EMULATE is 1 for AVX-512, 2 with VNNI and BF16, 3 with AMX. An intrinsic that isn't here doesn't compile ("target
// specific option mismatch"): write it down here. Misuse that a processor would fault on ends the process.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if EMULATE >= 2
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
#endif
#if EMULATE >= 3
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#endif

namespace emulated {

inline void must(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "emulated processor: %s\n", what);
    abort();
}

// The lanes of a register as numbers of type T.
template <class T>
struct Lanes {
    T at[64 / sizeof(T)];

    template <class Register>
    explicit Lanes(const Register &from) {
        static_assert(sizeof(from) == 64, "a register of 512 bits");
        memcpy(at, &from, 64);
    }
    Lanes() = default;
    template <class Register>
    Register as() const {
        Register to;
        memcpy(&to, at, 64);
        return to;
    }
    static constexpr int count = 64 / sizeof(T);
};

template <class T, class Function>
inline __m512i each(Function value) {
    Lanes<T> lanes;
    for (int i = 0; i < Lanes<T>::count; i++) lanes.at[i] = T(value(i));
    return lanes.template as<__m512i>();
}

inline __m512i load(const void *p) {
    __m512i x;
    memcpy(&x, p, 64);
    return x;
}

inline __m512i widen_u16(__m256i x) {
    uint16_t values[16];
    memcpy(values, &x, 32);
    return each<uint32_t>([&](int i) { return values[i]; });
}

inline __m512i widen_u8(__m128i x) {
    uint8_t values[16];
    memcpy(values, &x, 16);
    return each<uint32_t>([&](int i) { return values[i]; });
}

inline void save(void *p, __m512i x) { memcpy(p, &x, 64); }

template <class T>
inline __m512i set1(T x) {
    return each<T>([&](int) { return x; });
}

template <class To, class From>
inline To same_bits(From x) {
    static_assert(sizeof(To) <= sizeof(From), "of a longer register, its lower part");
    To to;
    memcpy(&to, &x, sizeof to);
    return to;
}

inline __m512 load_floats(const float *p) { return same_bits<__m512>(load(p)); }

inline __m512 twice(__m256 x) {
    return same_bits<__m512>(each<float>([&](int i) { return x[i & 7]; }));
}

inline __m512 chosen(__m512i from, __m512 x) {
    return same_bits<__m512>(each<float>([&](int i) { return x[((__v16si)from)[i] & 15]; }));
}

inline __m256d half_of(__m512d x, int upper) {
    double lanes[8];
    memcpy(lanes, &x, 64);
    return _mm256_loadu_pd(lanes + 4 * upper);
}

template <class Function>
inline __m512 each_float(__m512 a, Function value) {
    Lanes<float> lanes(a);
    for (float &x : lanes.at) x = value(x);
    return lanes.as<__m512>();
}

inline __m512 round_scale(__m512 a, int how) {
    must(how == 0, "VRNDSCALEPS other than to the nearest whole number");
    return each_float(a, [](float x) { return nearbyintf(x); });
}

// VSCALEFPS: a times two to the power of b, rounded down.
inline __m512 scale_by_powers(__m512 a, __m512 b) {
    Lanes<float> x(a), y(b);
    for (int i = 0; i < 16; i++) {
        const float power = floorf(y.at[i]);
        x.at[i] = power != power ? power : ldexpf(x.at[i], int(std::fmax(-400.0f, std::fmin(400.0f, power))));
    }
    return x.as<__m512>();
}

inline __m512i bits_and(__m512i a, __m512i b) {
    const Lanes<uint64_t> x(a), y(b);
    return each<uint64_t>([&](int i) { return x.at[i] & y.at[i]; });
}

inline __m512i shift_right_16(__m512i a, unsigned count) {
    const Lanes<uint16_t> x(a);
    return each<uint16_t>([&](int i) { return count < 16 ? x.at[i] >> count : 0; });
}

inline __m512i abs_8(__m512i a) {
    const Lanes<int8_t> x(a);
    return each<int8_t>([&](int i) { return x.at[i] < 0 ? -x.at[i] : x.at[i]; });
}

inline __mmask64 signs_8(__m512i a) {
    const Lanes<int8_t> x(a);
    __mmask64 mask = 0;
    for (int i = 0; i < 64; i++) mask |= __mmask64(x.at[i] < 0) << i;
    return mask;
}

inline __m512i mask_sub_8(__m512i source, __mmask64 mask, __m512i a, __m512i b) {
    const Lanes<int8_t> other(source), x(a), y(b);
    return each<int8_t>([&](int i) { return mask >> i & 1 ? x.at[i] - y.at[i] : other.at[i]; });
}

// Pairs of unsigned times signed bytes, whose sum saturates.
inline __m512i maddubs(__m512i a, __m512i b) {
    const Lanes<uint8_t> x(a);
    const Lanes<int8_t> y(b);
    return each<int16_t>([&](int i) {
        const int pair = x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1];
        return pair > 32767 ? 32767 : pair < -32768 ? -32768 : pair;
    });
}

inline __m512i madd(__m512i a, __m512i b) {
    const Lanes<int16_t> x(a), y(b);
    return each<int32_t>([&](int i) { return x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1]; });
}

// VPDPBUSD: quadruples, whose sum doesn't saturate.
inline __m512i dpbusd(__m512i sums, __m512i a, __m512i b) {
    const Lanes<int32_t> sum(sums);
    const Lanes<uint8_t> x(a);
    const Lanes<int8_t> y(b);
    return each<int32_t>([&](int i) {
        int total = sum.at[i];
        for (int j = 4 * i; j < 4 * i + 4; j++) total += x.at[j] * y.at[j];
        return total;
    });
}

// Numbers below the normal ones are zeros, as operands and as results.
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

inline float half(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return flushed(x);
}

// Products of bfloat16 are exact in a float's 24 bits, and the sum is rounded once, to nearest even.
inline float multiply_add(uint16_t a, uint16_t b, float sum) {
    return flushed(__builtin_fmaf(half(a), half(b), flushed(sum)));
}

// VDPBF16PS: of each pair, the odd product first.
inline __m512 dpbf16(__m512 sums, __m512bh a, __m512bh b) {
    Lanes<float> sum(sums);
    const Lanes<uint16_t> x(a), y(b);
    for (int i = 0; i < 16; i++) {
        sum.at[i] = multiply_add(x.at[2 * i + 1], y.at[2 * i + 1], sum.at[i]);
        sum.at[i] = multiply_add(x.at[2 * i], y.at[2 * i], sum.at[i]);
    }
    return sum.as<__m512>();
}

// VCVTNEPS2BF16: to nearest even; a NaN stays one.
inline __m256i to_halves(__m512 a) {
    const Lanes<float> x(a);
    uint16_t halves[16];
    for (int i = 0; i < 16; i++) {
        const float value = flushed(x.at[i]);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        halves[i] = uint16_t(value != value ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(halves));
}

#if EMULATE >= 3
inline bool &permitted() {
    static bool is = false;
    return is;
}

// What Linux answers when a process asks for AMX's registers.
inline long request(long number, long code, long feature) {
    must(number == SYS_arch_prctl && code == 0x1023 && feature == 18, "not the request for AMX's tiles");
    permitted() = true;
    return 0;
}

// A thread's tiles, of palette 1: 8 of up to 16 rows of 64 bytes.
struct Tiles {
    bool configured = false;
    int rows[8] = {}, bytes[8] = {};
    uint8_t data[8][16][64] = {};
};

inline Tiles &tiles() {
    static thread_local Tiles all;
    return all;
}

inline void load_config(const void *place) {
    must(permitted(), "tiles without the system's permission");
    uint8_t config[64];
    memcpy(config, place, 64);
    must(config[0] == 1 && config[1] == 0, "a palette other than 1, or a row to begin at");
    for (int i = 2; i < 16; i++) must(config[i] == 0, "reserved bytes of the configuration aren't zero");
    tiles() = Tiles{};
    for (int tile = 0; tile < 16; tile++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * tile, 2);
        const int rows = config[48 + tile];
        must(tile < 8 ? rows <= 16 && bytes <= 64 && !rows == !bytes : !rows && !bytes, "a tile's size");
        if (tile < 8) tiles().rows[tile] = rows, tiles().bytes[tile] = bytes;
    }
    tiles().configured = true;
}

inline void release() { tiles() = Tiles{}; }

inline void check_tile(int tile) { must(tiles().configured && tiles().rows[tile], "a tile that isn't configured"); }

inline void zero(int tile) {
    check_tile(tile);
    memset(tiles().data[tile], 0, sizeof tiles().data[tile]);
}

inline void load_tile(int tile, const void *place, long stride) {
    zero(tile);
    for (int r = 0; r < tiles().rows[tile]; r++)
        memcpy(tiles().data[tile][r], static_cast<const char *>(place) + r * stride, tiles().bytes[tile]);
}

inline void store_tile(int tile, void *place, long stride) {
    check_tile(tile);
    for (int r = 0; r < tiles().rows[tile]; r++)
        memcpy(static_cast<char *>(place) + r * stride, tiles().data[tile][r], tiles().bytes[tile]);
}

inline void check_product(int to, int a, int b) {
    check_tile(to), check_tile(a), check_tile(b);
    const Tiles &all = tiles();
    must(to != a && to != b && a != b, "a product of a tile with itself");
    must(all.rows[to] == all.rows[a] && all.bytes[to] == all.bytes[b] && all.bytes[a] == 4 * all.rows[b] &&
             all.bytes[to] % 4 == 0,
         "tiles whose sizes don't fit");
}

inline void clear_beyond(int tile) {
    Tiles &all = tiles();
    for (int r = 0; r < 16; r++)
        for (int i = r < all.rows[tile] ? all.bytes[tile] : 0; i < 64; i++) all.data[tile][r][i] = 0;
}

// TDPBSSD: quadruples of signed bytes, without saturation.
inline void tile_dpbssd(int to, int a, int b) {
    check_product(to, a, b);
    Tiles &all = tiles();
    for (int r = 0; r < all.rows[to]; r++) {
        int32_t sums[16];
        memcpy(sums, all.data[to][r], 64);
        for (int k = 0; k < all.bytes[a]; k++)
            for (int c = 0; c < all.bytes[to] / 4; c++)
                sums[c] += int8_t(all.data[a][r][k]) * int8_t(all.data[b][k / 4][4 * c + k % 4]);
        memcpy(all.data[to][r], sums, 64);
    }
    clear_beyond(to);
}

// TDPBF16PS: even and odd products are summed apart, and then both are added.
inline void tile_dpbf16(int to, int a, int b) {
    check_product(to, a, b);
    Tiles &all = tiles();
    const int columns = all.bytes[to] / 4;
    for (int r = 0; r < all.rows[to]; r++) {
        float even[16] = {}, odd[16] = {}, sums[16];
        for (int k = 0; k < all.rows[b]; k++) {
            uint16_t x[2], y[32];
            memcpy(x, all.data[a][r] + 4 * k, 4), memcpy(y, all.data[b][k], 64);
            for (int c = 0; c < columns; c++) {
                even[c] = multiply_add(x[0], y[2 * c], even[c]);
                odd[c] = multiply_add(x[1], y[2 * c + 1], odd[c]);
            }
        }
        memcpy(sums, all.data[to][r], 64);
        for (int c = 0; c < columns; c++) sums[c] = flushed(flushed(sums[c]) + flushed(even[c] + odd[c]));
        memcpy(all.data[to][r], sums, 4 * columns);
    }
    clear_beyond(to);
}
#endif

}  // namespace emulated

#define _mm512_loadu_si512 emulated::load
#define _mm512_storeu_si512 emulated::save
#define _mm512_cvtepu16_epi32 emulated::widen_u16
#define _mm512_cvtepu8_epi32 emulated::widen_u8
#define _mm512_load_ps emulated::load_floats
#define _mm512_broadcast_f32x8 emulated::twice
#define _mm512_permutexvar_ps emulated::chosen
#define _mm512_castps_pd emulated::same_bits<__m512d>
#define _mm512_castps512_ps256 emulated::same_bits<__m256>
#define _mm512_extractf64x4_pd emulated::half_of
#define _mm512_roundscale_ps emulated::round_scale
#define _mm512_scalef_ps emulated::scale_by_powers
#define _mm512_set1_epi8(x) emulated::set1<int8_t>(x)
#define _mm512_set1_epi16(x) emulated::set1<int16_t>(x)
#define _mm512_set1_epi32(x) emulated::set1<int32_t>(x)
#define _mm512_setzero_si512() emulated::set1<int32_t>(0)
#define _mm512_and_si512 emulated::bits_and
#define _mm512_srli_epi16 emulated::shift_right_16
#define _mm512_abs_epi8 emulated::abs_8
#define _mm512_movepi8_mask emulated::signs_8
#define _mm512_mask_sub_epi8 emulated::mask_sub_8
#define _mm512_maddubs_epi16 emulated::maddubs
#define _mm512_madd_epi16 emulated::madd
#if EMULATE >= 2
#define _mm512_dpbusd_epi32 emulated::dpbusd
#define _mm512_dpbf16_ps emulated::dpbf16
#define _mm512_cvtneps_pbh emulated::to_halves
#endif
#if EMULATE >= 3
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load_tile
#define _tile_stream_loadd emulated::load_tile
#define _tile_stored emulated::store_tile
#define _tile_dpbf16ps emulated::tile_dpbf16
#define _tile_dpbssd emulated::tile_dpbssd
#define syscall emulated::request
#endif
