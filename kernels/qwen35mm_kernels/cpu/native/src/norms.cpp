// RMS norms: plain, zero-centred, of a sum, gated.
#include "simd.h"
#include "threads.h"

namespace {

// Rows of a tensor [outer, inner, size] whose last dimension is dense.
struct Rows {
    const void *data;
    long outer_stride, inner_stride;
};

template <class T>
INLINE const T *row_of(const Rows &rows, long row, long inner) {
    return static_cast<const T *>(rows.data) + row / inner * rows.outer_stride + row % inner * rows.inner_stride;
}

// Four sums at a time, so that no sum waits for the previous one.
template <class T>
INLINE float inverse_rms(const T *x, long size, float eps) {
    vf squares[4] = {};
    long i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            vf value = load(x + i + part * LANES);
            squares[part] = fma(value, value, squares[part]);
        }
    over_vectors(size - i, [&](long j, auto some) {
        vf value = load(x + i + j, some);
        squares[0] = fma(value, value, squares[0]);
    });
    const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    return 1.0f / std::sqrt(total / float(size) + eps);
}

template <class T>
INLINE void norm_row(const T *x, const T *weight, long size, float eps, float shift, T *out) {
    const float inverse = inverse_rms(x, size, eps);
    over_vectors(size, [&](long i, auto some) {
        store(out + i, load(x + i, some) * inverse * (load(weight + i, some) + shift), some);
    });
}

template <class T>
void rms_norm(Rows x, long outer, long inner, long size, const T *weight, float eps, float shift, T *out,
              long threads) {
    over_rows(outer * inner, size, threads,
              [&](long row) { norm_row(row_of<T>(x, row, inner), weight, size, eps, shift, out + row * size); });
}

template <class T>
void gated(Rows x, Rows z, long outer, long inner, long size, const T *weight, float eps, T *out, long threads) {
    over_rows(outer * inner, size, threads, [&](long row) {
        const T *from = row_of<T>(x, row, inner), *gate = row_of<T>(z, row, inner);
        const float inverse = inverse_rms(from, size, eps);
        over_vectors(size, [&](long i, auto some) {
            vf normed = load(from + i, some) * inverse * load(weight + i, some);
            store(out + row * size + i, normed * silu(load(gate + i, some)), some);
        });
    });
}

template <class T>
void add(T *x, const T *delta, long num_rows, long size, long x_stride, long delta_stride, const T *weight, float eps,
         T *out, long threads) {
    over_rows(num_rows, size, threads, [&](long row) {
        T *sums = x + row * x_stride;
        const T *added = delta + row * delta_stride;
        over_vectors(size,
                     [&](long i, auto some) { store(sums + i, load(sums + i, some) + load(added + i, some), some); });
        norm_row(sums, weight, size, eps, 1.0f, out + row * size);
    });
}

}  // namespace

extern "C" {

// x [outer, inner, size] with strides -> out, dense; all of one type.
void qwen_rms_norm(const void *x, long x_outer, long x_inner, long outer, long inner, long size, const void *weight,
                   float eps, long zero_centred, void *out, long is_bf16, long num_threads) {
    const Rows rows{x, x_outer, x_inner};
    const float shift = zero_centred ? 1.0f : 0.0f;
    with_type(is_bf16, [&](auto type) {
        using T = decltype(type);
        rms_norm(rows, outer, inner, size, static_cast<const T *>(weight), eps, shift, static_cast<T *>(out),
                 num_threads);
    });
}

// The same, times the SiLU of z.
void qwen_gated_rms_norm(const void *x, long x_outer, long x_inner, const void *z, long z_outer, long z_inner,
                         long outer, long inner, long size, const void *weight, float eps, void *out, long is_bf16,
                         long num_threads) {
    const Rows rows{x, x_outer, x_inner}, gates{z, z_outer, z_inner};
    with_type(is_bf16, [&](auto type) {
        using T = decltype(type);
        gated(rows, gates, outer, inner, size, static_cast<const T *>(weight), eps, static_cast<T *>(out), num_threads);
    });
}

// x += delta, rounded to x's type; out is the zero-centred norm of the result.
void qwen_add_rms_norm(void *x, long x_stride, const void *delta, long delta_stride, long num_rows, long size,
                       const void *weight, float eps, void *out, long is_bf16, long num_threads) {
    with_type(is_bf16, [&](auto type) {
        using T = decltype(type);
        add(static_cast<T *>(x), static_cast<const T *>(delta), num_rows, size, x_stride, delta_stride,
            static_cast<const T *>(weight), eps, static_cast<T *>(out), num_threads);
    });
}
}
