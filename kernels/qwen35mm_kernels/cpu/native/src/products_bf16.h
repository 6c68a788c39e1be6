// Products of bfloat16 weights with AVX-512-BF16.
#pragma once

#include "product_rows.h"
#include "runs.h"

#include <algorithm>

#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
namespace {

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
    over_streams<STREAMS>(first, end, [&](long b, long apart, auto blocks) {
        constexpr int V = blocks();
        const char *places[V];
        for (int v = 0; v < V; v++) places[v] = block(w, b + v * apart);
        const long ahead = x.count > 4 && !ends_streams<STREAMS, V>(b, first, end) ? block_bytes(w) : 0;
        in_even_runs<V == 4 ? 6 : 12>(x.count, [&](long row, auto rows) {
            prefetch_tile<rows(), V>(out, row, b * BLOCK, apart);
            vf sums[rows()][V] = {};
            bf16_tile<rows(), V>(places, x.halves + row * x.width, x.width, x.width,
                                 Ahead::part(block_bytes(w), ahead, row, rows(), x.count, x.width / 2), sums);
            write_tile(out, row, b * BLOCK, sums, apart);
        });
    });
}

}  // namespace
#endif
