// Quantises 32 neighbours of each of a block's rows at once, to symmetric integers with a bfloat16 scale. A vector
// holds the same neighbour of several rows, so nothing is summed across lanes.
#pragma once

#include <algorithm>

#include "weight.h"

// A group of each row.
struct BlockGroup {
    alignas(64) float values[GROUP][BLOCK];
    alignas(64) int32_t integers[GROUP][BLOCK];
    bf16 scales[BLOCK];
};

// Groups below this become zeros: the inverses of their scales might be infinite.
constexpr float TINY = 1e-30f;

// Rounds up, so that no value exceeds the integers' range.
INLINE bf16 scale_not_below(float x) {
    bf16 rounded = to_bf16(x);
    return bf16_to_float(rounded) < x ? bf16(rounded + 1) : rounded;
}

// The value of each row that is farthest from zero; NaN if any isn't finite, so that the group's scale shows it.
INLINE void find_farthest(const BlockGroup &group, float *farthest) {
    for (long r = 0; r < BLOCK; r += LANES) {
        vf found = {}, size = {}, strange = {};
        for (long i = 0; i < GROUP; i++) {
            const vf value = load(group.values[i] + r), own_size = max(value, -value);
            strange = fma(value, vf{}, strange);
            found = own_size > size ? value : found;
            size = max(own_size, size);
        }
        store(farthest + r, found + strange);
    }
}

// Rounds the values to integers of their rows' scales.
INLINE void round_values(BlockGroup &group, float low, float high) {
    float inverse[BLOCK];
    for (long r = 0; r < BLOCK; r++) {
        const bf16 scale = group.scales[r];
        inverse[r] = (scale & 0x7fff) ? 1.0f / bf16_to_float(scale) : 0.0f;
    }
    for (long i = 0; i < GROUP; i++)
        for (long r = 0; r < BLOCK; r++) {
            const float rounded = std::nearbyintf(group.values[i][r] * inverse[r]);
            group.integers[i][r] = int32_t(std::max(low, std::min(high, rounded)));
        }
}

// Integers from -127 to 127.
INLINE void quantise_int8(BlockGroup &group) {
    float farthest[BLOCK];
    find_farthest(group, farthest);
    for (long r = 0; r < BLOCK; r++) {
        const float largest = std::fabs(farthest[r]);
        group.scales[r] = largest < TINY ? bf16(0) : scale_not_below(largest / 127.0f);
    }
    round_values(group, -127.0f, 127.0f);
}

// Of several rows, over a group's values: of values times integers, and of these integers' squares.
struct Sums {
    vf products, squares;
};

// Sums over the values FIRST, FIRST + STRIDE, ... and their integers from -8 to 7. The order is that of a row that lies
// in vectors: lanes first, then `sum` by halves.
template <long FIRST, long STRIDE>
INLINE Sums sum_int4(const vf *values, vf inverse) {
    if constexpr (STRIDE < LANES) {
        const Sums one = sum_int4<FIRST, 2 * STRIDE>(values, inverse);
        const Sums other = sum_int4<FIRST + STRIDE, 2 * STRIDE>(values, inverse);
        return {one.products + other.products, one.squares + other.squares};
    } else {
        Sums all = {};
        for (long i = FIRST; i < GROUP; i += STRIDE) {
            const vf rounded = min(max(round(values[i] * inverse), splat(-8)), splat(7));
            all.products = fma(rounded, values[i], all.products), all.squares = fma(rounded, rounded, all.squares);
        }
        return all;
    }
}

// The scale of the least squared error among those that put a value of one near -8, for integers from -8 to 7. Its
// score is the largest.
INLINE vf best_scale_int4(const vf *values) {
    vf best = {}, best_score = splat(-1);
    for (int step = -12; step <= 12; step++) {
        const Sums sums = sum_int4<0, 1>(values, splat(-8.0f + 0.1f * float(step)));
        const vf scale = sums.squares > 0 ? sums.products / sums.squares : vf{};
        const vf score = sums.squares > 0 ? sums.products * sums.products / sums.squares : vf{};
        best = score > best_score ? scale : best;
        best_score = max(score, best_score);
    }
    return best;
}

// Integers from -8 to 7.
INLINE void quantise_int4(BlockGroup &group) {
    float farthest[BLOCK], best[BLOCK];
    find_farthest(group, farthest);
    for (long r = 0; r < BLOCK; r += LANES) {
        // Around 1, so that their squares are floats, too.
        vf values[GROUP];
        for (long i = 0; i < GROUP; i++) values[i] = load(group.values[i] + r) / load(farthest + r);
        store(best + r, best_scale_int4(values));
    }
    for (long r = 0; r < BLOCK; r++) {
        const float factor = std::fabs(farthest[r]) < TINY ? 0.0f : std::isnan(farthest[r]) ? 1.0f : best[r];
        group.scales[r] = to_bf16(factor * farthest[r]);
    }
    round_values(group, -8.0f, 7.0f);
}
