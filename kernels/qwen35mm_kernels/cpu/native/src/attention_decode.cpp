// Attention of one new token of each sequence over its cached tokens.
//
// A sequence is cut into parts of a fixed length. Threads share the parts, which are added in order, so that the
// result's bits depend only on the sequence's keys. Keys and values are read once for all query heads that share them,
// without a copy.
#include "exp2.h"
#include "kv_rows.h"
#include "runs.h"
#include "scratch.h"
#include "strided.h"
#include "threads.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>

struct DecodeAttention {
    Strided q, gate;             // float or bfloat16, one row a sequence
    KVRows k, v;                 // rows of the pool
    const int32_t *block_table;  // [num_sequences][table_row]
    const int32_t *lengths;      // [num_sequences]
    void *out;                   // [num_sequences][num_heads][head_dim], type of q
    long num_sequences, table_row;
    long num_heads, num_kv_heads, head_dim, block_size;
    float scale;
};

namespace {

constexpr long PART = 256;
// Keys of all heads worth another thread.
constexpr long KEYS_PER_THREAD = 512;
constexpr int KEYS = 4, VECTORS = 2;  // of a step of the weighted sum
constexpr long ROWS_AHEAD = 8;        // prefetch distance

// A part's sums for one query head: head_dim weighted values, the largest score, the sum of weights.
struct Parts {
    float *data;
    long row;

    float *of(long part, long num_heads, long head) const { return data + (part * num_heads + head) * row; }
};

// At dimension d of `count` rows, prefetches the rows ROWS_AHEAD after them. Rows of one head are not adjacent, so the
// processor doesn't prefetch them. Prefetching a whole row at a time took a fifth longer.
template <class Row>
INLINE void prefetch(Row, const uint8_t *const *rows, int count, long d) {
    if (Row::offset(d) / 64 != Row::offset(d - LANES) / 64 || d == 0)
        for (int i = 0; i < count; i++) __builtin_prefetch(rows[i + ROWS_AHEAD] + Row::offset(d), 0, 2);
}

// scores[h][j] of H query heads with keys [first, first + LANES / H). Transposes vectors of sums to add their lanes.
template <int H, class Row>
INLINE void score(Row row, const float *queries, long query_row, const uint8_t *const *keys, long dim, float *scores) {
    constexpr int K = LANES / H;
    vf sums[LANES] = {};
    over_vectors(dim, [&](long d, auto some) {
        prefetch(row, keys, K, d);
        for (int j = 0; j < K; j++) {
            vf key = row.from(keys[j], dim, d, some);
            for (int h = 0; h < H; h++) sums[h * K + j] = fma(key, load(queries + h * query_row + d), sums[h * K + j]);
        }
    });
    transpose(sums);
    vf total = sums[0];
    for (int i = 1; i < LANES; i++) total += sums[i];
    for (int h = 0; h < H; h++)
        for (int j = 0; j < K; j++) scores[h * PART + j] = total[h * K + j];
}

// Adds KEYS weighted values to the sums of H heads.
template <int H, class Row>
INLINE void add_values(Row row, const float *weights, const uint8_t *const *values, long dim, float *sums,
                       long sums_row) {
    const auto add = [&](long d, auto vectors, auto some) {
        constexpr int V = vectors();
        prefetch(row, values, KEYS, d);
        vf total[H][V];
        for (int h = 0; h < H; h++)
            for (int v = 0; v < V; v++) total[h][v] = load(sums + h * sums_row + d + v * LANES);
        for (int j = 0; j < KEYS; j++) {
            vf value[V];
            for (int v = 0; v < V; v++) value[v] = row.from(values[j], dim, d + v * LANES, some);
            for (int h = 0; h < H; h++)
                for (int v = 0; v < V; v++) total[h][v] = fma(value[v], splat(weights[h * PART + j]), total[h][v]);
        }
        for (int h = 0; h < H; h++)
            for (int v = 0; v < V; v++) store(sums + h * sums_row + d + v * LANES, total[h][v]);
    };
    long first = 0;
    for (; first + VECTORS * LANES <= dim; first += VECTORS * LANES) add(first, Count<VECTORS>{}, Whole{});
    over_vectors(dim - first, [&](long d, auto some) { add(first + d, Count<1>{}, some); });
}

// Turns scores into weights, and writes the part's largest score and sum of weights.
INLINE void weigh(float *scores, long count, float *largest_and_sum) {
    vf largest = splat(-INFINITY), sums = {};
    for (long j = 0; j < count; j += LANES) {
        vf seen = lane_index() < int32_t(count - j) ? load(scores + j) : splat(-INFINITY);
        store(scores + j, seen);
        largest = max(largest, seen);
    }
    const float maximum = max_lane(largest);
    for (long j = 0; j < count; j += LANES) {
        vf weight = exp2(load(scores + j) - maximum);
        weight = lane_index() < int32_t(count - j) ? weight : vf{};
        store(scores + j, weight);
        sums += weight;
    }
    largest_and_sum[0] = maximum, largest_and_sum[1] = sum(sums);
}

template <class T>
void attend_part(const DecodeAttention &all, long sequence, long first, long kv_head, float *parts, long parts_row) {
    const long dim = all.head_dim, padded = (dim + LANES - 1) / LANES * LANES;
    const long group = all.num_heads / all.num_kv_heads, count = std::min(PART, all.lengths[sequence] - first);
    // A tile past the last key reads the last key again, and so does the prefetch.
    constexpr long MARGIN = LANES + ROWS_AHEAD;
    const uint8_t *keys[PART + MARGIN], *values[PART + MARGIN];
    for (long i = 0; i < count; i++) {
        const long block = all.block_table[sequence * all.table_row + (first + i) / all.block_size];
        const long row = block * all.block_size + (first + i) % all.block_size;
        keys[i] = all.k.at(row, kv_head), values[i] = all.v.at(row, kv_head);
    }
    std::fill_n(keys + count, MARGIN, keys[count - 1]);
    std::fill_n(values + count, MARGIN, values[count - 1]);
    float *queries = scratch<float, 42>(group * (padded + PART)), *scores = queries + group * padded;
    for (long h = 0; h < group; h++) {
        const T *query = place<T>(all.q, sequence, kv_head * group + h);
        for (long d = 0; d < padded; d += LANES)
            store(queries + h * padded + d, load_part(query + d, dim - d) * (all.scale * 1.44269504f));
        if (is_rotated(all.k.format)) rotate_row(queries + h * padded, dim);
    }
    in_runs<4>(0, group, [&](long h, auto heads) {
        constexpr int H = heads();
        float *sums = parts + h * parts_row;
        with_format(all.k.format, [&](auto row) {
            for (long j = 0; j < count; j += LANES / H)
                score<H>(row, queries + h * padded, padded, keys + j, dim, scores + h * PART + j);
        });
        for (int i = 0; i < H; i++) {
            std::fill_n(sums + i * parts_row, padded, 0.0f);
            weigh(scores + (h + i) * PART, count, sums + i * parts_row + padded);
        }
        with_format(all.v.format, [&](auto row) {
            for (long j = 0; j < count; j += KEYS)
                add_values<H>(row, scores + h * PART + j, values + j, dim, sums, parts_row);
        });
    });
}

// Combines the parts of a query head in order.
template <class T>
void merge(const DecodeAttention &all, long sequence, long head, const Parts &parts, long first, long count) {
    const long dim = all.head_dim, padded = (dim + LANES - 1) / LANES * LANES;
    float largest = -INFINITY, total = 0.0f;
    for (long p = 0; p < count; p++) largest = std::max(largest, parts.of(first + p, all.num_heads, head)[padded]);
    T *out = static_cast<T *>(all.out) + (sequence * all.num_heads + head) * dim;
    for (long p = 0; p < count; p++) {
        float *part = parts.of(first + p, all.num_heads, head);
        part[padded] = exp2(splat(part[padded] - largest))[0];
        total += part[padded] * part[padded + 1];
    }
    if (!count) return void(std::fill_n(out, dim, T(0)));
    float *attended = parts.of(first, all.num_heads, head);
    for (long d = 0; d < dim; d += LANES) {
        vf sums = {};
        for (long p = 0; p < count; p++) {
            const float *part = parts.of(first + p, all.num_heads, head);
            sums = fma(load(part + d), splat(part[padded]), sums);
        }
        store(attended + d, sums * (1.0f / total));
    }
    if (is_rotated(all.v.format)) rotate_row_back(attended, dim);
    const T *gate = place<T>(all.gate, sequence, head);
    for (long d = 0; d < dim; d += LANES)
        store_part(out + d, load(attended + d) * sigmoid(load_part(gate + d, dim - d)), dim - d);
}

template <class T>
void attention_decode(const DecodeAttention &all, int num_threads) {
    const long batch = all.num_sequences, padded = (all.head_dim + LANES - 1) / LANES * LANES;
    // starts[b]: number of parts of the sequences before b.
    long *starts = scratch<long, 43>(batch + 1), keys = 0;
    starts[0] = 0;
    for (long b = 0; b < batch; b++) {
        starts[b + 1] = starts[b] + (all.lengths[b] + PART - 1) / PART;
        keys += all.lengths[b] * all.num_kv_heads;
    }
    const long group = all.num_heads / all.num_kv_heads, row = padded + LANES;
    const Parts parts{scratch<float, 44>(starts[batch] * all.num_heads * row), row};
    const int threads = int(std::min<long>(num_threads, 1 + keys / KEYS_PER_THREAD));
    parallel(starts[batch] * all.num_kv_heads, threads, [&](long task) {
        const long part = task / all.num_kv_heads, kv_head = task % all.num_kv_heads;
        const long b = std::upper_bound(starts, starts + batch + 1, part) - starts - 1;
        float *to = parts.of(part, all.num_heads, kv_head * group);
        attend_part<T>(all, b, (part - starts[b]) * PART, kv_head, to, row);
    });
    for (long b = 0; b < batch; b++)
        for (long head = 0; head < all.num_heads; head++)
            merge<T>(all, b, head, parts, starts[b], starts[b + 1] - starts[b]);
}

}  // namespace

extern "C" {

// See reference.attention.paged_attention_decode.
void qwen_paged_attention_decode(const DecodeAttention *attention, long is_bf16, long num_threads) {
    is_bf16 ? attention_decode<bf16>(*attention, num_threads) : attention_decode<float>(*attention, num_threads);
}
}
