"""Device functions of sampling: keys of scores, races, and searches for the lowest kept key.

Keys are int32 in the same order as the scores. A search bisects their 32 bits, always with 32 rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwen35mm_kernels.reference.sampling import MASS_SCALE

_MASS_SCALE = tl.constexpr(MASS_SCALE)
LOWEST_KEY = tl.constexpr(-(2**31))
HIGHEST_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def as_keys(scores, valid):
    """float32 -> int32 of the same order. Invalid scores get the lowest key, which no valid score has."""
    # Both zeros get the same key.
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(valid, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST_KEY)


@triton.jit
def as_masses(scores, highest, valid):
    return tl.where(valid, tl.exp(scores - highest) * _MASS_SCALE, 0.0).to(tl.int64)


@triton.jit
def as_moments(scores, highest, valid):
    """Mass times drop below the highest score, for the mean in typical sampling."""
    weights = tl.exp(scores - highest)
    moments = tl.where(valid & (weights > 0.0), weights * _MASS_SCALE * (highest - scores), 0.0)
    return moments.to(tl.int64)


@triton.jit
def near_keys(scores, highest, mean, valid):
    """Keys that are higher if a score's drop is nearer to the mean drop."""
    return as_keys(-tl.abs((highest - scores) - mean), valid)


@triton.jit
def is_left_out(dropped, highest, mean, lowest_near):
    """Whether all scores up to the key `dropped` are farther from the mean than the key `lowest_near`."""
    score = (dropped ^ ((dropped >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    is_below = (highest - score > mean) & (near_keys(score, highest, mean, dropped != LOWEST_KEY) < lowest_near)
    return (dropped == LOWEST_KEY) | is_below


@triton.jit
def lowest_within_sigmas(moments_ptr, num_blocks, highest, num_sigmas, BLOCKS_PADDED: tl.constexpr):
    """The lowest score that top-nσ keeps, from the blocks' counts, sums and sums of squares [num_blocks, 3]."""
    blocks = tl.arange(0, BLOCKS_PADDED)
    is_block = blocks < num_blocks
    count = tl.sum(tl.load(moments_ptr + blocks * 3, mask=is_block, other=0.0))
    mean = tl.sum(tl.load(moments_ptr + blocks * 3 + 1, mask=is_block, other=0.0)) / count  # pyright: ignore
    square = tl.sum(tl.load(moments_ptr + blocks * 3 + 2, mask=is_block, other=0.0)) / count  # pyright: ignore
    sigma = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
    return (highest.to(tl.float64) - num_sigmas.to(tl.float64) * sigma).to(tl.float32)


@triton.jit
def run_races(scores, highest, min_p, token_ids, seed, step, valid):
    """weight / exponential, see qwen35mm_kernels/reference/sampling.py; -1 for invalid or too unlikely tokens."""
    bits, _, _, _ = tl.philox(seed, token_ids, step.to(tl.int32), (step >> 32).to(tl.int32), token_ids * 0)  # pyright: ignore
    uniform = (bits.to(tl.float32) + 0.5) * (2.0**-32)
    series = uniform * (1 + uniform * (0.5 + uniform * (1 / 3)))
    exact = -tl.log(1 - tl.minimum(uniform, 1 - 2.0**-24))
    weights = tl.exp(scores - highest)
    races = tl.div_rn(weights, tl.where(uniform < 2.0**-7, series, exact))
    return tl.where(valid & (weights >= min_p), races, -1.0)


@triton.jit
def winner_of(races, token_ids):
    """The best race, and the lowest token with it."""
    best = tl.max(races)
    return best, tl.min(tl.where(races == best, token_ids, HIGHEST_KEY))


@triton.jit
def count_threshold(keys, count):
    """The highest key that at least `count` keys reach; the lowest key if fewer are valid."""
    low = tl.full((), LOWEST_KEY, tl.int64)
    high = tl.full((), HIGHEST_KEY, tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32)) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def mass_threshold(keys, masses, bound):
    """The lowest key with less mass than `bound` above it."""
    low = tl.full((), LOWEST_KEY, tl.int64)
    high = tl.full((), HIGHEST_KEY, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        below = tl.sum(tl.where(keys > middle.to(tl.int32), masses, 0)).to(tl.float32) < bound
        high = tl.where(below, middle, high)
        low = tl.where(below, low, middle + 1)
    return high.to(tl.int32)


@triton.jit
def _count_in_row(scores_ptr, vocab, key, CHUNK: tl.constexpr):
    """How many of a row's scores reach a key."""
    counts = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, vocab, CHUNK):
        token_ids = first + tl.arange(0, CHUNK)
        valid = token_ids < vocab
        counts += (as_keys(tl.load(scores_ptr + token_ids, mask=valid, other=0.0), valid) >= key).to(tl.int32)
    return tl.sum(counts)


@triton.jit
def _mass_in_row(scores_ptr, vocab, highest, key, CHUNK: tl.constexpr):
    """The mass of a row's scores above a key."""
    masses = tl.zeros((CHUNK,), tl.int64)
    for first in range(0, vocab, CHUNK):
        token_ids = first + tl.arange(0, CHUNK)
        valid = token_ids < vocab
        scores = tl.load(scores_ptr + token_ids, mask=valid, other=0.0)
        masses += as_masses(scores, highest, as_keys(scores, valid) > key)
    return tl.sum(masses)


@triton.jit
def threshold_in_row(scores_ptr, vocab, highest, top_k, top_p, CHUNK: tl.constexpr):
    """The lowest kept key of a whole row in memory: `count_threshold`, then `mass_threshold`."""
    low = tl.full((), LOWEST_KEY, tl.int64)
    if top_k > 0:
        high = tl.full((), HIGHEST_KEY, tl.int64)
        for _ in range(32):
            middle = (low + high + 1) >> 1
            enough = _count_in_row(scores_ptr, vocab, middle.to(tl.int32), CHUNK) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
    if top_p < 1:
        # Keys from `low` on pass top-k. The search for top-p starts there.
        total = _mass_in_row(scores_ptr, vocab, highest, tl.maximum(low - 1, LOWEST_KEY).to(tl.int32), CHUNK)
        bound = top_p * total.to(tl.float32)
        high = tl.full((), HIGHEST_KEY, tl.int64)
        for _ in range(32):
            middle = (low + high) >> 1
            below = _mass_in_row(scores_ptr, vocab, highest, middle.to(tl.int32), CHUNK).to(tl.float32) < bound
            high = tl.where(below, middle, high)
            low = tl.where(below, low, middle + 1)
    return low.to(tl.int32)


@triton.jit
def _near_mass_in_row(scores_ptr, vocab, highest, min_p, lowest_kept, mean, key, CHUNK: tl.constexpr):
    """The mass and moment of a row's scores that pass the other filters and have a nearness above `key`."""
    masses, moments = tl.zeros((CHUNK,), tl.int64), tl.zeros((CHUNK,), tl.int64)
    for first in range(0, vocab, CHUNK):
        token_ids = first + tl.arange(0, CHUNK)
        valid = token_ids < vocab
        scores = tl.load(scores_ptr + token_ids, mask=valid, other=0.0)
        kept = valid & (as_keys(scores, valid) >= lowest_kept) & (tl.exp(scores - highest) >= min_p)
        kept = kept & (near_keys(scores, highest, mean, kept) > key)
        masses += as_masses(scores, highest, kept)
        moments += as_moments(scores, highest, kept)
    return tl.sum(masses), tl.sum(moments)


@triton.jit
def typical_in_row(scores_ptr, vocab, highest, min_p, lowest_kept, typical_p, CHUNK: tl.constexpr):
    """The mean drop of a row's scores that pass the other filters, and the lowest kept nearness key."""
    total, moment = _near_mass_in_row(scores_ptr, vocab, highest, min_p, lowest_kept, 0.0, LOWEST_KEY, CHUNK)
    mean = tl.div_rn(moment.to(tl.float32), total.to(tl.float32))
    bound = typical_p * total.to(tl.float32)
    low = tl.full((), LOWEST_KEY, tl.int64)
    high = tl.full((), HIGHEST_KEY, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        mass, _ = _near_mass_in_row(scores_ptr, vocab, highest, min_p, lowest_kept, mean, middle.to(tl.int32), CHUNK)
        below = mass.to(tl.float32) < bound
        high = tl.where(below, middle, high)
        low = tl.where(below, low, middle + 1)
    return mean, low.to(tl.int32)


@triton.jit
def race_in_row(
    scores_ptr, vocab, highest, min_p, lowest_kept, mean, lowest_near, seed, step, CHUNK: tl.constexpr
):  # fmt: skip
    """The winner among a row's scores with at least the keys `lowest_kept` and `lowest_near`."""
    best = tl.full((), -1.0, tl.float32)
    token_id = tl.full((), 0, tl.int32)
    for first in range(0, vocab, CHUNK):
        token_ids = first + tl.arange(0, CHUNK)
        valid = token_ids < vocab
        scores = tl.load(scores_ptr + token_ids, mask=valid, other=0.0)
        kept = valid & (as_keys(scores, valid) >= lowest_kept)
        kept = kept & (near_keys(scores, highest, mean, kept) >= lowest_near)
        race, winner = winner_of(run_races(scores, highest, min_p, token_ids, seed, step, kept), token_ids)
        token_id = tl.where(race > best, winner, token_id)
        best = tl.maximum(best, race)
    return token_id
