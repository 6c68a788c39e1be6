// Rotary positions: rotates a head's first dimensions, alone or together with an attention layer's norms and its write
// to the KV cache.
#include "kv_write.h"
#include "scratch.h"
#include "strided.h"
#include "threads.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>

struct WriteHeads {
    const void *qkv;              // [num_tokens] rows of queries and gates in turn, keys, values: float or bfloat16
    const float *cos, *sin;       // [num_tokens][half]
    const void *q_norm, *k_norm;  // [head_dim], zero-centred: float or bfloat16
    const int64_t *rows;          // [num_tokens] rows of the caches; -1 for padding
    void *q;                      // [num_tokens][num_heads][head_dim], type of qkv
    KVRows k, v;                  // rows of the pool, written
    long num_tokens, qkv_row, num_heads, num_kv_heads, head_dim, half;
    long norms_are_bf16;
    float eps;
};

namespace {

// Values worth another thread.
constexpr long VALUES_PER_THREAD = 1 << 16;
constexpr long TOKENS = 8;  // of a task

// Rotates the pairs i and half + i of `from` into `to`.
template <class From, class To>
INLINE void rotate(const From *from, const float *cos, const float *sin, long half, To *to) {
    over_vectors(half, [&](long i, auto some) {
        vf first = load(from + i, some), second = load(from + half + i, some);
        vf c = load(cos + i, some), s = load(sin + i, some);
        store(to + i, first * c - second * s, some);
        store(to + half + i, second * c + first * s, some);
    });
}

// Norms a head with a float weight, rotates and rounds it.
template <class T, class To>
INLINE void norm_and_rotate(const WriteHeads &all, const T *x, const float *weight, long token, float *normed, To *to) {
    const long dim = all.head_dim, half = all.half;
    vf squares = {};
    over_vectors(dim, [&](long i, auto some) {
        vf value = load(x + i, some);
        store(normed + i, value, some);
        squares = fma(value, value, squares);
    });
    const float inverse = 1.0f / std::sqrt(sum(squares) / float(dim) + all.eps);
    over_vectors(dim, [&](long i, auto some) {
        store(normed + i, load(normed + i, some) * inverse * load(weight + i, some), some);
    });
    rotate(normed, all.cos + token * half, all.sin + token * half, half, to);
    const float *rest = normed + 2 * half;
    over_vectors(dim - 2 * half, [&](long i, auto some) { store(to + 2 * half + i, load(rest + i, some), some); });
}

template <class W>
void expand_norms(const WriteHeads &all, float *weights) {
    for (const void *norm : {all.q_norm, all.k_norm})
        for (long d = 0; d < all.head_dim; d++) *weights++ = 1.0f + get(static_cast<const W *>(norm) + d);
}

template <class T>
void write_heads(const WriteHeads &all, int num_threads) {
    const long dim = all.head_dim, values = all.num_tokens * (all.num_heads + 2 * all.num_kv_heads) * dim;
    float *weights = scratch<float, 45>(2 * dim);
    all.norms_are_bf16 ? expand_norms<bf16>(all, weights) : expand_norms<float>(all, weights);
    const int threads = int(std::min<long>(num_threads, 1 + values / VALUES_PER_THREAD));
    parallel((all.num_tokens + TOKENS - 1) / TOKENS, threads, [&](long task) {
        float *normed = scratch<float, 46>(2 * dim), *turned = normed + dim;
        for (long n = task * TOKENS; n < std::min(all.num_tokens, (task + 1) * TOKENS); n++) {
            T *q = static_cast<T *>(all.q) + n * all.num_heads * dim;
            if (all.rows[n] < 0) {
                std::fill_n(q, all.num_heads * dim, T(0));
                continue;
            }
            const T *qkv = static_cast<const T *>(all.qkv) + n * all.qkv_row, *keys = qkv + 2 * all.num_heads * dim;
            for (long h = 0; h < all.num_heads; h++)
                norm_and_rotate(all, qkv + 2 * h * dim, weights, n, normed, q + h * dim);
            for (long h = 0; h < all.num_kv_heads; h++) {
                uint8_t *k = const_cast<uint8_t *>(all.k.at(all.rows[n], h));
                uint8_t *v = const_cast<uint8_t *>(all.v.at(all.rows[n], h));
                norm_and_rotate(all, keys + h * dim, weights + dim, n, normed, turned);
                write_row(all.k.format, turned, dim, k);
                const T *values = keys + (all.num_kv_heads + h) * dim;
                over_vectors(dim, [&](long d, auto some) { store(turned + d, load(values + d, some), some); });
                write_row(all.v.format, turned, dim, v);
            }
        }
    });
}

template <class T>
void partial_rope(const Strided &x, const float *cos, const float *sin, T *out, long num_tokens, long num_heads,
                  long dim, long half, int num_threads) {
    const int threads = int(std::min<long>(num_threads, 1 + num_tokens * num_heads * dim / VALUES_PER_THREAD));
    parallel((num_tokens + TOKENS - 1) / TOKENS, threads, [&](long task) {
        for (long n = task * TOKENS; n < std::min(num_tokens, (task + 1) * TOKENS); n++)
            for (long h = 0; h < num_heads; h++) {
                const T *from = place<T>(x, n, h);
                T *to = out + (n * num_heads + h) * dim;
                rotate(from, cos + n * half, sin + n * half, half, to);
                std::copy_n(from + 2 * half, dim - 2 * half, to + 2 * half);
            }
    });
}

}  // namespace

extern "C" {

// See reference.attention.qk_norm_rope_write.
void qwen_norm_rope_write(const WriteHeads *heads, long is_bf16, long num_threads) {
    is_bf16 ? write_heads<bf16>(*heads, num_threads) : write_heads<float>(*heads, num_threads);
}

// See reference.rope.apply_partial_rope; out [num_tokens][num_heads][dim] has x's type.
void qwen_apply_partial_rope(const Strided *x, const float *cos, const float *sin, void *out, long num_tokens,
                             long num_heads, long dim, long half, long is_bf16, long num_threads) {
    with_type(is_bf16, [&](auto type) {
        partial_rope(*x, cos, sin, static_cast<decltype(type) *>(out), num_tokens, num_heads, dim, half, num_threads);
    });
}
}
