// Small products in registers: some rows by some vectors of columns. The sums stay in registers over all of k.
#pragma once

#include <algorithm>

#include "runs.h"
#include "simd.h"

// A tile's sums fill the registers. Its right operand is in panels [k][PANEL_WIDTH], since rows of a wide matrix would
// share lines of the L1 cache.
constexpr int TILE_ROWS = LANES == 16 ? 8 : 6, TILE_VECTORS = LANES == 4 ? 4 : 2;
constexpr long PANEL_WIDTH = TILE_VECTORS * LANES;

template <int R>
using Tile = vf[R][TILE_VECTORS];

// Padding of rows that tiles read together: with strides of powers of two, they would share a bank of the L1 cache.
constexpr long ROW_PADDING = 8;

// Adds the product of x and panel to a tile. The value of row r and k is x[r * row_stride + k * k_stride].
template <int R>
INLINE void add_products(Tile<R> &sums, const float *x, long row_stride, const float *panel, long k_count,
                         long k_stride = 1) {
    const auto step = [&](long k) __attribute__((always_inline)) {
        vf columns[TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; v++) columns[v] = load(panel + k * PANEL_WIDTH + v * LANES);
        for (int r = 0; r < R; r++) {
            vf value = splat(x[r * row_stride + k * k_stride]);
            for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] = fma(columns[v], value, sums[r][v]);
        }
    };
    long k = 0;
    for (; k + 2 <= k_count; k += 2) step(k), step(k + 1);
    if (k < k_count) step(k);
}

#if defined(__AVX512BF16__)
// The same for bfloat16, two k at a time: panels are [k / 2][PANEL_WIDTH][2].
template <int R>
INLINE void add_products(Tile<R> &sums, const bf16 *x, long row_stride, const bf16 *panel, long k_count) {
    for (long k = 0; k < k_count; k += 2) {
        __m512bh columns[TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; v++)
            columns[v] = (__m512bh)_mm512_loadu_si512(panel + k * PANEL_WIDTH + v * LANES * 2);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, x + r * row_stride + k, 4);
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[r][v] = (vf)_mm512_dpbf16_ps((__m512)sums[r][v], columns[v], (__m512bh)_mm512_set1_epi32(pair));
        }
    }
}
#endif

// Loads the first `count` values followed by zeros, or stores `count` values. A negative count means none.
template <class T>
INLINE vf load_part(const T *p, long count) {
    return count >= LANES ? load(p) : count > 0 ? load(p, Part{count}) : vf{};
}

template <class T>
INLINE void store_part(T *p, vf x, long count) {
    if (count >= LANES) return store(p, x);
    if (count > 0) store(p, x, Part{count});
}

// 0, 1, 2, ... in the lanes.
INLINE vi lane_index() {
    vi x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    return x;
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// Interleaves the lower halves of a and b, or the upper halves.
#if LANES == 16
INLINE vf interleave_low(vf a, vf b) { return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
INLINE vf interleave_high(vf a, vf b) {
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif LANES == 8
INLINE vf interleave_low(vf a, vf b) { return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
INLINE vf interleave_high(vf a, vf b) { return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
INLINE vf interleave_low(vf a, vf b) { return SHUFFLE(a, b, 0, 4, 1, 5); }
INLINE vf interleave_high(vf a, vf b) { return SHUFFLE(a, b, 2, 6, 3, 7); }
#endif

INLINE void transpose(vf (&x)[LANES]) {
    for (int step = 1; step < LANES; step *= 2) {
        vf from[LANES];
        for (int i = 0; i < LANES; i++) from[i] = x[i];
        for (int i = 0; i < LANES / 2; i++) {
            x[2 * i] = interleave_low(from[i], from[i + LANES / 2]);
            x[2 * i + 1] = interleave_high(from[i], from[i + LANES / 2]);
        }
    }
}

// Copies rows of `dim` values into the columns of panels of floats. row(i) is the address of a row. The last panel's
// padding may be anything.
template <class Row>
INLINE void rows_to_columns(long count, long dim, float *panels, const Row &row) {
    for (long first = 0; first < count; first += LANES) {
        float *to = panels + first / PANEL_WIDTH * dim * PANEL_WIDTH + first % PANEL_WIDTH;
        decltype(row(0)) rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = row(std::min(first + i, count - 1));
        over_vectors(dim, [&](long d, auto some) {
            vf x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = load(rows[i] + d, some);
            transpose(x);
            for (int i = 0; i < LANES && d + i < dim; i++) store(to + (d + i) * PANEL_WIDTH, x[i]);
        });
    }
}
