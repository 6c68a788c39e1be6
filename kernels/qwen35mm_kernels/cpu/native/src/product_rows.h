// Inputs and outputs of products, shared by all weight formats.
#pragma once

#include "runs.h"
#include "weight.h"

namespace {

constexpr int PER_BLOCK = BLOCK / LANES;  // vectors for one k of a block's rows

// Prefetch distance of weights in bytes: the processor's own prefetcher is late with several streams. Several rows take
// longer and need a larger distance. Scales have fewer bytes.
constexpr long prefetch_bytes(int rows) { return rows > 1 ? 1536 : LANES == 16 ? 128 : 512; }
constexpr long SCALES_AHEAD = 64;

// The most blocks at once. Few rows are memory-bound, and a thread gets half more bandwidth from several long streams
// than from one.
constexpr int STREAMS = 4;

// Calls work(block, apart, Count<N>) so that each of the blocks [first, end) is done once: N blocks at a time with a
// distance of `apart` blocks, so that each stream is consecutive, then single blocks.
template <int N, class Work>
INLINE void over_streams(long first, long end, const Work &work) {
    const long apart = (end - first) / N;
    for (long i = 0; i < apart; i++) work(first + i, apart, Count<N>{});
    for (long b = first + apart * N; b < end; b++) work(b, 1L, Count<1>{});
}

// Whether the N streams of [first, end) end with block b, or the single blocks behind them (V is 1).
template <int N, int V>
INLINE bool ends_streams(long b, long first, long end) {
    return b + 1 == (V == N ? first + (end - first) / N : end);
}

// What to fetch to the L2 cache while a tile is multiplied: for each of its vectors, bytes from `begin` on of the block
// that lies `distance` bytes behind. Each step fetches some: a burst would wait for the memory.
struct Ahead {
    long distance = 0, begin = 0;
    long per_step = 0;  // in 1 / 65536 byte

    // The part of the next block's `bytes` that falls to rows [row, row + some) of `count`.
    static Ahead part(long distance, long bytes, long row, long some, long count, long steps) {
        const long begin = bytes * row / count & -64;
        return {distance, begin, ((bytes * (row + some) / count - begin) << 16) / steps};
    }

    template <int V>
    INLINE_MEMBER void fetch(const char *const (&w)[V], long step) const {
        const long end = (step + 1) * per_step >> 16;
        for (long at = ((step * per_step >> 16) + 63) & -64; at < end; at += 64)
            for (int v = 0; v < V; v++) __builtin_prefetch(w[v] + distance + begin + at, 0, 2);
    }
};

// The rows to multiply by, [count][width], in the instructions' type. width is the padded `in`.
struct Rows {
    long count, width;
    const float *floats = nullptr;  // FLOAT32, and BFLOAT16 without products of bfloat16
    const bf16 *halves = nullptr;   // BFLOAT16
    const int8_t *bytes = nullptr;  // integers: values divided by their group's scale
    const float *scales = nullptr;  // [count][width / GROUP]
    const int32_t *sums = nullptr;  // [count][width / GROUP][2], of the bytes of a group's halves

    const int32_t *half_sums(long row, long g) const { return sums + (row * (width / GROUP) + g) * 2; }
    int32_t sum(long row, long g) const { return half_sums(row, g)[0] + half_sums(row, g)[1]; }
};

// The output y [rows][out] with a stride of `stride` values, and the bias [out] to add, floats or bfloat16.
struct Output {
    void *y;
    const void *bias;
    long out, stride;
    bool is_bf16;
};

template <class T>
INLINE void write_vector(const Output &to, long row, long first, vf sums) {
    T *y = static_cast<T *>(to.y) + row * to.stride + first;
    const T *bias = to.bias ? static_cast<const T *>(to.bias) + first : nullptr;
    if (first + LANES <= to.out) return store(y, bias ? sums + load(bias) : sums);
    for (long i = 0; i < to.out - first; i++) put(y + i, sums[i] + (bias ? get(bias + i) : 0.0f));
}

// Prefetches the places of `write_tile`, which are pages apart.
template <int R, int V>
INLINE void prefetch_tile(const Output &to, long row, long first, long apart) {
    const long size = to.is_bf16 ? 2 : 4;
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            __builtin_prefetch(
                static_cast<const char *>(to.y) +
                    ((row + r) * to.stride + first + (v / PER_BLOCK * apart * BLOCK + v % PER_BLOCK * LANES)) * size,
                1);
}

// Writes R rows by V vectors of outputs, of blocks with a distance of `apart` blocks; the first is output `first`.
template <int R, int V>
INLINE void write_tile(const Output &to, long row, long first, const vf (&sums)[R][V], long apart = 1) {
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            const long place = first + v / PER_BLOCK * apart * BLOCK + v % PER_BLOCK * LANES;
            if (place < to.out)
                to.is_bf16 ? write_vector<bf16>(to, row + r, place, sums[r][v])
                           : write_vector<float>(to, row + r, place, sums[r][v]);
        }
}

}  // namespace
