// The gated delta rule over a sequence, in chunks. cpu/gated_delta_rule.py has the mathematics.
//
// Substitution solves the triangular system a tile of rows at a time, as its right side leaves the registers. Nothing
// is inverted. Columns of the values are independent: a state consists of panels of columns, and threads share a head's
// panels if there are more threads than heads. A chunk's data stays in the L2 cache.
#include "scratch.h"
#include "strided.h"
#include "threads.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr long CHUNK = 64, SQUARE_ROW = CHUNK + ROW_PADDING;
constexpr float L2_EPS = 1e-6f;
// Below so many products, another thread costs more than it saves.
constexpr long PRODUCTS_PER_THREAD = 1 << 20;

}  // namespace

struct DeltaRule {
    Strided q, k, v;               // float or bfloat16
    Strided a, b;                  // float, one value for each head
    const float *A_log, *dt_bias;  // [num_v_heads]
    float *state;                  // [num_v_heads][key_dim][value_dim]
    void *out;                     // [num_tokens][num_v_heads][value_dim], type of v
    long num_tokens, num_k_heads, num_v_heads, key_dim, value_dim;
};

namespace {

long num_panels(long value_dim) { return (value_dim + PANEL_WIDTH - 1) / PANEL_WIDTH; }

// A head's gates in a chunk: sums of log decays up to each token, and values derived from them.
struct Gates {
    alignas(64) float log_decay[CHUNK], into[CHUNK], out_of[CHUNK], beta[CHUNK];
};

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void find_gates(const DeltaRule &rule, long head, long first, long count, Gates &gates) {
    const float *a = static_cast<const float *>(rule.a.data) + first * rule.a.row + head * rule.a.head;
    const float *b = static_cast<const float *>(rule.b.data) + first * rule.b.row + head * rule.b.head;
    const float rate = std::exp(rule.A_log[head]), bias = rule.dt_bias[head];
    float total = 0.0f;
    for (long i = 0; i < CHUNK; i++) {
        if (i < count) total -= rate * softplus(a[i * rule.a.row] + bias);
        gates.log_decay[i] = total;
        gates.beta[i] = i < count ? 1.0f / (1.0f + std::exp(-b[i * rule.b.row])) : 0.0f;
    }
    for (long i = 0; i < CHUNK; i += LANES) {
        vf sums = load(gates.log_decay + i);
        store(gates.into + i, exp(sums));
        store(gates.out_of + i, exp(total - sums));
    }
}

// A task's memory.
struct Workspace {
    long row;                      // key_dim, padded
    float *keys, *queries;         // [CHUNK][row], of length 1
    float *keys_t;                 // panels of tokens: [CHUNK / PANEL_WIDTH][key_dim][PANEL_WIDTH]
    float *key_keys, *query_keys;  // [CHUNK][SQUARE_ROW]
    float *system, *attention;     // [CHUNK][SQUARE_ROW]: -M and A
    float *written;                // D: [CHUNK][PANEL_WIDTH]
    float *states;                 // a task's panels: [panels][key_dim][PANEL_WIDTH]

    Workspace(long key_dim, long panels) : row(key_dim + ROW_PADDING) {
        const long square = CHUNK * SQUARE_ROW;
        const long chunk = 3 * row * CHUNK + 4 * square + CHUNK * PANEL_WIDTH;
        float *next = scratch<float, 40>(chunk + panels * key_dim * PANEL_WIDTH);
        const auto take = [&](long size) { return next += size, next - size; };
        keys = take(CHUNK * row), queries = take(CHUNK * row), keys_t = take(CHUNK * row);
        key_keys = take(square), query_keys = take(square), system = take(square), attention = take(square);
        written = take(CHUNK * PANEL_WIDTH);
        states = take(panels * key_dim * PANEL_WIDTH);
    }
};

// A row as floats, L2-normalised.
template <class T>
INLINE void normalise(const T *x, long dim, float *to) {
    vf squares = {};
    for (long i = 0; i < dim; i += LANES) {
        vf values = load_part(x + i, dim - i);
        squares = fma(values, values, squares);
    }
    const float factor = 1.0f / std::sqrt(sum(squares) + L2_EPS);
    for (long i = 0; i < dim; i += LANES) store_part(to + i, load_part(x + i, dim - i) * factor, dim - i);
}

// A chunk's keys and queries, and their products that don't involve the state.
template <class T>
void prepare(const DeltaRule &rule, long head, long first, long count, const Workspace &work) {
    const long dim = rule.key_dim;
    for (long i = 0; i < count; i++) {
        normalise(place<T>(rule.k, first + i, head), dim, work.keys + i * work.row);
        normalise(place<T>(rule.q, first + i, head), dim, work.queries + i * work.row);
    }
    rows_to_columns(count, dim, work.keys_t, [&](long i) { return work.keys + i * work.row; });
    in_runs<TILE_ROWS>(0, count, [&](long row, auto rows) {
        constexpr int R = rows();
        for (long j = 0; j < row + R; j += PANEL_WIDTH) {
            const auto products = [&](const float *x, float *to) {
                Tile<R> sums = {};
                add_products<R>(sums, x + row * work.row, work.row, work.keys_t + j * dim, dim);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < TILE_VECTORS; v++)
                        store(to + (row + r) * SQUARE_ROW + j + v * LANES, sums[r][v]);
            };
            products(work.keys, work.key_keys);
            products(work.queries, work.query_keys);
        }
    });
}

// -M and A of a value head, with zeros for future tokens, whose products may be anything.
void decay(const Workspace &work, const Gates &gates, long count, float scale) {
    for (long i = 0; i < count; i++)
        for (long j = 0; j < CHUNK; j += LANES) {
            vf system = {}, attention = {};
            if (j <= i) {
                vi before = lane_index() + int32_t(j - i);
                vf decays = exp(gates.log_decay[i] - load(gates.log_decay + j));
                vf products = load(work.key_keys + i * SQUARE_ROW + j) * decays * -gates.beta[i];
                vf attended = load(work.query_keys + i * SQUARE_ROW + j) * decays * scale;
                system = before < 0 ? products : vf{};
                attention = before <= 0 ? attended : vf{};
            }
            store(work.system + i * SQUARE_ROW + j, system);
            store(work.attention + i * SQUARE_ROW + j, attention);
        }
}

// A chunk's outputs for the columns of a panel, and their state after it.
template <class T>
void run_panel(const DeltaRule &rule, const Workspace &work, const Gates &gates, long head, long panel, long first,
               long count, float scale, float *state) {
    const long dim = rule.key_dim, column = panel * PANEL_WIDTH, columns = rule.value_dim - column;
    const long out_row = rule.num_v_heads * rule.value_dim;
    T *out = static_cast<T *>(rule.out) + first * out_row + head * rule.value_dim + column;
    const T *values = place<T>(rule.v, first, head) + column;
    in_runs<TILE_ROWS>(0, count, [&](long row, auto rows) {
        constexpr int R = rows();
        Tile<R> written = {};
        add_products<R>(written, work.keys + row * work.row, work.row, state, dim);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < TILE_VECTORS; v++) {
                vf value = load_part(values + (row + r) * rule.v.row + v * LANES, columns - v * LANES);
                written[r][v] = (value - written[r][v] * gates.into[row + r]) * gates.beta[row + r];
            }
        const float *system = work.system + row * SQUARE_ROW;
        add_products<R>(written, system, SQUARE_ROW, work.written, row);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < TILE_VECTORS; v++) {
                for (int i = 0; i < r; i++)
                    written[r][v] = fma(written[i][v], splat(system[r * SQUARE_ROW + row + i]), written[r][v]);
                store(work.written + (row + r) * PANEL_WIDTH + v * LANES, written[r][v]);
            }
        Tile<R> read = {};
        add_products<R>(read, work.queries + row * work.row, work.row, state, dim);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < TILE_VECTORS; v++) read[r][v] *= gates.into[row + r] * scale;
        add_products<R>(read, work.attention + row * SQUARE_ROW, SQUARE_ROW, work.written, row + R);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < TILE_VECTORS; v++)
                store_part(out + (row + r) * out_row + v * LANES, read[r][v], columns - v * LANES);
    });
    for (long i = 0; i < count; i++)
        for (int v = 0; v < TILE_VECTORS; v++) {
            float *row = work.written + i * PANEL_WIDTH + v * LANES;
            store(row, load(row) * gates.out_of[i]);
        }
    in_runs<TILE_ROWS>(0, dim, [&](long row, auto rows) {
        constexpr int R = rows();
        float *target = state + row * PANEL_WIDTH;
        Tile<R> sums;
        for (int r = 0; r < R; r++)
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[r][v] = load(target + r * PANEL_WIDTH + v * LANES) * gates.into[count - 1];
        add_products<R>(sums, work.keys + row, 1, work.written, count, work.row);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < TILE_VECTORS; v++) store(target + r * PANEL_WIDTH + v * LANES, sums[r][v]);
    });
}

// The panels [begin, end) of a key head's value heads, over the whole sequence.
template <class T>
void scan(const DeltaRule &rule, long key_head, long begin, long end) {
    const long group = rule.num_v_heads / rule.num_k_heads, dim = rule.key_dim, width = rule.value_dim;
    const long panels = num_panels(width);
    const float scale = 1.0f / std::sqrt(float(dim));
    const Workspace work(dim, end - begin);
    const auto each_row = [&](auto move) {
        for (long p = begin; p < end; p++) {
            float *state = rule.state + (key_head * group + p / panels) * dim * width + p % panels * PANEL_WIDTH;
            for (long d = 0; d < dim; d++)
                for (int v = 0; v < TILE_VECTORS; v++)
                    move(state + d * width + v * LANES, width - p % panels * PANEL_WIDTH - v * LANES,
                         work.states + ((p - begin) * dim + d) * PANEL_WIDTH + v * LANES);
        }
    };
    each_row([](float *state, long count, float *kept) { store(kept, load_part(state, count)); });
    for (long first = 0; first < rule.num_tokens; first += CHUNK) {
        const long count = std::min(CHUNK, rule.num_tokens - first);
        prepare<T>(rule, key_head, first, count, work);
        Gates gates;
        for (long p = begin; p < end; p++) {
            const long head = key_head * group + p / panels;
            if (p == begin || p % panels == 0) {
                find_gates(rule, head, first, count, gates);
                decay(work, gates, count, scale);
            }
            float *state = work.states + (p - begin) * dim * PANEL_WIDTH;
            run_panel<T>(rule, work, gates, head, p % panels, first, count, scale, state);
        }
    }
    each_row([](float *state, long count, float *kept) { store_part(state, load(kept), count); });
}

template <class T>
void gated_delta_prefill(const DeltaRule &rule, int num_threads) {
    const long heads = rule.num_k_heads, panels = rule.num_v_heads / heads * num_panels(rule.value_dim);
    const long products = rule.num_tokens * rule.num_v_heads * rule.key_dim * rule.value_dim * 3;
    const long threads = std::min<long>(num_threads, 1 + products / PRODUCTS_PER_THREAD);
    // Each part of a head repeats the stateless work, so use no more parts than keep the threads busy.
    long parts = 1;
    while (parts < panels && heads * parts % threads && heads * parts < 3 * threads) parts++;
    parallel(heads * parts, int(threads), [&](long task) {
        const long part = task % parts;
        scan<T>(rule, task / parts, part * panels / parts, (part + 1) * panels / parts);
    });
}

}  // namespace

extern "C" {

// See reference.gated_delta_rule.gated_delta_prefill.
void qwen_gated_delta_prefill(const DeltaRule *rule, long is_bf16, long num_threads) {
    is_bf16 ? gated_delta_prefill<bf16>(*rule, num_threads) : gated_delta_prefill<float>(*rule, num_threads);
}
}
