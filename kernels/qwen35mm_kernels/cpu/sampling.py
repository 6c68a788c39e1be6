"""Sampling in torch: only tokens that pass top-k are sorted, and only kept tokens get random numbers."""

from __future__ import annotations

from dataclasses import fields

import torch

from qwen35mm_kernels.reference.sampling import (
    MASS_SCALE,
    MAX_COUNT,
    SamplingRows,
    exponentials,
    is_typical,
    lowest_within_sigmas,
    random_bits,
)


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    seen_in_text: torch.Tensor,
    counts_in_reply: torch.Tensor,
    banned: torch.Tensor,
) -> torch.Tensor:
    banned = banned.expand(logits.shape)
    # Row by row, in place, and skipping neutral parameters: a pass over 248,320 scores costs as much as a norm.
    chosen = []
    for row, slot in enumerate(rows.slots.tolist()):
        params = SamplingRows(*(getattr(rows, field.name)[row] for field in fields(rows)))
        scores = logits[row].to(torch.float32, copy=True)
        if params.repetition_penalty != 1:
            penalised = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
            scores = torch.where(seen_in_text[slot], penalised, scores)
        if params.presence_penalty != 0:
            scores -= params.presence_penalty * (counts_in_reply[slot] > 0)
        if params.frequency_penalty != 0:
            scores -= params.frequency_penalty * counts_in_reply[slot]
        scores.masked_fill_(banned[row], -torch.inf)
        greedy = params.temperature == 0 or params.top_k == 1
        chosen.append(scores.argmax() if greedy else _draw(scores.div_(params.temperature), params))
        seen_in_text[slot, chosen[-1]] = True
        count = counts_in_reply[slot, chosen[-1]]
        count += count < MAX_COUNT
    return torch.stack(chosen)


def _draw(scores: torch.Tensor, row: SamplingRows) -> torch.Tensor:
    """scores [vocab] of a row that isn't greedy -> its token id."""
    top_k, highest = int(row.top_k), scores.max()
    if row.top_n_sigma > 0:
        scores.masked_fill_(scores < lowest_within_sigmas(scores, row.top_n_sigma), -torch.inf)
    # Banned tokens score -inf and have no mass.
    threshold = torch.topk(scores, top_k).values[-1] if 0 < top_k < len(scores) else scores.min()
    ids = (scores >= threshold.clamp(min=torch.finfo(scores.dtype).min)).nonzero().flatten()
    weights = torch.exp(scores[ids] - highest)
    kept = weights >= row.min_p
    if row.top_p < 1:
        ordered, order = torch.sort(scores[ids], descending=True)
        masses = (weights * MASS_SCALE).long()[order]
        passed = (masses.cumsum(0) - masses).float() < row.top_p * masses.sum().float()
        # Passed tokens come first in the order. Tokens equal to the last of them pass, too.
        kept &= scores[ids] >= ordered[passed.sum() - 1]
    ids, weights = ids[kept], weights[kept]
    if row.typical_p < 1:
        kept = is_typical(highest - scores[ids], weights, row.typical_p)
        ids, weights = ids[kept], weights[kept]
    return ids[(weights / exponentials(random_bits(row.seeds, row.steps, ids))).argmax()]
