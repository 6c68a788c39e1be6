// Products of float32 weights, and of bfloat16 weights if the processor has no bfloat16 products.
#pragma once

#include "product_rows.h"
#include "runs.h"
#include "scratch.h"

#include <algorithm>

namespace {

// Adds R rows by V vectors of outputs over k. Vector v's k is at w[v] + k * BLOCK.
template <int R, int V>
INLINE void float_tile(const float *const *w, const float *x, long stride, long k_count, vf (&sums)[R][V]) {
    for (long k = 0; k < k_count; k++) {
        vf weights[V];
        for (int v = 0; v < V; v++) weights[v] = load(w[v] + k * BLOCK);
        for (int r = 0; r < R; r++) {
            vf value = splat(x[r * stride + k]);
            for (int v = 0; v < V; v++) sums[r][v] = fma(weights[v], value, sums[r][v]);
        }
    }
}

// The same, directly from pairs of bfloat16: for few rows, which read the weights once.
template <int R, int V>
INLINE void half_tile(const uint32_t *const *w, const float *x, long stride, long k_count, vf (&sums)[R][V]) {
    for (long k = 0; k < k_count; k += 2) {
        // Few vectors at a time, so that they stay in registers beside the sums.
        constexpr int SOME = R == 1 ? 1 : V;
        for (int start = 0; start < V; start += SOME) {
            vf even[SOME], odd[SOME];
            for (int v = 0; v < SOME; v++) {
                const uint32_t *place = w[start + v] + k / 2 * BLOCK;
                __builtin_prefetch(place + prefetch_bytes(R) / 4);
                vu pairs = *reinterpret_cast<const vu *>(place);
                even[v] = bits_to_float(pairs << 16), odd[v] = bits_to_float(pairs & 0xffff0000u);
            }
            for (int r = 0; r < R; r++) {
                vf first = splat(x[r * stride + k]), second = splat(x[r * stride + k + 1]);
                for (int v = 0; v < SOME; v++) {
                    vf &total = sums[r][start + v];
                    total = fma(odd[v], second, fma(even[v], first, total));
                }
            }
        }
    }
}

// Number of k in a panel: [PANEL][16] floats are 64 KiB, which stay in the L2 cache beside the rows.
constexpr long PANEL = 1024;
// A tile's sums fill the registers.
constexpr int TILE_ROWS = LANES == 16 ? 12 : 6, TILE_BLOCKS = LANES == 16 ? 2 : 1;

// The start of each vector, in blocks with a distance of `apart` blocks.
template <int V, class T>
INLINE void find_places(const Weight &w, long first_block, const T *(&places)[V], long apart = 1) {
    for (int v = 0; v < V; v++)
        places[v] = reinterpret_cast<const T *>(block(w, first_block + v / PER_BLOCK * apart)) + v % PER_BLOCK * LANES;
}

template <int R, int V>
INLINE void few_rows(const Weight &w, const Rows &x, long first_block, long apart, const Output &out) {
    vf sums[R][V] = {};
    if (w.format == FLOAT32) {
        const float *places[V];
        find_places(w, first_block, places, apart);
        float_tile<R, V>(places, x.floats, x.width, x.width, sums);
    } else {
        const uint32_t *places[V];
        find_places(w, first_block, places, apart);
        half_tile<R, V>(places, x.floats, x.width, x.width, sums);
    }
    write_tile(out, 0, first_block * BLOCK, sums, apart);
}

template <int R>
void float_strip_few(const Weight &w, const Rows &x, long first, long end, const Output &out) {
    // As many blocks at once as their sums fit into registers.
    constexpr int MOST = R == 1 ? STREAMS : R == 2 ? STREAMS / 2 : 1;
    over_streams<MOST>(
        first, end, [&](long b, long apart, auto blocks) { few_rows<R, blocks() * PER_BLOCK>(w, x, b, apart, out); });
}

// Converts a block of bfloat16 to floats [k_count][BLOCK].
void expand_panel(const char *place, long k, long k_count, float *panel) {
    const uint32_t *pairs = reinterpret_cast<const uint32_t *>(place) + k / 2 * BLOCK;
    for (long i = 0; i < k_count; i += 2, pairs += BLOCK, panel += 2 * BLOCK)
        for (int v = 0; v < BLOCK; v += LANES) {
            vu both = *reinterpret_cast<const vu *>(pairs + v);
            store(panel + v, bits_to_float(both << 16));
            store(panel + BLOCK + v, bits_to_float(both & 0xffff0000u));
        }
}

template <int V>
void float_strip_many(const Weight &w, const Rows &x, long first_block, const Output &out) {
    constexpr int BLOCKS = V / PER_BLOCK;
    float *panel = scratch<float, 0>(BLOCKS * PANEL * BLOCK);
    float *partial = scratch<float, 1>(x.width > PANEL ? x.count * V * LANES : 0);
    for (long k = 0; k < x.width; k += PANEL) {
        const long k_count = std::min(PANEL, x.width - k);
        const float *places[V];
        if (w.format == FLOAT32) {
            find_places(w, first_block, places);
            for (int v = 0; v < V; v++) places[v] += k * BLOCK;
        } else {
            for (int b = 0; b < BLOCKS; b++)
                expand_panel(block(w, first_block + b), k, k_count, panel + b * PANEL * BLOCK);
            for (int v = 0; v < V; v++) places[v] = panel + v / PER_BLOCK * PANEL * BLOCK + v % PER_BLOCK * LANES;
        }
        in_runs<TILE_ROWS>(0, x.count, [&](long row, auto rows) {
            constexpr int R = rows();
            vf sums[R][V] = {};
            float *kept = partial + row * V * LANES;
            if (k)
                for (int i = 0; i < R * V; i++) sums[i / V][i % V] = load(kept + i * LANES);
            float_tile<R, V>(places, x.floats + row * x.width + k, x.width, k_count, sums);
            if (k + k_count == x.width) return write_tile(out, row, first_block * BLOCK, sums);
            for (int i = 0; i < R * V; i++) store(kept + i * LANES, sums[i / V][i % V]);
        });
    }
}

void float_strip(const Weight &w, const Rows &x, long first, long end, const Output &out) {
    switch (x.count) {
        case 1: return float_strip_few<1>(w, x, first, end, out);
        case 2: return float_strip_few<2>(w, x, first, end, out);
        case 3: return float_strip_few<3>(w, x, first, end, out);
        case 4: return float_strip_few<4>(w, x, first, end, out);
    }
    in_runs<TILE_BLOCKS>(first, end,
                         [&](long b, auto blocks) { float_strip_many<blocks() * PER_BLOCK>(w, x, b, out); });
}

}  // namespace
