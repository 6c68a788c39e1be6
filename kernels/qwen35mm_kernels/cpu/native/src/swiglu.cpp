// silu(gate) * up.
#include "simd.h"
#include "threads.h"

namespace {

template <class T>
void swiglu(const T *gate_up, long stride, long num_rows, long width, T *out, long num_threads) {
    over_rows(num_rows, width, num_threads, [&](long row) {
        const T *gate = gate_up + row * stride, *up = gate + width;
        over_vectors(width, [&](long i, auto some) {
            store(out + row * width + i, silu(load(gate + i, some)) * load(up + i, some), some);
        });
    });
}

}  // namespace

// gate_up [num_rows][2 * width] with a stride between rows -> out [num_rows][width].
extern "C" void qwen_swiglu(const void *gate_up, long stride, long num_rows, long width, void *out, long is_bf16,
                            long num_threads) {
    with_type(is_bf16, [&](auto type) {
        using T = decltype(type);
        swiglu(static_cast<const T *>(gate_up), stride, num_rows, width, static_cast<T *>(out), num_threads);
    });
}
