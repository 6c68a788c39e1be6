// Packs matrices into blocks and back; see weight.h for the layout.
#include "threads.h"
#include "weight.h"

#include <algorithm>

#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

TeamRunner run_team = nullptr;

namespace {

// Rounds up, so that no value exceeds the integers' range.
bf16 scale_not_below(float x) {
    bf16 rounded = to_bf16(x);
    return bf16_to_float(rounded) < x ? bf16(rounded + 1) : rounded;
}

// Groups below this become zeros: the inverses of their scales might be infinite.
constexpr float TINY = 1e-30f;

// The value farthest from zero; NaN if any isn't finite, so that the group's scale shows it.
float find_farthest(const float *values) {
    float farthest = 0, strange = 0;
    for (long i = 0; i < GROUP; i++) {
        strange += values[i] * 0.0f;
        if (std::fabs(values[i]) > std::fabs(farthest)) farthest = values[i];
    }
    return farthest + strange;
}

// Quantises 32 values to symmetric integers from -127 to 127.
bf16 quantise_int8(const float *values, int8_t *integers) {
    const float largest = std::fabs(find_farthest(values));
    const bf16 scale = largest < TINY ? bf16(0) : scale_not_below(largest / 127.0f);
    const float inverse = scale ? 1.0f / bf16_to_float(scale) : 0.0f;
    for (long i = 0; i < GROUP; i++)
        integers[i] = int8_t(std::max(-127.0f, std::min(127.0f, std::nearbyintf(values[i] * inverse))));
    return scale;
}

// Score of integers from -8 to 7 for the values, with their best scale `scale`: a larger score means a smaller sum of
// squared errors. (Values are around 1, so that their squares are floats, too.)
float score_int4(const float *values, float inverse, float *scale) {
    vf products = {}, squares = {};
    for (long i = 0; i < GROUP; i += LANES) {
        vf value = load(values + i), scaled = value * inverse;
        // Rounds to nearest: adding 1.5 * 2^23 drops the bits below one.
        vf rounded = round(scaled);
        rounded = min(max(rounded, splat(-8)), splat(7));
        products = fma(rounded, value, products), squares = fma(rounded, rounded, squares);
    }
    const float product = sum(products), square = sum(squares);
    *scale = square > 0 ? product / square : 0;
    return square > 0 ? product * product / square : 0;
}

// Quantises 32 values to integers from -8 to 7. Takes the scale of the least squared error among those that put the
// value farthest from zero near -8.
bf16 quantise_int4(const float *values, int8_t *integers) {
    const float farthest = find_farthest(values);
    float best = 0, best_score = -1, shares[GROUP];
    for (long i = 0; i < GROUP; i++) shares[i] = values[i] / farthest;
    if (std::fabs(farthest) >= TINY)
        for (int step = -12; step <= 12; step++) {
            float scale;
            const float score = score_int4(shares, -8.0f + 0.1f * float(step), &scale);
            if (score > best_score) best_score = score, best = scale;
        }
    const bf16 scale = to_bf16(std::isnan(farthest) ? farthest : best * farthest);
    const float inverse = (scale & 0x7fff) ? 1.0f / bf16_to_float(scale) : 0.0f;
    for (long i = 0; i < GROUP; i++)
        integers[i] = int8_t(std::max(-8.0f, std::min(7.0f, std::nearbyintf(values[i] * inverse))));
    return scale;
}

// Writes a group's 32 integers to a row's places.
void put_int8(int8_t *bytes, long g, const int8_t *integers) {
    for (long i = 0; i < GROUP; i += 4) memcpy(bytes + (g * 8 + i / 4) * BLOCK * 4, integers + i, 4);
}

void put_int4(int8_t *bytes, long g, const int8_t *integers, int offset) {
    for (long i = 0; i < GROUP / 2; i++)
        bytes[(g * 4 + i / 4) * BLOCK * 4 + i % 4] =
            int8_t((integers[i] + offset) | ((integers[i + GROUP / 2] + offset) << 4));
}

// Writes group `g` of row `r` of block `b` from up to 32 values. Touches no other row's bytes.
template <class T>
void pack_group(const Weight &w, const T *values, long count, long b, long r, long g) {
    char *place = const_cast<char *>(block(w, b));
    if (w.format == FLOAT32) {
        float *floats = reinterpret_cast<float *>(place) + g * GROUP * BLOCK + r;
        for (long i = 0; i < count; i++) floats[i * BLOCK] = get(values + i);
    } else if (w.format == BFLOAT16) {
        bf16 *halves = reinterpret_cast<bf16 *>(place) + g * GROUP * BLOCK + r * 2;
        long i = 0;
        if constexpr (sizeof(T) == 2)
            for (; i + 1 < count; i += 2) memcpy(halves + i * BLOCK, values + i, 4);
        for (; i < count; i++) halves[i / 2 * BLOCK * 2 + i % 2] = to_bf16(values[i]);
    } else {
        int8_t *bytes = reinterpret_cast<int8_t *>(place) + r * 4;
        bf16 *scale = const_cast<bf16 *>(block_scales(w, b)) + g * BLOCK + r;
        float floats[GROUP] = {};
        for (long i = 0; i < count; i++) floats[i] = get(values + i);
        int8_t integers[GROUP];
        *scale = w.format == INT8 ? quantise_int8(floats, integers) : quantise_int4(floats, integers);
        if (w.format == INT8)
            put_int8(bytes, g, integers);
        else
            put_int4(bytes, g, integers, 8);
    }
}

// Writes row `r` of block `b` from [in] integers with the scales and minima of its groups.
void pack_row(const Weight &w, const int8_t *row, const float *scales, const float *minima, long b, long r) {
    int8_t *bytes = reinterpret_cast<int8_t *>(const_cast<char *>(block(w, b))) + r * 4;
    for (long g = 0; g * GROUP < w.in; g++) {
        int8_t integers[GROUP] = {};
        memcpy(integers, row + g * GROUP, std::min(GROUP, w.in - g * GROUP));
        if (w.format == INT8_GROUPS)
            put_int8(bytes, g, integers);
        else
            put_int4(bytes, g, integers, w.minima ? 0 : 8);
    }
    const long place = first_of_groups(w, b) + r;
    for (long g = 0; g * w.group < w.in; g++) {
        static_cast<float *>(const_cast<void *>(w.scales))[place + g * BLOCK] = scales[g];
        if (w.minima) const_cast<float *>(w.minima)[place + g * BLOCK] = minima[g];
    }
}

// Writes rows `first` to `last` of block `b` from [last - first, in] values, group by group for all rows, since their
// bytes are neighbours.
template <class T>
void pack_block(const Weight &w, const T *rows, long b, long first, long last) {
    for (long k = 0; k < w.in; k += GROUP)
        for (long r = first; r < last; r++) {
            const T *values = rows + (r - first) * w.in + k;
            // A constant length lets the compiler turn the loops into copies.
            if (w.in - k >= GROUP)
                pack_group(w, values, GROUP, b, r, k / GROUP);
            else
                pack_group(w, values, w.in - k, b, r, k / GROUP);
        }
}

// Reads row `row` of the matrix as floats [in].
void unpack_row(const Weight &w, long row, float *values) {
    const char *place = block(w, row / BLOCK);
    const long r = row % BLOCK;
    const bf16 *scales = w.format == INT8 || w.format == INT4 ? block_scales(w, row / BLOCK) : nullptr;
    const long groups = has_groups(w) ? first_of_groups(w, row / BLOCK) + r : 0;
    for (long k = 0; k < w.in; k++) {
        const long g = k / GROUP, i = k % GROUP;
        switch (w.format) {
            case FLOAT32: values[k] = reinterpret_cast<const float *>(place)[k * BLOCK + r]; break;
            case BFLOAT16:
                values[k] = bf16_to_float(reinterpret_cast<const bf16 *>(place)[(k / 2 * BLOCK + r) * 2 + k % 2]);
                break;
            // A plain char is unsigned on ARM.
            case INT8:
            case INT8_GROUPS: values[k] = float(int8_t(place[((g * 8 + i / 4) * BLOCK + r) * 4 + i % 4])); break;
            default: {
                const uint8_t both = uint8_t(place[((g * 4 + i % 16 / 4) * BLOCK + r) * 4 + i % 4]);
                values[k] = float((i < 16 ? both & 15 : both >> 4) - (w.minima ? 0 : 8));
            }
        }
        if (scales) values[k] *= bf16_to_float(scales[g * BLOCK + r]);
        if (has_groups(w)) {
            const long place = groups + k / w.group * BLOCK;
            const float scale = static_cast<const float *>(w.scales)[place];
            values[k] = w.minima ? std::fma(values[k], scale, w.minima[place]) : values[k] * scale;
        }
    }
}

}  // namespace

extern "C" {

// Call once, before anything else. Returns 0 if the system denies the instructions to this process.
// `team_runner` is the OpenMP runtime's GOMP_parallel; without it, everything runs in the calling thread.
int qwen_prepare(void *team_runner) {
    run_team = reinterpret_cast<TeamRunner>(team_runner);
#if defined(__AMX_TILE__) && defined(__linux__)
    // Linux grants a process the 8 KiB of tiles on request, for all its threads, including later ones.
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return 0;
#endif
    return 1;
}

// Writes `count` rows [count, in] from `first` on. Never writes the padding, which must be zero.
void qwen_pack(const Weight *w, const void *rows, long is_bf16, long first, long count, long num_threads) {
    const long begin = first / BLOCK, end = (first + count + BLOCK - 1) / BLOCK;
    parallel(end - begin, num_threads, [&](long task) {
        const long b = begin + task;
        const long low = std::max(first, b * BLOCK), high = std::min(first + count, (b + 1) * BLOCK);
        const long start = (low - first) * w->in;
        if (is_bf16)
            pack_block(*w, static_cast<const bf16 *>(rows) + start, b, low - b * BLOCK, high - b * BLOCK);
        else
            pack_block(*w, static_cast<const float *>(rows) + start, b, low - b * BLOCK, high - b * BLOCK);
    });
}

// The same for a checkpoint's own groups: integers [count, in], scales and optional minima [count, in / group].
void qwen_pack_groups(const Weight *w, const int8_t *integers, const float *scales, const float *minima, long first,
                      long count, long num_threads) {
    const long groups = (w->in + w->group - 1) / w->group;
    parallel((first + count - 1) / BLOCK - first / BLOCK + 1, num_threads, [&](long task) {
        const long b = first / BLOCK + task;
        for (long row = std::max(first, b * BLOCK); row < std::min(first + count, (b + 1) * BLOCK); row++) {
            const long i = row - first;
            pack_row(*w, integers + i * w->in, scales + i * groups, minima ? minima + i * groups : nullptr, b,
                     row % BLOCK);
        }
    });
}

// Rows of the matrix by index, int64 [count] -> y [count, in]: an embedding from the output head.
void qwen_rows(const Weight *w, const int64_t *index, long count, void *y, long is_bf16, long num_threads) {
    parallel(count, count < 8 ? 1 : num_threads, [&](long i) {
        float *values = new float[w->in];
        unpack_row(*w, index[i], values);
        for (long k = 0; k < w->in; k++)
            is_bf16 ? put(static_cast<bf16 *>(y) + i * w->in + k, values[k])
                    : put(static_cast<float *>(y) + i * w->in + k, values[k]);
        delete[] values;
    });
}
}
