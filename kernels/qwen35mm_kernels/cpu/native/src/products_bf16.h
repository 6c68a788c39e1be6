// Products of bfloat16 weights with AVX-512-BF16.
#pragma once

#include "product_rows.h"
#include "runs.h"

#include <algorithm>

#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
namespace {

// The most rows that read weights as several streams.
constexpr long MOST_STREAMED = 32;

template <int R, int V>
INLINE void bf16_tile(const char *const (&w)[V], const bf16 *x, long stride, long k_count, const Ahead &ahead,
                      vf (&sums)[R][V]) {
    for (long k = 0; k < k_count; k += 2) {
        if (ahead.per_step) ahead.fetch(w, k / 2);
        __m512bh weights[V];
        for (int v = 0; v < V; v++) {
            // For many rows, they are in the L2 cache after the first rows.
            if (R <= 4) __builtin_prefetch(w[v] + k * BLOCK * 2 + prefetch_bytes(R));
            weights[v] = (__m512bh)_mm512_loadu_si512(w[v] + k * BLOCK * 2);
        }
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, x + r * stride + k, 4);
            for (int v = 0; v < V; v++)
                sums[r][v] = (vf)_mm512_dpbf16_ps((__m512)sums[r][v], weights[v], (__m512bh)_mm512_set1_epi32(pair));
        }
    }
}

void bf16_strip(const Weight &w, const Rows &x, long first, long end, const Output &out) {
    const long size = block_bytes(w);
    // `next`: how many blocks further the strip goes on; 0 at its end.
    const auto run = [&](long b, long apart, auto blocks, long next) {
        constexpr int V = blocks();
        const char *places[V];
        for (int v = 0; v < V; v++) places[v] = block(w, b + v * apart);
        const long ahead = x.count > 4 && next ? size : 0;
        in_even_runs<V == 4 ? 6 : 12>(x.count, [&](long row, auto rows) {
            prefetch_tile<rows(), V>(out, row, b * BLOCK, apart);
            vf sums[rows()][V] = {};
            bf16_tile<rows(), V>(places, x.halves + row * x.width, x.width, x.width,
                                 Ahead::part(next * size, ahead, row, rows(), x.count, x.width / 2), sums);
            write_tile(out, row, b * BLOCK, sums, apart);
        });
    };
    // Streams leave a row's outputs in pieces, which costs many rows more than it saves.
    if (x.count <= MOST_STREAMED)
        return over_streams<STREAMS>(first, end, [&](long b, long apart, auto blocks) {
            run(b, apart, blocks, !ends_streams<STREAMS, blocks()>(b, first, end));
        });
    in_runs<4>(first, end, [&](long b, auto blocks) { run(b, 1L, blocks, b + 2 * blocks() <= end ? blocks() : 0); });
}

}  // namespace
#endif
