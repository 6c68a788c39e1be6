// A program of the compiled part's products, for processors that only an emulator here has: every format against its
// unpacked weights in double, and rows alone against rows in company. Ends with 1 where something is wrong.
#include "weight.h"

#include <cstdio>
#include <initializer_list>
#include <vector>

extern "C" {
int qwen_prepare(void *team_runner);
void qwen_pack(const Weight *w, const void *rows, long is_bf16, long first, long count, long num_threads);
void qwen_rows(const Weight *w, const int64_t *index, long count, void *y, long is_bf16, long num_threads);
void qwen_linear(const Weight *w, const void *x, long count, long x_stride, const void *bias, void *y, long y_stride,
                 long is_bf16, long num_threads);
}

namespace {

std::vector<bf16> random_values(long count) {
    static uint64_t state = 1;
    std::vector<bf16> values(count);
    for (bf16 &value : values) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        value = to_bf16(float(int64_t(state)) / 9.2e18f);
    }
    return values;
}

bool is_right(Format format, int out, int in) {
    Weight w{format, out, in, nullptr, nullptr};
    std::vector<char> data(round_up(out, BLOCK) / BLOCK * block_bytes(w));
    std::vector<bf16> scales(round_up(out, BLOCK) * padded_in(w) / GROUP);
    w.data = data.data(), w.scales = scales.data();
    qwen_pack(&w, random_values(long(out) * in).data(), 1, 0, out, 1);
    std::vector<int64_t> index(out);
    for (int i = 0; i < out; i++) index[i] = i;
    std::vector<float> matrix(long(out) * in);
    qwen_rows(&w, index.data(), out, matrix.data(), 0, 1);

    constexpr long COUNT = 70;
    const std::vector<bf16> x = random_values(COUNT * in);
    std::vector<bf16> y(COUNT * out), alone(COUNT * out);
    qwen_linear(&w, x.data(), COUNT, in, nullptr, y.data(), out, 1, 1);
    bool is_same = true;
    for (long count : {1, 2, 3, 4, 7, 13}) {
        qwen_linear(&w, x.data(), count, in, nullptr, alone.data(), out, 1, 1);
        is_same &= !memcmp(alone.data(), y.data(), count * out * sizeof(bf16));
    }
    double error = 0, norm = 0;
    for (long i = 0; i < COUNT * out; i++) {
        double expected = 0;
        for (long k = 0; k < in; k++) expected += double(bf16_to_float(x[i / out * in + k])) * matrix[i % out * in + k];
        error += std::pow(bf16_to_float(y[i]) - expected, 2), norm += expected * expected;
    }
    error = std::sqrt(error / norm);
    printf("format %d, %d x %d: error %.4f, %s\n", format, out, in, error, is_same ? "same bits" : "OTHER BITS");
    return is_same && error < (format >= INT8 ? 0.01 : 0.0025);
}

}  // namespace

int main() {
    bool all = qwen_prepare(nullptr);
    for (Format format : {FLOAT32, BFLOAT16, INT8, INT4})
        for (auto [out, in] : {std::pair(1, 1), {17, 33}, {40, 96}, {83, 500}, {130, 1100}})
            all &= is_right(format, out, in);
    return !all;
}
