// Products of 8-bit integers in registers, as many as a core can do: `rounds` of them, one function an instruction set.
// Each returns its multiplications and additions.
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int SUMS = 10;  // more than the instructions' latencies need

// Sums SUMS times in a round, in as many registers. The compiler can't know what `keep` does with them.
#define ROUNDS(rounds, Vector, next)                                       \
    Vector sums[SUMS] = {};                                                \
    for (long round = 0; round < rounds; round++) {                        \
        _Pragma("GCC unroll 10") for (int i = 0; i < SUMS; i++) {          \
            Vector &sum = sums[i];                                         \
            sum = next;                                                    \
        }                                                                  \
        _Pragma("GCC unroll 10") for (int i = 0; i < SUMS; i++) keep(sums[i]); \
    }                                                                      \
    return double(rounds) * SUMS * sizeof(Vector) * 2

template <class Vector>
inline __attribute__((always_inline)) void keep(Vector &x) {
    asm volatile("" : "+v"(x));
}

}  // namespace

extern "C" {

// Weights times rows as pairs in 16 bits, and pairs of these in 32.
__attribute__((target("avx2"))) double peak_avx2(long rounds) {
    __m256i w = _mm256_set1_epi8(1);
    const __m256i x = _mm256_set1_epi8(2), one = _mm256_set1_epi16(1);
    ROUNDS(rounds, __m256i, (keep(w), _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), one))));
}

__attribute__((target("avx512f,avx512bw"))) double peak_avx512(long rounds) {
    __m512i w = _mm512_set1_epi8(1);
    const __m512i x = _mm512_set1_epi8(2), one = _mm512_set1_epi16(1);
    ROUNDS(rounds, __m512i, (keep(w), _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), one))));
}

__attribute__((target("avx2,avxvnni"))) double peak_avx_vnni(long rounds) {
    const __m256i w = _mm256_set1_epi8(1), x = _mm256_set1_epi8(2);
    ROUNDS(rounds, __m256i, _mm256_dpbusd_avx_epi32(sum, w, x));
}

__attribute__((target("avx512f,avx512vnni"))) double peak_avx512_bf16(long rounds) {
    const __m512i w = _mm512_set1_epi8(1), x = _mm512_set1_epi8(2);
    ROUNDS(rounds, __m512i, _mm512_dpbusd_epi32(sum, w, x));
}

// The process must be allowed to use tiles: qwen_prepare asks for it.
__attribute__((target("amx-tile,amx-int8"))) double peak_amx(long rounds) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t width[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t height[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (long round = 0; round < rounds; round++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return double(rounds) * 4 * 16 * 16 * 64 * 2;
}
}
