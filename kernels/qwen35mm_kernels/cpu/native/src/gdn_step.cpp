// A Gated DeltaNet layer's decode step: convolution, gates, delta rule and gated norm, one state at a time.
#include "scratch.h"
#include "simd.h"
#include "threads.h"

#include <algorithm>

namespace {

struct Step {
    const void *mixed;  // [batch] rows: q | k | v | z | b | a
    long mixed_stride;
    const void *conv_weight;  // [channels][taps]
    const float *A_log, *dt_bias;
    const void *norm_weight;
    float eps;
    void *conv_states;  // [slots][channels][taps - 1]
    long conv_stride;
    float *states;  // [slots][value heads][K][V]
    long state_stride;
    long num_k_heads, num_v_heads, key_dim, value_dim, taps;
    void *out;  // [batch][value heads][V]
};

// Bytes of states worth another thread, and bytes of a task. A task prefetches its next state.
constexpr long BYTES_PER_THREAD = 1 << 18, TASK_BYTES = 1 << 19;
// Prefetch distance of a state to the L1 cache, in floats: processors don't prefetch beyond a 4 KiB page.
constexpr long PREFETCHED = 1024;

// Prefetches n floats to the L2 cache; any address is allowed.
INLINE void fetch(const float *x, long n) {
    for (long i = 0; i < n; i += 16) __builtin_prefetch(x + i, 0, 2);
}

// Writes the sums of n channels' windows to out, and their states, shifted by one input, to `to`, which may be `from`.
template <class T>
INLINE void convolve(const T *x, const T *from, T *to, const T *weight, long n, long before, float *out) {
    for (long c = 0; c < n; c++, from += before, to += before, weight += before + 1) {
        float total = get(from) * get(weight);
        for (long i = 1; i < before; i++) {
            total += get(from + i) * get(weight + i);
            to[i - 1] = from[i];
        }
        to[before - 1] = x[c];
        out[c] = total + get(x + c) * get(weight + before);
    }
}

template <class T>
INLINE void convolve_silu(const Step &s, const T *x, const T *from, T *to, long first, long n, float *out) {
    const long before = s.taps - 1;
    const T *weight = static_cast<const T *>(s.conv_weight) + first * s.taps;
    x += first, from += first * before, to += first * before;
    before == 3 ? convolve(x, from, to, weight, n, 3, out) : convolve(x, from, to, weight, n, before, out);
    for (long c = 0; c < n; c += LANES) store(out + c, silu(load(out + c)));
}

INLINE float dot(const float *x, const float *y, long n) {
    vf total = {};
    for (long i = 0; i < n; i += LANES) total = fma(load(x + i), load(y + i), total);
    return sum(total);
}

INLINE void normalise(float *x, long n, float scale) {
    const float inverse = scale / std::sqrt(dot(x, x, n) + 1e-6f);
    for (long i = 0; i < n; i += LANES) store(x + i, load(x + i) * inverse);
}

// read_k, read_q [V] = S^T k, S^T q, four rows of the state at a time. Prefetches the first half of the next state.
INLINE void read_state(const float *state, const float *after, const float *k, const float *q, long K, long V,
                       float *read_k, float *read_q) {
    std::fill_n(read_k, V, 0.0f), std::fill_n(read_q, V, 0.0f);
    for (long i = 0; i < K; i += 4, state += 4 * V, after += 2 * V) {
        vf key[4], query[4];
        for (int row = 0; row < 4; row++) key[row] = splat(k[i + row]), query[row] = splat(q[i + row]);
        for (long v = 0; v < 4 * V; v += 16) __builtin_prefetch(state + PREFETCHED + v);
        fetch(after, 2 * V);
        for (long v = 0; v < V; v += LANES) {
            vf by_k = load(read_k + v), by_q = load(read_q + v);
            for (int row = 0; row < 4; row++) {
                vf value = load(state + row * V + v);
                by_k = fma(value, key[row], by_k), by_q = fma(value, query[row], by_q);
            }
            store(read_k + v, by_k), store(read_q + v, by_q);
        }
    }
}

// Updates one value head from its convolved v: reads S at `from` and writes it to `to`, which may be the same. A state
// of 64 KiB is read from memory once and stays in the L2 cache. The next state is prefetched there at an even pace,
// while this one is read and written.
//   S' = decay S,  delta = beta (v - S'^T k),  S <- S' + k delta^T,  o = S^T q = S'^T q + (k.q) delta
INLINE void apply_rule(const float *from, float *to, const float *after, const float *k, const float *q, const float *v,
                       float decay, float beta, long K, long V, float *delta, float *o) {
    read_state(from, after, k, q, K, V, delta, o);
    const float overlap = dot(k, q, K);
    for (long i = 0; i < V; i += LANES) {
        vf written = (load(v + i) - load(delta + i) * decay) * beta;
        store(delta + i, written);
        store(o + i, fma(splat(overlap), written, load(o + i) * decay));
    }
    for (long row = 0; row < K; row++, from += V, to += V) {
        const vf key = splat(k[row]);
        fetch(after + (K + row) * V / 2, V / 2);
        for (long i = 0; i < V; i += LANES) store(to + i, fma(key, load(delta + i), load(from + i) * decay));
    }
}

template <class T>
INLINE void gated_norm(const float *o, const T *z, const T *weight, long V, float eps, T *out) {
    const float inverse = 1.0f / std::sqrt(dot(o, o, V) / float(V) + eps);
    for (long i = 0; i < V; i += LANES) store(out + i, load(o + i) * inverse * load(weight + i) * silu(load(z + i)));
}

INLINE float *state_of(const Step &s, long slot, long head) {
    return s.states + slot * s.state_stride + head * s.key_dim * s.value_dim;
}

// A key head of a row with all its value heads, so that no thread reads a conv state while another shifts it.
// source: the slot that the row continues from. after: the next state.
template <class T>
void step_key_head(const Step &s, long row, long source, long slot, long head, const float *after) {
    const long K = s.key_dim, V = s.value_dim, group = s.num_v_heads / s.num_k_heads;
    const long keys = s.num_k_heads * K, values = s.num_v_heads * V;
    const T *mixed = static_cast<const T *>(s.mixed) + row * s.mixed_stride;
    const T *z = mixed + 2 * keys + values, *b = z + values, *a = b + s.num_v_heads;
    T *conv_states = static_cast<T *>(s.conv_states), *to = conv_states + slot * s.conv_stride;
    const T *from = conv_states + source * s.conv_stride;
    float *q = scratch<float, 20>(2 * K + (group + 2) * V), *k = q + K, *v = k + K, *delta = v + group * V,
          *o = delta + V;
    convolve_silu(s, mixed, from, to, head * K, K, q);
    convolve_silu(s, mixed, from, to, keys + head * K, K, k);
    convolve_silu(s, mixed, from, to, 2 * keys + head * group * V, group * V, v);
    normalise(q, K, 1.0f / std::sqrt(float(K)));
    normalise(k, K, 1.0f);
    for (long member = 0; member < group; member++) {
        const long h = head * group + member;
        const double step = std::log1p(std::exp(double(get(a + h)) + double(s.dt_bias[h])));
        const float decay = float(std::exp(-std::exp(double(s.A_log[h])) * step));
        const float beta = float(1.0 / (1.0 + std::exp(-double(get(b + h)))));
        const float *state = state_of(s, source, h);
        apply_rule(state, state_of(s, slot, h), member + 1 < group ? state + K * V : after, k, q, v + member * V, decay,
                   beta, K, V, delta, o);
        T *out = static_cast<T *>(s.out) + row * values + h * V;
        gated_norm(o, z + h * V, static_cast<const T *>(s.norm_weight), V, s.eps, out);
    }
}

}  // namespace

extern "C" {

// One token a row. Row i writes slot slots[i] and continues from sources[i], or from its own slot if sources is null. A
// row that continues from the row before it is the same sequence's next token. A slot below 0 is padding with output 0.
// K and V are multiples of 16.
void qwen_gdn_rows(const Step *s, const int64_t *slots, const int64_t *sources, long batch, long is_bf16,
                   long num_threads) {
    if (!sources) sources = slots;
    const long group = s->num_v_heads / s->num_k_heads, heads = batch * s->num_k_heads;
    const long head_values = group * s->value_dim, head_bytes = head_values * s->key_dim * 4;
    const int threads = int(std::min(num_threads, std::max(1L, heads * head_bytes / BYTES_PER_THREAD)));
    const auto continues = [&](long row) {
        return row > 0 && row < batch && slots[row] >= 0 && sources[row] == slots[row - 1] &&
               sources[row] != slots[row];
    };
    const auto state_at = [&](long slot, long head) { return state_of(*s, slot, head * group); };
    // A task steps some heads of a sequence's first row, and goes on with the rows after it.
    const long each = std::max(1L, std::min({TASK_BYTES / head_bytes, heads / threads, s->num_k_heads}));
    const long tasks = (s->num_k_heads + each - 1) / each;
    parallel(batch * tasks, threads, [&](long task) {
        const long first = task / tasks, begin = task % tasks * each, end = std::min(s->num_k_heads, begin + each);
        if (continues(first)) return;
        for (long head = begin; head < end; head++) {
            for (long row = first; row == first || continues(row); row++) {
                const long slot = slots[row];
                // The next row writes a state of its own; after the last row comes the next head.
                const float *after = continues(row + 1) ? state_at(slots[row + 1], head)
                                                        : state_at(sources[first], std::min(head + 1, end - 1));
                if (slot < 0) {
                    const long size = head_values * (is_bf16 ? 2 : 4);
                    memset(static_cast<char *>(s->out) + (row * s->num_k_heads + head) * size, 0, size);
                } else if (is_bf16) {
                    step_key_head<bf16>(*s, row, sources[row], slot, head, after);
                } else {
                    step_key_head<float>(*s, row, sources[row], slot, head, after);
                }
            }
        }
    });
}
}
