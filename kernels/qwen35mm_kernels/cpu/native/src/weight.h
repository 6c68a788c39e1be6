// A packed matrix [out, in]: blocks of 16 output rows, so that a vector holds the same k of neighbouring rows.
//
// With in and out padded by zeros, a block's layout is
//   FLOAT32   [in][16] float
//   BFLOAT16  [in / 2][16][2] bf16, in padded to 32             what VDPBF16PS and AMX's tiles read
//   INT8      [in / 4][16][4] int8                              what VPDPBUSD reads
//   INT4      [in / 32][4][16][4] bytes, each 8 + an integer from -8 to 7: the lower nibbles are the group's k 0 to 15,
//             the upper ones its k 16 to 31
// The integers' scales are [in / 32][16] bf16 for each block: one scale for 32 neighbours of a row.
//
// INT8_GROUPS and INT4_GROUPS have the same layout and a checkpoint's values: float scale * integer + float minimum,
// with one of both for `group` neighbours of a row (16 or a multiple of 32): [groups][16] for each block. 4-bit
// integers are -8 to 7 without minima, like INT4's, and 0 to 15 with minima.
//
// Every output is one sum over k in order, for any number of rows, threads and outputs. So its bits don't depend on
// other rows.
#pragma once

#include <cstdint>

#include "simd.h"

enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, INT8_GROUPS = 4, INT4_GROUPS = 5 };

constexpr long BLOCK = 16;  // output rows of a block
constexpr long GROUP = 32;  // neighbours that share a scale

struct Weight {
    int32_t format;
    int32_t out, in;
    const void *data;
    const void *scales;   // of integers
    const float *minima;  // of groups, or null
    int32_t group;        // neighbours that share a scale, for groups
};

INLINE long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

// Number of k in a block, with padding.
INLINE long padded_in(const Weight &w) { return w.format == FLOAT32 ? w.in : round_up(w.in, GROUP); }

// Bytes of a block's data.
INLINE long block_bytes(const Weight &w) {
    switch (w.format) {
        case FLOAT32: return padded_in(w) * BLOCK * 4;
        case BFLOAT16: return padded_in(w) * BLOCK * 2;
        case INT8:
        case INT8_GROUPS: return padded_in(w) * BLOCK;
        default: return padded_in(w) * BLOCK / 2;
    }
}

INLINE const char *block(const Weight &w, long index) {
    return static_cast<const char *>(w.data) + index * block_bytes(w);
}

INLINE const bf16 *block_scales(const Weight &w, long index) {
    return static_cast<const bf16 *>(w.scales) + index * (padded_in(w) / GROUP) * BLOCK;
}

INLINE bool has_groups(const Weight &w) { return w.format >= INT8_GROUPS; }

// Index of a block's first scale and minimum, for groups.
INLINE long first_of_groups(const Weight &w, long index) {
    return index * ((padded_in(w) + w.group - 1) / w.group) * BLOCK;
}
