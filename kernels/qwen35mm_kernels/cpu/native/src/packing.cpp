// Packs matrices into blocks and back; see weight.h for the layout.
#include "quantise.h"
#include "threads.h"

#include <algorithm>

#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

TeamRunner run_team = nullptr;

namespace {

// Writes a group's 32 integers to a row's places.
void put_int8(int8_t *bytes, long g, const int8_t *integers) {
    for (long i = 0; i < GROUP; i += 4) memcpy(bytes + (g * 8 + i / 4) * BLOCK * 4, integers + i, 4);
}

void put_int4(int8_t *bytes, long g, const int8_t *integers, int offset) {
    for (long i = 0; i < GROUP / 2; i++)
        bytes[(g * 4 + i / 4) * BLOCK * 4 + i % 4] =
            int8_t((integers[i] + offset) | ((integers[i + GROUP / 2] + offset) << 4));
}

// Writes group `g` of row `r` of block `b` as floats from up to 32 values. Touches no other row's bytes.
template <class T>
void pack_floats(const Weight &w, const T *values, long count, long b, long r, long g) {
    char *place = const_cast<char *>(block(w, b));
    if (w.format == FLOAT32) {
        float *floats = reinterpret_cast<float *>(place) + g * GROUP * BLOCK + r;
        for (long i = 0; i < count; i++) floats[i * BLOCK] = get(values + i);
        return;
    }
    bf16 *halves = reinterpret_cast<bf16 *>(place) + g * GROUP * BLOCK + r * 2;
    long i = 0;
    if constexpr (sizeof(T) == 2)
        for (; i + 1 < count; i += 2) memcpy(halves + i * BLOCK, values + i, 4);
    for (; i < count; i++) halves[i / 2 * BLOCK * 2 + i % 2] = to_bf16(values[i]);
}

// Writes group `g` of rows `first` to `last` of block `b` as integers. Touches no other row's bytes.
void put_integers(const Weight &w, const BlockGroup &group, long b, long first, long last, long g) {
    const long size = (last - first) * 4, num_words = w.format == INT8 ? 8 : 4;
    char *place = const_cast<char *>(block(w, b)) + (g * num_words * BLOCK + first) * 4;
    for (long word = 0; word < num_words; word++) {
        uint32_t words[BLOCK] = {};
        for (long i = 0; i < 4; i++)
            for (long r = 0; r < BLOCK; r++) {
                const int32_t *integers = &group.integers[word * 4 + i][r];
                const int32_t byte =
                    w.format == INT8 ? integers[0] & 255 : (integers[0] + 8) | ((integers[GROUP / 2 * BLOCK] + 8) << 4);
                words[r] |= uint32_t(byte) << (8 * i);
            }
        memcpy(place + word * BLOCK * 4, words + first, size);
    }
    memcpy(const_cast<bf16 *>(block_scales(w, b)) + g * BLOCK + first, group.scales + first, (last - first) * 2);
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

// Quantises rows `first` to `last` of block `b` from [last - first, in] values.
template <class T>
void pack_integers(const Weight &w, const T *rows, long b, long first, long last) {
    BlockGroup group = {};
    for (long k = 0; k < w.in; k += GROUP) {
        const long count = std::min(GROUP, w.in - k);
        if (count < GROUP) memset(group.values, 0, sizeof(group.values));
        for (long r = first; r < last; r++)
            for (long i = 0; i < count; i++) group.values[i][r] = get(rows + (r - first) * w.in + k + i);
        w.format == INT8 ? quantise_int8(group) : quantise_int4(group);
        put_integers(w, group, b, first, last, k / GROUP);
    }
}

// Writes rows `first` to `last` of block `b` from [last - first, in] values, group by group for all rows, since their
// bytes are neighbours.
template <class T>
void pack_block(const Weight &w, const T *rows, long b, long first, long last) {
    if (w.format == INT8 || w.format == INT4) return pack_integers(w, rows, b, first, last);
    for (long k = 0; k < w.in; k += GROUP)
        for (long r = first; r < last; r++) {
            const T *values = rows + (r - first) * w.in + k;
            // A constant length lets the compiler turn the loops into copies.
            if (w.in - k >= GROUP)
                pack_floats(w, values, GROUP, b, r, k / GROUP);
            else
                pack_floats(w, values, w.in - k, b, r, k / GROUP);
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
