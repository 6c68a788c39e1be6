// y = x W^T + bias for packed weights.
#include "products_amx.h"
#include "products_bf16.h"
#include "products_float.h"
#include "products_integer.h"
#include "scratch.h"
#include "threads.h"

#include <algorithm>
#include <type_traits>

namespace {

// Below so many bytes of weights, another thread costs more than it saves: waking it takes microseconds.
constexpr long BYTES_PER_THREAD = 1 << 17;

// So many rows wait for memory rather than for products.
constexpr long FEW_ROWS = 16;

// Computes the outputs of blocks [first, end).
void strip(const Weight &w, const Rows &x, long first, long end, const Output &out) {
#if defined(__AMX_TILE__)
    if (w.format == BFLOAT16) return amx_strip(w, x, first, end, out);
    if (w.format >= INT8 && !has_groups(w) && x.count >= INTEGER_TILE_ROWS)
        return amx_integer_strip(w, x, first, end, out);
#endif
    switch (w.format) {
        case INT8: return integer_strip<false>(w, x, first, end, out);
        case INT4: return integer_strip<true>(w, x, first, end, out);
        case INT8_GROUPS:
            return w.group < GROUP ? groups_strip<false, true>(w, x, first, end, out)
                                   : groups_strip<false, false>(w, x, first, end, out);
        case INT4_GROUPS:
            return w.group < GROUP ? groups_strip<true, true>(w, x, first, end, out)
                                   : groups_strip<true, false>(w, x, first, end, out);
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
        case BFLOAT16: return bf16_strip(w, x, first, end, out);
#endif
        default: return float_strip(w, x, first, end, out);
    }
}

// Rows at a time: their sums and temporaries stay in the cache.
constexpr long ROWS_AT_ONCE = 512;

template <class T>
Rows prepare(const Weight &w, const T *x, long count, long stride, int num_threads) {
    Rows rows{count, padded_in(w)};
    const long width = rows.width;
    const long padded = round_up(count, 16);  // tiles read whole ones
    const auto each_row = [&](auto work) {
        parallel((count + 7) / 8, width * count < 65536 ? 1 : num_threads, [&](long eighth) {
            for (long r = eighth * 8; r < std::min(count, eighth * 8 + 8); r++) work(r);
        });
    };
    if (w.format >= INT8) {
        const long groups = width / GROUP;
        int8_t *bytes = scratch<int8_t, 2>(padded * width);
        float *scales = scratch<float, 3>(padded * groups);
        int32_t *sums = scratch<int32_t, 4>(count * groups * 2);
        each_row([&](long r) {
            quantise_row(x + r * stride, w.in, width, bytes + r * width, scales + r * groups, sums + r * groups * 2);
        });
        rows.bytes = bytes, rows.scales = scales, rows.sums = sums;
        return rows;
    }
#if defined(__AVX512BF16__)
    if (w.format == BFLOAT16) {
        bf16 *halves = scratch<bf16, 2>(padded * width);
        each_row([&](long r) {
            for (long k = 0; k < w.in; k++) halves[r * width + k] = to_bf16(x[r * stride + k]);
            std::fill(halves + r * width + w.in, halves + (r + 1) * width, bf16(0));
        });
        rows.halves = halves;
        return rows;
    }
#endif
    if constexpr (std::is_same_v<T, float>) {
        if (width == w.in && stride == width) {
            rows.floats = x;
            return rows;
        }
    }
    float *floats = scratch<float, 2>(count * width);
    each_row([&](long r) {
        for (long k = 0; k < w.in; k++) floats[r * width + k] = get(x + r * stride + k);
        std::fill(floats + r * width + w.in, floats + (r + 1) * width, 0.0f);
    });
    rows.floats = floats;
    return rows;
}

template <class T>
void linear(const Weight &w, const T *x, long count, long stride, const void *bias, T *y, long y_stride,
            int num_threads) {
    const long blocks = (w.out + BLOCK - 1) / BLOCK;
    const long work = blocks * block_bytes(w) * std::min(count, 64L);
    num_threads = int(std::min<long>(num_threads, 1 + work / BYTES_PER_THREAD));
    // Several strips a thread: long ones for few rows, which wait for memory; for many rows long enough to prefetch the
    // next blocks while multiplying one.
    const long each = std::max(1L, std::min<long>(count <= FEW_ROWS ? 128 : 16, blocks / (2 * num_threads)));
    for (long row = 0; row < count; row += ROWS_AT_ONCE) {
        const Rows rows = prepare(w, x + row * stride, std::min(ROWS_AT_ONCE, count - row), stride, num_threads);
        const Output out{y + row * y_stride, bias, w.out, y_stride, std::is_same_v<T, bf16>};
        parallel((blocks + each - 1) / each, num_threads,
                 [&](long task) { strip(w, rows, task * each, std::min(blocks, (task + 1) * each), out); });
    }
}

}  // namespace

extern "C" {

// x [count, in] and y [count, out] with strides in values: float (is_bf16 0) or bfloat16, like the bias [out].
void qwen_linear(const Weight *w, const void *x, long count, long x_stride, const void *bias, void *y, long y_stride,
                 long is_bf16, long num_threads) {
    if (is_bf16)
        linear(*w, static_cast<const bf16 *>(x), count, x_stride, bias, static_cast<bf16 *>(y), y_stride, num_threads);
    else
        linear(*w, static_cast<const float *>(x), count, x_stride, bias, static_cast<float *>(y), y_stride,
               num_threads);
}
}
