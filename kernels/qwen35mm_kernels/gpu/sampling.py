"""Sampling in three launches, without sorting the vocabulary.

The vocabulary is cut into blocks. `_scores_kernel` applies penalties and temperature and finds each block's best score.
`_candidates_kernel` selects few tokens of each block: the highest, or the winner of its race if nothing is filtered.
`_draw_kernel` searches the candidates for the lowest kept score and draws. If that score may be below a token that
`_candidates_kernel` dropped (a flat distribution and a wide top-p), it searches the whole row instead, with the same
result but some 200 times slower per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, launch, next_power_of_2
from qwen35mm_kernels.gpu.sampling_search import (
    HIGHEST_KEY,
    LOWEST_KEY,
    as_keys,
    as_masses,
    as_moments,
    count_threshold,
    is_left_out,
    lowest_within_sigmas,
    mass_threshold,
    near_keys,
    race_in_row,
    run_races,
    threshold_in_row,
    typical_in_row,
    winner_of,
)
from qwen35mm_kernels.reference.sampling import MAX_COUNT, SamplingRows

_MAX_COUNT = tl.constexpr(MAX_COUNT)
# For 248,320 tokens: 61 programs a row and at most 61 x 64 candidates, which fit into one program's registers.
_DEFAULT = Config({"BLOCK": 4096, "CAPACITY": 64}, 8)
# Rows of tables with B columns. Their alignment depends on B, so specialising would compile kernels for each B.
_ROWS = (
    "temperature_ptr",
    "top_k_ptr",
    "top_p_ptr",
    "min_p_ptr",
    "typical_ptr",
    "sigmas_ptr",
    "repetition_ptr",
    "presence_ptr",
    "frequency_ptr",
    "seeds_ptr",
    "steps_ptr",
    "slots_ptr",
)


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _scores_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, sigmas_ptr, repetition_ptr, presence_ptr, frequency_ptr, slots_ptr,
    in_text_ptr, in_reply_ptr, banned_ptr, scores_ptr, best_ptr, best_id_ptr, moments_ptr, stride_logits, stride_text,
    stride_reply, stride_banned, vocab, num_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row: logits -> scores [B, vocab] float32, best and best_id [B, num_blocks].

    With top-nσ also moments [B, num_blocks, 3] float64: count, sum and sum of squares of the scores above -inf.
    """
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    token_ids = block * BLOCK + tl.arange(0, BLOCK)
    valid = token_ids < vocab
    scores = tl.load(logits_ptr + row * stride_logits + token_ids, mask=valid, other=0.0).to(tl.float32)
    in_text = tl.load(in_text_ptr + slot * stride_text + token_ids, mask=valid, other=0) != 0
    count = tl.load(in_reply_ptr + slot * stride_reply + token_ids, mask=valid, other=0)
    banned = tl.load(banned_ptr + row * stride_banned + token_ids, mask=valid, other=1) != 0
    penalty = tl.load(repetition_ptr + row)
    penalised = tl.where(scores < 0, scores * penalty, tl.div_rn(scores, tl.zeros_like(scores) + penalty))
    scores = tl.where(in_text, penalised, scores)
    scores -= tl.where(count != 0, tl.load(presence_ptr + row), 0.0)
    scores -= tl.load(frequency_ptr + row) * count.to(tl.float32)
    scores = tl.where(banned, -float("inf"), scores)
    temperature = tl.load(temperature_ptr + row)
    temperature = tl.where((temperature == 0.0) | (tl.load(top_k_ptr + row) == 1), 1.0, temperature)
    scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
    tl.store(scores_ptr + row * vocab + token_ids, scores, mask=valid)
    best, best_id = winner_of(scores, token_ids)
    tl.store(best_ptr + row * num_blocks + block, best)
    tl.store(best_id_ptr + row * num_blocks + block, best_id)
    if tl.load(sigmas_ptr + row) > 0.0:
        possible = valid & (scores > -float("inf"))
        exact = tl.where(possible, scores, 0.0).to(tl.float64)
        moments = moments_ptr + (row * num_blocks + block) * 3
        tl.store(moments, tl.sum(possible.to(tl.int32)).to(tl.float64))
        tl.store(moments + 1, tl.sum(exact))
        tl.store(moments + 2, tl.sum(exact * exact))


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _candidates_kernel(
    scores_ptr, best_ptr, moments_ptr, sigmas_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, typical_ptr,
    seeds_ptr, steps_ptr, candidates_ptr, candidate_ids_ptr, counts_ptr, dropped_ptr, masses_ptr, drops_ptr, vocab,
    num_blocks,
    BLOCK: tl.constexpr, BLOCKS_PADDED: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """One block of one row: selects the tokens for the draw. Tokens that top-nσ drops become -inf in scores.

    Writes candidates and candidate_ids [B, num_blocks, CAPACITY] with their counts [B, num_blocks]; dropped
    [B, num_blocks], the highest key left out; masses [B, num_blocks], the mass of all tokens. If typical sampling is
    the only filter besides min-p, masses count only what passes min-p, and drops [B, num_blocks] are mass times drop.
    """
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    if (tl.load(temperature_ptr + row) == 0.0) | (top_k == 1):
        return
    blocks = tl.arange(0, BLOCKS_PADDED)
    highest = tl.max(tl.load(best_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-float("inf")))
    token_ids = block * BLOCK + tl.arange(0, BLOCK)
    valid = token_ids < vocab
    scores = tl.load(scores_ptr + row * vocab + token_ids, mask=valid, other=0.0)
    num_sigmas = tl.load(sigmas_ptr + row)
    if num_sigmas > 0.0:
        lowest = lowest_within_sigmas(
            moments_ptr + row * num_blocks * 3, num_blocks, highest, num_sigmas, BLOCKS_PADDED
        )
        scores = tl.where(scores < lowest, -float("inf"), scores)
        tl.store(scores_ptr + row * vocab + token_ids, scores, mask=valid)
    place = row * num_blocks + block
    is_unfiltered = (top_k == 0) & (tl.load(top_p_ptr + row) >= 1.0)
    is_typical = tl.load(typical_ptr + row) < 1.0
    if is_unfiltered & (is_typical == 0):
        # Only min-p filters, which needs no search: the best of the blocks' winners wins the row.
        min_p, seed, step = tl.load(min_p_ptr + row), tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
        races = run_races(scores, highest, min_p, token_ids, seed, step, valid)
        _, winner = winner_of(races, token_ids)
        tl.store(candidates_ptr + place * CAPACITY + token_ids * 0, scores, mask=token_ids == winner)
        tl.store(candidate_ids_ptr + place * CAPACITY, winner)
        tl.store(counts_ptr + place, tl.max((races >= 0.0).to(tl.int32)))
        tl.store(dropped_ptr + place, LOWEST_KEY)
        tl.store(masses_ptr + place, tl.zeros((), tl.int64))
    else:
        # What is left out already takes no candidate's place: else the search of the whole row would follow.
        keys = as_keys(scores, valid & (scores > -float("inf")))
        # The highest key left out, with its equals. All keys above it fit.
        dropped = count_threshold(keys, CAPACITY + 1)
        kept = keys > dropped
        places = place * CAPACITY + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + places, scores, mask=kept)
        tl.store(candidate_ids_ptr + places, token_ids, mask=kept)
        tl.store(counts_ptr + place, tl.sum(kept.to(tl.int32)))
        tl.store(dropped_ptr + place, dropped)
        if is_unfiltered & is_typical:
            valid = valid & (tl.exp(scores - highest) >= tl.load(min_p_ptr + row))
            tl.store(drops_ptr + place, tl.sum(as_moments(scores, highest, valid)))
        tl.store(masses_ptr + place, tl.sum(as_masses(scores, highest, valid)))


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _draw_kernel(
    scores_ptr, best_ptr, best_id_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, typical_ptr, seeds_ptr,
    steps_ptr, slots_ptr, candidates_ptr, candidate_ids_ptr, counts_ptr, dropped_ptr, masses_ptr, drops_ptr,
    in_text_ptr, in_reply_ptr, chosen_ptr, stride_text, stride_reply, vocab, num_blocks,
    BLOCK: tl.constexpr, BLOCKS_PADDED: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """One row: draws its token and writes it to chosen [B] and both pools."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS_PADDED)
    is_block = blocks < num_blocks
    first_place = row * num_blocks
    best = tl.load(best_ptr + first_place + blocks, mask=is_block, other=-float("inf"))
    highest, token_id = winner_of(best, tl.load(best_id_ptr + first_place + blocks, mask=is_block, other=HIGHEST_KEY))  # pyright: ignore
    top_k = tl.load(top_k_ptr + row)
    if (tl.load(temperature_ptr + row) != 0.0) & (top_k != 1):
        top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        seed, step = tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
        dropped = tl.max(tl.load(dropped_ptr + first_place + blocks, mask=is_block, other=LOWEST_KEY))
        places = tl.arange(0, BLOCKS_PADDED * CAPACITY)
        of_block = places // CAPACITY
        count = tl.load(counts_ptr + first_place + of_block, mask=of_block < num_blocks, other=0)
        valid = places % CAPACITY < count
        scores = tl.load(candidates_ptr + first_place * CAPACITY + places, mask=valid, other=0.0)
        ids = tl.load(candidate_ids_ptr + first_place * CAPACITY + places, mask=valid, other=0)
        # What is left out already takes no candidate's place: else the search of the whole row would follow.
        keys = as_keys(scores, valid & (scores > -float("inf")))
        masses = as_masses(scores, highest, valid)
        total = tl.sum(tl.load(masses_ptr + first_place + blocks, mask=is_block, other=0))
        lowest_kept = tl.full((), LOWEST_KEY + 1, tl.int32)
        if top_k > 0:
            lowest_kept = tl.maximum(count_threshold(keys, top_k), lowest_kept)
            total = tl.sum(tl.where(keys >= lowest_kept, masses, 0))
        # Both searches are complete only if every dropped token lies below their results.
        complete = (top_k == 0) | (lowest_kept > dropped)
        if top_p < 1.0:
            lowest_kept = tl.maximum(mass_threshold(keys, masses, top_p * total.to(tl.float32)), lowest_kept)
        complete = complete & (lowest_kept > dropped)
        kept = valid & (keys >= lowest_kept)
        typical_p = tl.load(typical_ptr + row)
        if typical_p < 1.0:
            kept = kept & (tl.exp(scores - highest) >= min_p)
            if (top_k == 0) & (top_p >= 1.0):
                moment = tl.sum(tl.load(drops_ptr + first_place + blocks, mask=is_block, other=0))
            else:
                total = tl.sum(tl.where(kept, masses, 0))
                moment = tl.sum(as_moments(scores, highest, kept))
            mean = tl.div_rn(moment.to(tl.float32), total.to(tl.float32))
            near = near_keys(scores, highest, mean, kept)
            lowest_near = mass_threshold(near, masses, typical_p * total.to(tl.float32))
            kept = kept & (near >= lowest_near)
            if (top_k == 0) & (top_p >= 1.0):
                complete = is_left_out(dropped, highest, mean, lowest_near)
        if complete:
            races = run_races(scores, highest, min_p, ids, seed, step, kept)
            _, token_id = winner_of(races, ids)
        else:
            row_ptr = scores_ptr + row * vocab
            lowest_kept = threshold_in_row(row_ptr, vocab, highest, top_k, top_p, BLOCK)
            mean, lowest_near = tl.full((), 0.0, tl.float32), tl.full((), LOWEST_KEY, tl.int32)
            if typical_p < 1.0:
                mean, lowest_near = typical_in_row(row_ptr, vocab, highest, min_p, lowest_kept, typical_p, BLOCK)
            token_id = race_in_row(row_ptr, vocab, highest, min_p, lowest_kept, mean, lowest_near, seed, step, BLOCK)
    # Clamped, since a NaN logit must not give an address outside the vocabulary.
    token_id = tl.minimum(token_id, vocab - 1)
    slot = tl.load(slots_ptr + row)
    tl.store(chosen_ptr + row, token_id.to(tl.int64))
    tl.store(in_text_ptr + slot * stride_text + token_id, 1)
    count_ptr = in_reply_ptr + slot * stride_reply + token_id
    count = tl.load(count_ptr).to(tl.int32)
    tl.store(count_ptr, tl.minimum(count + 1, _MAX_COUNT).to(tl.uint8))


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    seen_in_text: torch.Tensor,
    counts_in_reply: torch.Tensor,
    banned: torch.Tensor,
) -> torch.Tensor:
    """Three launches without waiting for the device. Rows of logits, seen tokens and banned ids must be dense."""
    banned = banned.expand(logits.shape)
    for matrix in (logits, seen_in_text, counts_in_reply, banned):
        assert matrix.shape[1] == logits.shape[1]
        assert matrix.stride(1) == 1
    batch, vocab = logits.shape
    config = config_for("sampling", logits.device, f"V{vocab}", _DEFAULT)
    block, capacity = config.blocks["BLOCK"], config.blocks["CAPACITY"]
    num_blocks = cdiv(vocab, block)

    def scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=logits.device)

    scores = scratch(vocab, dtype=torch.float32)
    best = scratch(num_blocks, dtype=torch.float32), scratch(num_blocks, dtype=torch.int32)
    moments = scratch(num_blocks, 3, dtype=torch.float64)
    launch(
        _scores_kernel,
        (num_blocks, batch),
        *(logits, rows.temperature, rows.top_k, rows.top_n_sigma, rows.repetition_penalty, rows.presence_penalty),
        *(rows.frequency_penalty, rows.slots, seen_in_text, counts_in_reply, banned, scores, *best, moments),
        *(logits.stride(0), seen_in_text.stride(0), counts_in_reply.stride(0), banned.stride(0), vocab, num_blocks),
        config=Config({"BLOCK": block}, config.num_warps),
    )
    filters = rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.typical_p, rows.seeds, rows.steps
    candidates = (
        scratch(num_blocks, capacity, dtype=torch.float32),
        scratch(num_blocks, capacity, dtype=torch.int32),
        scratch(num_blocks, dtype=torch.int32),
        scratch(num_blocks, dtype=torch.int32),
        scratch(num_blocks, dtype=torch.int64),
        scratch(num_blocks, dtype=torch.int64),
    )
    blocks_padded = next_power_of_2(num_blocks)
    launch(
        _candidates_kernel,
        (num_blocks, batch),
        *(scores, best[0], moments, rows.top_n_sigma, *filters, *candidates, vocab, num_blocks),
        config=config,
        BLOCKS_PADDED=blocks_padded,
    )
    chosen = scratch(dtype=torch.int64)
    launch(
        _draw_kernel,
        (batch,),
        *(scores, *best, *filters, rows.slots, *candidates, seen_in_text, counts_in_reply, chosen),
        *(seen_in_text.stride(0), counts_in_reply.stride(0), vocab, num_blocks),
        config=config,
        BLOCKS_PADDED=blocks_padded,
    )
    return chosen
