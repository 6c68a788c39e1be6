// The causal convolution over a sequence, and SiLU. Reads every input once.
#include "scratch.h"
#include "simd.h"
#include "threads.h"

#include <algorithm>

namespace {

constexpr int TAPS = 4, BEFORE = TAPS - 1;  // as in all Qwen3.5 models

// Tokens of a task: their rows and those before them stay in the L2 cache.
constexpr long TASK_TOKENS = 16;

template <class T>
struct Sequence {
    const T *x;  // [num_tokens] rows
    long stride;
    const T *before;  // [BEFORE][channels], the inputs before x
    long channels;

    const T *row(long token) const { return token < 0 ? before + (BEFORE + token) * channels : x + token * stride; }
};

// Computes tokens [first, end) for a vector of channels.
template <class T, class Some>
INLINE void convolve(const Sequence<T> &s, const float *taps, long c, Some some, long first, long end, T *out) {
    vf tap[TAPS], input[TAPS];
    for (int i = 0; i < TAPS; i++) tap[i] = load(taps + i * s.channels + c, some);
    for (int i = 1; i < TAPS; i++) input[i] = load(s.row(first - TAPS + i) + c, some);
    for (long token = first; token < end; token++) {
        for (int i = 1; i < TAPS; i++) input[i - 1] = input[i];
        input[TAPS - 1] = load(s.x + token * s.stride + c, some);
        vf total = input[0] * tap[0];
        for (int i = 1; i < TAPS; i++) total = fma(input[i], tap[i], total);
        store(out + token * s.channels + c, silu(total), some);
    }
}

template <class T>
void conv1d(const T *x, long stride, long num_tokens, const T *weight, const T *state, long state_stride, long channels,
            T *out, T *final_state, long num_threads) {
    T *rows = scratch<T, 21>(BEFORE * channels);
    float *tap_rows = scratch<float, 22>(TAPS * channels);
    for (long c = 0; c < channels; c++) {
        for (long i = 0; i < BEFORE; i++) rows[i * channels + c] = state[c * state_stride + i];
        for (long i = 0; i < TAPS; i++) tap_rows[i * channels + c] = get(weight + c * TAPS + i);
    }
    const Sequence<T> s{x, stride, rows, channels};
    const long num_tasks = (num_tokens + TASK_TOKENS - 1) / TASK_TOKENS;
    parallel(num_tasks, num_tokens * channels < THREADS_ELEMENTS ? 1 : int(num_threads), [&](long task) {
        const long first = task * TASK_TOKENS, end = std::min(num_tokens, first + TASK_TOKENS);
        over_vectors(channels, [&](long c, auto some) { convolve(s, tap_rows, c, some, first, end, out); });
    });
    for (long c = 0; c < channels; c++)
        for (long i = 0; i < BEFORE; i++) final_state[c * BEFORE + i] = s.row(num_tokens - BEFORE + i)[c];
}

}  // namespace

// x [num_tokens] rows with a stride, weight [channels][4], state [channels] rows of 3 with a stride -> out
// [num_tokens][channels] and final_state [channels][3], all of one type.
extern "C" void qwen_conv1d(const void *x, long stride, long num_tokens, const void *weight, const void *state,
                            long state_stride, long channels, void *out, void *final_state, long is_bf16,
                            long num_threads) {
    with_type(is_bf16, [&](auto type) {
        using T = decltype(type);
        conv1d(static_cast<const T *>(x), stride, num_tokens, static_cast<const T *>(weight),
               static_cast<const T *>(state), state_stride, channels, static_cast<T *>(out),
               static_cast<T *>(final_state), num_threads);
    });
}
