// Attention of many queries: causal over blocks of a KV cache, and full inside a frame of the vision tower.
//
// Like FlashAttention (arXiv:2205.14135): a task takes some queries of a key head through its keys, one tile at a time,
// with a running maximum and sum. Keys and values are copied into panels once for all of a task's queries, as floats or
// as pairs of bfloat16 if the processor multiplies these. Tiles of keys begin at the sequence's start, so that a
// query's bits don't depend on other queries.
#include "exp2.h"
#include "kv_rows.h"
#include "scratch.h"
#include "strided.h"
#include "threads.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>

struct Attention {
    Strided q;  // float or bfloat16
    KVRows k, v;
    Strided gate;                                        // type of q; null data: no gate
    const int32_t *block_table;                          // null: keys are in order
    void *out;                                           // [tokens][num_heads][head_dim], type of q
    long num_tokens, num_keys;                           // of a frame; the last query sees all keys
    long num_frames;                                     // consecutive
    long num_heads, num_kv_heads, head_dim, block_size;  // head_dim is even
    long is_causal;
    float scale;
};

namespace {

constexpr long KEYS = LANES == 16 ? 128 : 64, SCORES_ROW = KEYS + ROW_PADDING;  // of a tile
// Floats of a task's queries, outputs and scores, which stay in the L2 cache beside a tile's keys and values.
constexpr long TASK_FLOATS = (LANES == 16 ? 168 : 56) << 10;

// The type in which values of type T are multiplied.
#if defined(__AVX512BF16__)
template <class T>
using Factor = T;
#else
template <class T>
using Factor = float;
#endif

// Some (token, head) pairs of a key head: rows begin + i, head by head of a token.
struct Task {
    long frame, kv_head, begin, count;
};

template <class F>
struct Workspace {
    long row;       // head_dim, padded
    F *queries;     // [count][row]
    float *out;     // [count][width]: sums of weighted values
    float *scores;  // [count][SCORES_ROW]; rows become weights in place
    float *maxima;  // [count]
    float *shares;  // [count]: factor of the previous sums after a new maximum
    float *sums;    // [count][LANES]
    F *keys;        // panels: [KEYS / PANEL_WIDTH][head_dim][PANEL_WIDTH], or of pairs along head_dim
    F *values;      // panels: [width / PANEL_WIDTH][KEYS][PANEL_WIDTH], or of pairs of keys

    static constexpr long WEIGHTS_ROW = SCORES_ROW * long(sizeof(float) / sizeof(F));

    Workspace(long count, long dim, long width) : row(dim + ROW_PADDING) {
        float *next = scratch<float, 41>(count * (row + width + SCORES_ROW + 2 + LANES) + KEYS * (dim + width));
        const auto take = [&](long size) { return next += size, next - size; };
        out = take(count * width), scores = take(count * SCORES_ROW), sums = take(count * LANES);
        keys = reinterpret_cast<F *>(take(KEYS * dim)), values = reinterpret_cast<F *>(take(KEYS * width));
        queries = reinterpret_cast<F *>(take(count * row)), maxima = take(count), shares = take(count);
    }

    F *weights(long i) const { return reinterpret_cast<F *>(scores) + i * WEIGHTS_ROW; }
};

// The rows of a tile's keys and values.
template <class T>
struct Rows {
    long count = 0;
    const T *keys[KEYS], *values[KEYS];
    const uint8_t *key_rows[KEYS], *value_rows[KEYS];
    T *read = nullptr;  // [2][KEYS][head_dim, padded]: rows of other types, converted to T

    void find(const Attention &all, const Task &task, long first, long end) {
        count = std::min(KEYS, end - first);
        for (long i = 0; i < count; i++) {
            long key = first + i;
            if (all.block_table) key = all.block_table[key / all.block_size] * all.block_size + key % all.block_size;
            key_rows[i] = all.k.at(task.frame * all.num_keys + key, task.kv_head);
            value_rows[i] = all.v.at(task.frame * all.num_keys + key, task.kv_head);
        }
    }

    static constexpr long OWN = std::is_same_v<T, float> ? KV_FLOAT32 : KV_BF16;

    // Rows of type T: in place, or converted from codes.
    void convert(const Attention &all) {
        const long row = (all.head_dim + LANES - 1) / LANES * LANES;
        if (!read && (all.k.format != OWN || all.v.format != OWN)) read = scratch<T, 47>(2 * KEYS * row);
        convert(all.k.format, key_rows, keys, read, all.head_dim, row);
        convert(all.v.format, value_rows, values, read + KEYS * row, all.head_dim, row);
    }

    void convert(long format, const uint8_t *const *from, const T **rows, T *to, long dim, long row) {
        if (format == OWN) {
            for (long i = 0; i < count; i++) rows[i] = reinterpret_cast<const T *>(from[i]);
            return;
        }
        with_format(format, [&](auto kept) {
            for (long i = 0; i < count; i++, to += row) {
                rows[i] = to;
                over_vectors(dim, [&](long d, auto some) { store(to + d, kept.from(from[i], dim, d, some)); });
            }
        });
    }

    // They are far apart, with other heads' rows between them.
    void prefetch(const Attention &all) const {
        const long key = row_bytes(all.k.format, all.head_dim), value = row_bytes(all.v.format, all.head_dim);
        for (long i = 0; i < count; i++) {
            for (long byte = 0; byte < key; byte += 64) __builtin_prefetch(key_rows[i] + byte, 0, 2);
            for (long byte = 0; byte < value; byte += 64) __builtin_prefetch(value_rows[i] + byte, 0, 2);
        }
    }

    void load_into(const Workspace<float> &work, long dim, long width) const {
        rows_to_columns(count, dim, work.keys, [&](long i) { return keys[i]; });
        for (long i = 0; i < count; i++)
            for (long d = 0; d < width; d += LANES) {
                float *to = work.values + (d / PANEL_WIDTH * KEYS + i) * PANEL_WIDTH + d % PANEL_WIDTH;
                store(to, load_part(values[i] + d, dim - d));
            }
    }

    // Transposes pairs of neighbours as if they were floats.
    void load_into(const Workspace<bf16> &work, long dim, long width) const {
        rows_to_columns(count, dim / 2, reinterpret_cast<float *>(work.keys),
                        [&](long i) { return reinterpret_cast<const float *>(keys[i]); });
        for (long i = 0; i < count; i += 2)
            for (long d = 0; d < width; d += LANES) {
                const auto bits = [&](long key) {
                    return reinterpret_cast<vu>(key < count ? load_part(values[key] + d, dim - d) : vf{});
                };
                bf16 *to = work.values + (d / PANEL_WIDTH * KEYS + i) * PANEL_WIDTH + d % PANEL_WIDTH * 2;
                *reinterpret_cast<vu *>(to) = bits(i) >> 16 | bits(i + 1);
            }
    }
};

// Turns a row's scores into weights. The row sees `visible` keys of the tile.
template <class F>
INLINE void weigh(const Workspace<F> &work, long row, long visible) {
    const float *scores = work.scores + row * SCORES_ROW;
    F *weights = work.weights(row);
    if (visible <= 0) {
        std::fill_n(weights, KEYS, F(0));
        work.shares[row] = 1.0f;
        return;
    }
    const auto score = [&](long j) {
        vf x = load(scores + j);
        return j + LANES <= visible ? x : lane_index() < int32_t(visible - j) ? x : splat(-INFINITY);
    };
    vf largest = splat(work.maxima[row]);
    for (long j = 0; j < KEYS; j += LANES) largest = max(largest, score(j));
    const float maximum = max_lane(largest);
    const vf share = exp2(splat(work.maxima[row] - maximum));
    vf sums = load(work.sums + row * LANES) * share;
    for (long j = 0; j < KEYS; j += LANES) {
        vf weight = exp2(score(j) - maximum);
        if (j + LANES > visible) weight = lane_index() < int32_t(visible - j) ? weight : vf{};
        store(weights + j, weight);
        sums += weight;
    }
    store(work.sums + row * LANES, sums);
    work.maxima[row] = maximum;
    work.shares[row] = share[0];
}

template <class T>
void run(const Attention &all, const Task &task) {
    const long dim = all.head_dim, width = (dim + PANEL_WIDTH - 1) / PANEL_WIDTH * PANEL_WIDTH;
    const long group = all.num_heads / all.num_kv_heads, count = task.count;
    const Workspace<Factor<T>> work(count, dim, width);
    const auto token = [&](long row) { return (task.begin + row) / group; };
    const auto head = [&](long row) { return task.kv_head * group + (task.begin + row) % group; };
    const auto visible = [&](long row) {
        return all.is_causal ? all.num_keys - all.num_tokens + token(row) + 1 : all.num_keys;
    };
    // Weights are powers of two. For bfloat16, scale the scores: scaling the queries would round them.
    constexpr bool IS_FLOAT = std::is_same_v<Factor<T>, float>;
    const float scale = all.scale * 1.44269504f, query_scale = IS_FLOAT ? scale : 1, score_scale = IS_FLOAT ? 1 : scale;
    for (long i = 0; i < count; i++) {
        const T *query = place<T>(all.q, task.frame * all.num_tokens + token(i), head(i));
        float *scaled = work.out;
        for (long d = 0; d < dim; d += LANES)
            store_part(scaled + d, load_part(query + d, dim - d) * query_scale, dim - d);
        if (is_rotated(all.k.format)) rotate_row(scaled, dim);
        for (long d = 0; d < dim; d += LANES)
            store_part(work.queries + i * work.row + d, load_part(scaled + d, dim - d), dim - d);
    }
    std::fill_n(work.out, count * width, 0.0f);
    std::fill_n(work.sums, count * LANES, 0.0f);
    std::fill_n(work.maxima, count, -INFINITY);
    const long end = visible(count - 1);
    Rows<T> tile;
    tile.find(all, task, 0, end);
    for (long first = 0; first < end; first += KEYS) {
        const long keys = tile.count;
        tile.convert(all);
        tile.load_into(work, dim, width);
        tile.find(all, task, first + KEYS, end);
        tile.prefetch(all);
        for (long j = 0; j < keys; j += PANEL_WIDTH)
            in_runs<TILE_ROWS>(0, count, [&](long row, auto rows) {
                constexpr int R = rows();
                Tile<R> scores = {};
                add_products<R>(scores, work.queries + row * work.row, work.row, work.keys + j * dim, dim);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < TILE_VECTORS; v++)
                        store(work.scores + (row + r) * SCORES_ROW + j + v * LANES, scores[r][v] * score_scale);
            });
        for (long i = 0; i < count; i++) weigh(work, i, visible(i) - first);
        for (long d = 0; d < width; d += PANEL_WIDTH)
            in_runs<TILE_ROWS>(0, count, [&](long row, auto rows) {
                constexpr int R = rows();
                float *out = work.out + row * width + d;
                Tile<R> sums;
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < TILE_VECTORS; v++)
                        sums[r][v] = load(out + r * width + v * LANES) * work.shares[row + r];
                add_products<R>(sums, work.weights(row), work.WEIGHTS_ROW, work.values + d * KEYS, keys);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < TILE_VECTORS; v++) store(out + r * width + v * LANES, sums[r][v]);
            });
    }
    for (long i = 0; i < count; i++) {
        const long place_of = task.frame * all.num_tokens + token(i);
        const float share = 1.0f / sum(load(work.sums + i * LANES));
        if (is_rotated(all.v.format)) rotate_row_back(work.out + i * width, dim);
        T *out = static_cast<T *>(all.out) + (place_of * all.num_heads + head(i)) * dim;
        for (long d = 0; d < dim; d += LANES) {
            vf attended = load(work.out + i * width + d) * share;
            if (all.gate.data) attended *= sigmoid(load_part(place<T>(all.gate, place_of, head(i)) + d, dim - d));
            store_part(out + d, attended, dim - d);
        }
    }
}

template <class T>
void attention_prefill(const Attention &all, int num_threads) {
    const long rows = all.num_tokens * (all.num_heads / all.num_kv_heads), heads = all.num_frames * all.num_kv_heads;
    const long products = rows * heads * all.num_keys * all.head_dim;
    const long threads = std::min<long>(num_threads, 1 + (products >> 19));
    const long most = std::max<long>(1, TASK_FLOATS / (2 * all.head_dim + KEYS) / TILE_ROWS) * TILE_ROWS;
    // Several tasks a thread, since tasks at a causal sequence's end take longer. These run first.
    const long wanted = (rows * heads / (4 * threads) + TILE_ROWS) / TILE_ROWS * TILE_ROWS;
    const long each = std::min(most, std::max<long>(wanted, 8 * TILE_ROWS));
    const long parts = (rows + each - 1) / each;
    parallel(parts * heads, int(threads), [&](long index) {
        const long part = parts - 1 - index / heads, head = index % heads, begin = part * each;
        run<T>(all, {head / all.num_kv_heads, head % all.num_kv_heads, begin, std::min(each, rows - begin)});
    });
}

}  // namespace

extern "C" {

// See reference.attention.paged_attention_prefill and vision_attention.
void qwen_flash_attention(const Attention *attention, long is_bf16, long num_threads) {
    is_bf16 ? attention_prefill<bf16>(*attention, num_threads) : attention_prefill<float>(*attention, num_threads);
}
}
