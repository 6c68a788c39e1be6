// What every product reads and writes, whatever the weights' format.
#pragma once

#include "runs.h"
#include "weight.h"

namespace {

constexpr int PER_BLOCK = BLOCK / LANES;  // vectors that hold one k of a block's rows

// How far ahead weights are asked for, in bytes: the processor's own prefetcher comes late where several streams run.
// Several rows take longer over them, and want them from farther; scales are fewer bytes.
constexpr long prefetch_bytes(int rows) { return rows > 1 ? 1536 : LANES == 16 ? 128 : 512; }
constexpr long SCALES_AHEAD = 64;

// Few rows take as long as reading the weights does, and memory gives a half more to a thread that reads several long
// streams at once than to one that reads a single stream: so many blocks, at most.
constexpr int STREAMS = 4;

// work(block, apart, Count<N>) for blocks [first, end), each once: N blocks at a time that lie `apart` blocks from each
// other, so that each stream goes on where it was; single ones at the end.
template <int N, class Work>
INLINE void over_streams(long first, long end, const Work &work) {
    const long apart = (end - first) / N;
    for (long i = 0; i < apart; i++) work(first + i, apart, Count<N>{});
    for (long b = first + apart * N; b < end; b++) work(b, 1L, Count<1>{});
}

// The rows to multiply by, [count][width], in the type that the instructions take; width is `in`, padded.
struct Rows {
    long count, width;
    const float *floats = nullptr;  // FLOAT32, and BFLOAT16 where there are no products of bfloat16
    const bf16 *halves = nullptr;   // BFLOAT16
    const int8_t *bytes = nullptr;  // integers: values over their group's scale
    const float *scales = nullptr;  // [count][width / GROUP]
    const int32_t *sums = nullptr;  // [count][width / GROUP][2], of the bytes of a group's halves

    const int32_t *half_sums(long row, long g) const { return sums + (row * (width / GROUP) + g) * 2; }
    int32_t sum(long row, long g) const { return half_sums(row, g)[0] + half_sums(row, g)[1]; }
};

// Where sums go: y [rows][out], rows `stride` values apart, and the bias [out] that is added, floats or bfloat16.
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

// Has the places of `write_tile` come into the cache meanwhile: they lie pages apart.
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

// R rows by V vectors of outputs, those of blocks that lie `apart` blocks from each other; the first is output `first`.
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
