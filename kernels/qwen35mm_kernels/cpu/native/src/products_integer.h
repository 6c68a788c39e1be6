// Products of integer weights: a group's products are summed exactly, as integers, and scaled once.
#pragma once

#include "product_rows.h"
#include "runs.h"
#include "scratch.h"

#include <algorithm>

namespace {

#if defined(__AVX512F__)
using Bytes = __m512i;
INLINE Bytes load_bytes(const char *p) { return _mm512_loadu_si512(p); }
INLINE Bytes splat_four(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
INLINE Bytes lower(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE Bytes upper(Bytes x) { return lower(_mm512_srli_epi16(x, 4)); }
#if defined(__AVX512VNNI__)
INLINE vi dot_unsigned(vi sums, Bytes w, Bytes x) { return (vi)_mm512_dpbusd_epi32((__m512i)sums, w, x); }
INLINE vi dot_signed(vi sums, Bytes w, Bytes x) { return dot_unsigned(sums, w ^ _mm512_set1_epi8(-128), x); }
#else
INLINE vi dot_unsigned(vi sums, Bytes w, Bytes x) {
    return sums + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
}
INLINE vi dot_signed(vi sums, Bytes w, Bytes x) {
    Bytes turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    return dot_unsigned(sums, _mm512_abs_epi8(w), turned);
}
#endif
#elif defined(__AVX2__)
using Bytes = __m256i;
INLINE Bytes load_bytes(const char *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
INLINE Bytes splat_four(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
INLINE Bytes lower(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE Bytes upper(Bytes x) { return lower(_mm256_srli_epi16(x, 4)); }
// Two products of 255 * 127 wouldn't fit into 16 bits; with weights up to 127 they do.
INLINE vi dot_unsigned(vi sums, Bytes w, Bytes x) {
    return sums + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
}
INLINE vi dot_signed(vi sums, Bytes w, Bytes x) {
    return dot_unsigned(sums, _mm256_sign_epi8(w, w), _mm256_sign_epi8(x, w));
}
#else
typedef int8_t Bytes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
INLINE Bytes load_bytes(const char *p) { return *reinterpret_cast<const Bytes *>(p); }
INLINE Bytes splat_four(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return (Bytes)splat_int(four);
}
INLINE Bytes lower(Bytes x) { return x & 15; }
INLINE Bytes upper(Bytes x) { return (x >> 4) & 15; }
#if defined(__ARM_FEATURE_DOTPROD)
INLINE vi dot_signed(vi sums, Bytes w, Bytes x) { return (vi)vdotq_s32((int32x4_t)sums, (int8x16_t)w, (int8x16_t)x); }
#elif defined(__ARM_NEON)
INLINE vi dot_signed(vi sums, Bytes w, Bytes x) {
    const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return sums + (vi)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
#else
INLINE vi dot_signed(vi sums, Bytes w, Bytes x) {
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) sums[lane] += int32_t(w[lane * 4 + i]) * x[lane * 4 + i];
    return sums;
}
#endif
INLINE vi dot_unsigned(vi sums, Bytes w, Bytes x) { return dot_signed(sums, w, x); }
#endif

// Offset of the weights in products: as stored (int4), or for `dot_signed`, whose instruction multiplies unsigned by
// signed bytes. (Without VNNI, 255 * 127 twice doesn't fit into the 16-bit sums.)
#if defined(__AVX512VNNI__)
constexpr int INT8_OFFSET = 128, INT4_OFFSET = 8;
#else
constexpr int INT8_OFFSET = 0, INT4_OFFSET = 8;
#endif

// dots[r][v]: dot products of R rows' bytes with V vectors of outputs, over the group g or its first or second HALF.
constexpr int WHOLE = -1;

template <int HALF, int R, int V>
INLINE void int8_dots(const char *const *w, long g, const int8_t *x, long stride, vi (&dots)[R][V]) {
    for (int j = HALF == 1 ? 4 : 0; j < (HALF == 0 ? 4 : 8); j++)
        for (int v = 0; v < V; v++) {
            const char *place = w[v] + (g * 8 + j) * BLOCK * 4;
            __builtin_prefetch(place + prefetch_bytes(R));
            Bytes weights = load_bytes(place);
            for (int r = 0; r < R; r++)
                dots[r][v] = dot_signed(dots[r][v], weights, splat_four(x + r * stride + j * 4));
        }
}

template <int HALF, int R, int V>
INLINE void int4_dots(const char *const *w, long g, const int8_t *x, long stride, vi (&dots)[R][V]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // Eight pairs of 15 * 127 fit into 16 bits and are widened once.
    __m256i shorts[R][V] = {};
    for (int j = 0; j < 4; j++)
        for (int v = 0; v < V; v++) {
            const char *place = w[v] + (g * 4 + j) * BLOCK * 4;
            __builtin_prefetch(place + prefetch_bytes(R));
            Bytes both = load_bytes(place), low = lower(both), high = upper(both);
            for (int r = 0; r < R; r++) {
                const int8_t *bytes = x + r * stride + j * 4;
                __m256i both_sums = {};
                if constexpr (HALF != 1) both_sums = _mm256_maddubs_epi16(low, splat_four(bytes));
                if constexpr (HALF != 0)
                    both_sums = _mm256_add_epi16(both_sums, _mm256_maddubs_epi16(high, splat_four(bytes + 16)));
                shorts[r][v] = _mm256_add_epi16(shorts[r][v], both_sums);
            }
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) dots[r][v] += (vi)_mm256_madd_epi16(shorts[r][v], _mm256_set1_epi16(1));
#else
    for (int j = 0; j < 4; j++)
        for (int v = 0; v < V; v++) {
            const char *place = w[v] + (g * 4 + j) * BLOCK * 4;
            __builtin_prefetch(place + prefetch_bytes(R));
            Bytes both = load_bytes(place), low = lower(both), high = upper(both);
            for (int r = 0; r < R; r++) {
                const int8_t *bytes = x + r * stride + j * 4;
                if constexpr (HALF != 1) dots[r][v] = dot_unsigned(dots[r][v], low, splat_four(bytes));
                if constexpr (HALF != 0) dots[r][v] = dot_unsigned(dots[r][v], high, splat_four(bytes + 16));
            }
        }
#endif
}

// A part of k, in groups, and where its tile's sums are kept between parts.
#if LANES == 16
struct Chunk {
    long first, end;
    float *kept;
    bool is_last;
    Ahead ahead;

    template <int R, int V>
    INLINE_MEMBER void begin(vf (&sums)[R][V]) const {
        if (first)
            for (int i = 0; i < R * V; i++) sums[i / V][i % V] = load(kept + i * LANES);
    }
    template <int R, int V>
    INLINE_MEMBER bool keep(const vf (&sums)[R][V]) const {
        if (is_last) return false;
        for (int i = 0; i < R * V; i++) store(kept + i * LANES, sums[i / V][i % V]);
        return true;
    }
};
#else
// All of k.
struct Chunk {
    static constexpr long first = 0;
    static constexpr Ahead ahead{};
    long end;

    template <int R, int V>
    INLINE_MEMBER void begin(vf (&)[R][V]) const {}
    template <int R, int V>
    INLINE_MEMBER bool keep(const vf (&)[R][V]) const {
        return false;
    }
};
#endif

// R rows from `row` on by V vectors, of blocks with a distance of `apart` blocks.
template <int R, int V, bool IS_INT4>
INLINE void integer_rows(const Weight &w, const Rows &x, long row, long first_block, long apart, const Chunk &chunk,
                         const Output &out) {
    const long groups = x.width / GROUP;
    const char *data[V];
    const bf16 *scales[V];
    for (int v = 0; v < V; v++) {
        const long b = first_block + v / PER_BLOCK * apart, part = v % PER_BLOCK;
        data[v] = block(w, b) + part * LANES * 4;
        scales[v] = block_scales(w, b) + part * LANES;
    }
    vf sums[R][V] = {};
    chunk.begin(sums);
    for (long g = chunk.first; g < chunk.end; g++) {
        if (chunk.ahead.per_step) chunk.ahead.fetch(data, g);
        const int8_t *bytes = x.bytes + row * x.width + g * GROUP;
        vi dots[R][V];
        for (int r = 0; r < R; r++) {
            constexpr int OFFSET = IS_INT4 ? INT4_OFFSET : INT8_OFFSET;
            vi start = splat_int(-OFFSET * x.sum(row + r, g));
            for (int v = 0; v < V; v++) dots[r][v] = start;
        }
        if constexpr (IS_INT4)
            int4_dots<WHOLE>(data, g, bytes, x.width, dots);
        else
            int8_dots<WHOLE>(data, g, bytes, x.width, dots);
        for (int v = 0; v < V; v++) {
            if (v % PER_BLOCK == 0) __builtin_prefetch(scales[v] + g * BLOCK + SCALES_AHEAD);
            vf scale = load(scales[v] + g * BLOCK);
            for (int r = 0; r < R; r++)
                sums[r][v] = fma(to_float(dots[r][v]), scale * splat(x.scales[(row + r) * groups + g]), sums[r][v]);
        }
    }
    if (!chunk.keep(sums)) write_tile(out, row, first_block * BLOCK, sums, apart);
}

// Adds a group, or a HALF of it for a checkpoint's groups of 16, to the sums. Adds the factor of its minimum to the
// totals.
template <int HALF, bool IS_INT4, int R, int V>
INLINE void add_group(const Weight &w, const Rows &x, long row, long g, const char *const *data,
                      const float *const *scales, vf (&sums)[R][V], float (&totals)[R]) {
    const int offset = !IS_INT4 ? INT8_OFFSET : w.minima ? 0 : INT4_OFFSET;
    const long groups = x.width / GROUP;
    const float *steps = x.scales + row * groups + g;
    vi dots[R][V];
    for (int r = 0; r < R; r++) {
        const int32_t total = HALF == WHOLE ? x.sum(row + r, g) : x.half_sums(row + r, g)[HALF];
        for (int v = 0; v < V; v++) dots[r][v] = splat_int(-offset * total);
        totals[r] += float(total) * steps[r * groups];
    }
    const int8_t *bytes = x.bytes + row * x.width + g * GROUP;
    if constexpr (IS_INT4)
        int4_dots<HALF>(data, g, bytes, x.width, dots);
    else
        int8_dots<HALF>(data, g, bytes, x.width, dots);
    for (int v = 0; v < V; v++) {
        const vf scale = load(scales[v]);
        for (int r = 0; r < R; r++)
            sums[r][v] = fma(to_float(dots[r][v]), scale * splat(steps[r * groups]), sums[r][v]);
    }
}

// Like `integer_rows`, for a checkpoint's own groups; IS_HALF if they are 16 wide.
template <int R, int V, bool IS_INT4, bool IS_HALF>
INLINE void group_rows(const Weight &w, const Rows &x, long row, long first_block, long apart, const Chunk &chunk,
                       const Output &out) {
    const long per_scale = std::max(1L, w.group / GROUP);
    const char *data[V];
    const float *scales[V], *minima[V];
    for (int v = 0; v < V; v++) {
        const long b = first_block + v / PER_BLOCK * apart, part = v % PER_BLOCK;
        const long place = first_of_groups(w, b) + chunk.first * (IS_HALF ? 2 : 1) / per_scale * BLOCK + part * LANES;
        data[v] = block(w, b) + part * LANES * 4;
        scales[v] = static_cast<const float *>(w.scales) + place;
        minima[v] = w.minima ? w.minima + place : nullptr;
    }
    vf sums[R][V] = {};
    chunk.begin(sums);
    float totals[R] = {};
    const auto next = [&] {
        for (int v = 0; v < V; v++) {
            if (v % PER_BLOCK == 0) __builtin_prefetch(scales[v] + SCALES_AHEAD);
            scales[v] += BLOCK;
        }
        if (!w.minima) return;
        for (int v = 0; v < V; v++) {
            const vf minimum = load(minima[v]);
            for (int r = 0; r < R; r++) sums[r][v] = fma(minimum, splat(totals[r]), sums[r][v]);
            minima[v] += BLOCK;
        }
        for (float &total : totals) total = 0;
    };
    long left = per_scale;
    for (long g = chunk.first; g < chunk.end; g++) {
        if (chunk.ahead.per_step) chunk.ahead.fetch(data, g);
        if constexpr (IS_HALF) {
            add_group<0, IS_INT4>(w, x, row, g, data, scales, sums, totals);
            next();
            add_group<1, IS_INT4>(w, x, row, g, data, scales, sums, totals);
            next();
        } else {
            add_group<WHOLE, IS_INT4>(w, x, row, g, data, scales, sums, totals);
            if (--left == 0) {
                next();
                left = per_scale;
            }
        }
    }
    if (left != per_scale) next();
    if (!chunk.keep(sums)) write_tile(out, row, first_block * BLOCK, sums, apart);
}

// Calls work(row, Count<R>, block, apart, Count<V>, chunk) for all rows and blocks and for all of k.
#if LANES == 16
// With VNNI, five to eight rows take a chunk of int8 in turns: it is read from memory once. Elsewhere multiplying takes
// longer than reading.
#if defined(__AVX512VNNI__)
constexpr int MOST_TURNS = 2;
#else
constexpr int MOST_TURNS = 1;
#endif

// Tiles of rows that fetch the next blocks: with more of them, reading memory is a small part.
constexpr long MOST_FETCHING = 5;

// Of a strip's weights beside the rows.
constexpr long SECOND_CACHE_BYTES = 1 << 19;

template <bool IS_INT4, class Work>
void over_tiles(const Weight &w, const Rows &x, long first, long end, const Work &work) {
    // While rows take a chunk, the next one is prefetched.
    constexpr long SOME_GROUPS = 4;
    constexpr int MOST = 4;
    const long groups = x.width / GROUP, tiles = (x.count + MOST - 1) / MOST;
    const bool in_turns = !IS_INT4 && tiles > 1 && tiles <= MOST_TURNS;
    // Chunks end with a checkpoint's group.
    const long each = in_turns ? round_up(SOME_GROUPS, has_groups(w) ? std::max(1L, w.group / GROUP) : 1) : groups;
    float *kept = scratch<float, 6>(in_turns ? x.count * STREAMS * BLOCK : 0);
    // Some rows take the next blocks from memory while they multiply. Many take a strip by turns as long as it stays in
    // the second cache: then it is read from there less often.
    const bool strip_by_strip = tiles > MOST_FETCHING && (end - first) * block_bytes(w) <= SECOND_CACHE_BYTES;
    const long at_once = strip_by_strip ? 1 : tiles;
    for (long begin = 0; begin < tiles; begin += at_once)
        over_streams<STREAMS>(first, end, [&](long b, long apart, auto blocks) {
            const bool fetches = !in_turns && at_once > 1 && !ends_streams<STREAMS, blocks()>(b, first, end);
            const long size = block_bytes(w), ahead = fetches ? size : 0;
            for (long g = 0; g < groups; g += each)
                for (long tile = begin; tile < begin + at_once; tile++) {
                    // Evenly: five rows are three and two.
                    const long rest = x.count % tiles, rows = x.count / tiles + (tile < rest);
                    const long row = x.count / tiles * tile + std::min(tile, rest);
                    const Chunk chunk{g, std::min(g + each, groups), kept + row * blocks() * BLOCK, g + each >= groups,
                                      Ahead::part(size, ahead, row, rows, x.count, groups)};
                    with_count<MOST>(rows, [&](auto some) { work(row, some, b, apart, blocks, chunk); });
                }
        });
}
#else
template <bool IS_INT4, class Work>
void over_tiles(const Weight &, const Rows &x, long first, long end, const Work &work) {
    in_runs<4>(0, x.count, [&](long row, auto rows) {
        // As many blocks at once as their sums fit into registers.
        over_streams<rows() <= 2 ? STREAMS : 1>(first, end, [&](long b, long apart, auto blocks) {
            work(row, rows, b, apart, Count<blocks() * PER_BLOCK>{}, Chunk{x.width / GROUP});
        });
    });
}
#endif

template <bool IS_INT4>
void integer_strip(const Weight &w, const Rows &x, long first, long end, const Output &out) {
    over_tiles<IS_INT4>(w, x, first, end,
                        [&](long row, auto rows, long b, long apart, auto vectors, const Chunk &chunk) {
                            integer_rows<rows(), vectors(), IS_INT4>(w, x, row, b, apart, chunk, out);
                        });
}

template <bool IS_INT4, bool IS_HALF>
void groups_strip(const Weight &w, const Rows &x, long first, long end, const Output &out) {
    over_tiles<IS_INT4>(w, x, first, end,
                        [&](long row, auto rows, long b, long apart, auto vectors, const Chunk &chunk) {
                            group_rows<rows(), vectors(), IS_INT4, IS_HALF>(w, x, row, b, apart, chunk, out);
                        });
}

template <class T>
INLINE void load_group(const T *x, long count, vf (&values)[GROUP / LANES]) {
    if (count == GROUP) {
        for (long i = 0; i < GROUP / LANES; i++) values[i] = load(x + i * LANES);
    } else {
        float padded[GROUP] = {};
        for (long i = 0; i < count; i++) padded[i] = get(x + i);
        for (long i = 0; i < GROUP / LANES; i++) values[i] = load(padded + i * LANES);
    }
}

// Quantises a row to [width] bytes, [width / GROUP] scales and the sums of the groups' halves. A group with a value
// that isn't finite gets NaN as its scale. A group below 1e-30 becomes zeros, as the inverse of its scale might be
// infinite.
template <class T>
void quantise_row(const T *x, long in, long width, int8_t *bytes, float *scales, int32_t *sums) {
    for (long g = 0; g < width / GROUP; g++, bytes += GROUP) {
        vf values[GROUP / LANES];
        load_group(x + g * GROUP, std::min(GROUP, in - g * GROUP), values);
        vf largest = {}, strange = {};
        // By index: `for (vf value : values)` deduces a pointer that assumes a whole vector's alignment.
        for (long i = 0; i < GROUP / LANES; i++) {
            largest = max(largest, max(values[i], -values[i]));
            strange += values[i] * 0.0f;
        }
        const float bound = max_lane(largest) + sum(strange), inverse = bound >= 1e-30f ? 127.0f / bound : 0.0f;
        vf totals[2] = {};
        for (long i = 0; i < GROUP / LANES; i++) {
            // Clamping turns NaN into a bound, since no integer is NaN.
            vf value = min(max(round(values[i] * inverse), splat(-127)), splat(127));
            store_bytes(bytes + i * LANES, __builtin_convertvector(value, vi));
            totals[i * LANES >= GROUP / 2] += value;
        }
        scales[g] = bound / 127.0f;
        for (int half = 0; half < 2; half++) sums[2 * g + half] = int32_t(sum(totals[half]));
    }
}

}  // namespace
