// Products with AMX's tiles: bfloat16 weights, and integers with many rows.
#pragma once

#include "product_rows.h"
#include "runs.h"
#include "scratch.h"

#include <algorithm>

#if defined(__AMX_TILE__)
namespace {

// Tiles multiply integers from so many rows on: a tile takes as long for one row as for 16. Same bits as vectors.
constexpr long INTEGER_TILE_ROWS = 8;

// Tiles 0 to 3 are sums [16 rows][16 outputs], 4 and 5 rows [16][k], 6 and 7 blocks of weights [k / some][16][some],
// where k is 32 and `some` values take four bytes; a row of k takes `k_bytes`. Rows past the end may be anything, but
// their memory must exist: 16 at a time, unless there are fewer in total.
void configure_tiles(int rows, int k_bytes) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t width[16] = {};
        uint8_t height[16] = {};
    } config;
    for (int tile = 0; tile < 8; tile++) {
        config.width[tile] = tile == 4 || tile == 5 ? uint16_t(k_bytes) : 64;
        config.height[tile] = uint8_t(tile < 6 ? rows : k_bytes / 4);
    }
    // GCC doesn't know which memory its intrinsics read and would drop most of the stores above.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

template <int R, int V>
INLINE void amx_tile(const char *const *w, const bf16 *x, long stride, long k_count, float (&sums)[R][V][16][16]) {
    _tile_zero(0);
    if (V > 1) _tile_zero(1);
    if (R > 1) _tile_zero(2);
    if (R > 1 && V > 1) _tile_zero(3);
    for (long k = 0; k < k_count; k += 32) {
        _tile_loadd(4, x + k, stride * 2);
        _tile_stream_loadd(6, w[0] + k * BLOCK * 2, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (V > 1) {
            _tile_stream_loadd(7, w[V - 1] + k * BLOCK * 2, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (R > 1) {
            _tile_loadd(5, x + 16 * stride + k, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (V > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    if (V > 1) _tile_stored(1, sums[0][V - 1], 64);
    if (R > 1) _tile_stored(2, sums[R - 1][0], 64);
    if (R > 1 && V > 1) _tile_stored(3, sums[R - 1][V - 1], 64);
}

void amx_strip(const Weight &w, const Rows &x, long first, long end, const Output &out) {
    configure_tiles(int(std::min(x.count, 16L)), 64);
    over_streams<2>(first, end, [&](long b, long apart, auto blocks) {
        constexpr int V = blocks();
        const char *places[V];
        for (int v = 0; v < V; v++) places[v] = block(w, b + v * apart);
        in_runs<2>(0, (x.count + 15) / 16, [&](long tile, auto tiles) {
            constexpr int R = tiles();
            const long row = tile * 16;
            alignas(64) float sums[R][V][16][16];
            amx_tile<R, V>(places, x.halves + row * x.width, x.width, x.width, sums);
            for (long r = 0; r < std::min(x.count - row, 16L * R); r++) {
                vf found[1][V];
                for (int v = 0; v < V; v++) found[0][v] = load(sums[r / 16][v][r % 16]);
                write_tile(out, row + r, b * BLOCK, found, apart);
            }
        });
    });
    _tile_release();
}

// The exact dot products of 16 rows with a block's 16 outputs, in two groups.
INLINE void integer_tiles(const int8_t *const (&x)[2], long stride, const char *const (&w)[2],
                          int32_t (&dots)[2][16][16]) {
    _tile_zero(0);
    _tile_loadd(4, x[0], stride);
    _tile_loadd(6, w[0], 64);
    _tile_dpbssd(0, 4, 6);
    _tile_zero(1);
    _tile_loadd(5, x[1], stride);
    _tile_loadd(7, w[1], 64);
    _tile_dpbssd(1, 5, 7);
    _tile_stored(0, dots[0], 64);
    _tile_stored(1, dots[1], 64);
}

// A block of int4 as int8.
const char *expand_int4(const char *place, long groups) {
    typedef int8_t Bytes __attribute__((vector_size(64), aligned(1), may_alias));
    char *bytes = scratch<char, 5>(groups * GROUP * BLOCK);
    for (long g = 0; g < groups; g++)
        for (long j = 0; j < 4; j++) {
            const Bytes both = *reinterpret_cast<const Bytes *>(place + (g * 4 + j) * 64);
            *reinterpret_cast<Bytes *>(bytes + (g * 8 + j) * 64) = (both & 15) - 8;
            *reinterpret_cast<Bytes *>(bytes + (g * 8 + j + 4) * 64) = ((both >> 4) & 15) - 8;
        }
    asm volatile("" : : : "memory");  // see the configuration
    return bytes;
}

// Like `integer_strip`: a group's dot products are exact and are added to the sums in order.
void amx_integer_strip(const Weight &w, const Rows &x, long first, long end, const Output &out) {
    const long groups = x.width / GROUP;
    configure_tiles(int(std::min(x.count, 16L)), GROUP);
    for (long b = first; b < end; b++) {
        const char *data = w.format == INT4 ? expand_int4(block(w, b), groups) : block(w, b);
        const bf16 *scales = block_scales(w, b);
        for (long row = 0; row < x.count; row += 16) {
            const int8_t *bytes = x.bytes + row * x.width;
            vf sums[16] = {};
            for (long g = 0; g < groups; g += 2) {
                const long last = std::min(g + 1, groups - 1);
                alignas(64) int32_t dots[2][16][16];
                integer_tiles({bytes + g * GROUP, bytes + last * GROUP}, x.width,
                              {data + g * GROUP * BLOCK, data + last * GROUP * BLOCK}, dots);
                const auto add = [&](long group, const int32_t (&found)[16][16]) {
                    const vf scale = load(scales + group * BLOCK);
                    const float *row_scales = x.scales + row * groups + group;
                    for (int r = 0; r < 16; r++)
                        sums[r] = fma(to_float(*reinterpret_cast<const vi *>(found[r])),
                                      scale * splat(row_scales[r * groups]), sums[r]);
                };
                add(g, dots[0]);
                if (last > g) add(last, dots[1]);
            }
            alignas(64) float found[16][16];
            for (int r = 0; r < 16; r++) store(found[r], sums[r]);
            for (long r = 0; r < std::min(x.count - row, 16L); r++) {
                const vf one[1][1] = {{load(found[r])}};
                write_tile(out, row + r, b * BLOCK, one);
            }
        }
    }
    _tile_release();
}

}  // namespace
#endif
