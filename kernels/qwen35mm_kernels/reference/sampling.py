"""Samples the next token ids from logits on the device. Each row of a batch is a sequence with its own parameters.

The order of operations and the formulas follow transformers' generation/logits_process.py. `presence_penalty` and
`frequency_penalty` follow the OpenAI API (generated tokens only).

A draw is a pure function of a row's scores, seed and step. Each kept token gets a random exponential number, and the
largest weight / exponential wins, which happens with probability weight / sum of weights. The order of tokens doesn't
matter: a token's random number is Philox4x32-10 (Salmon et al. 2011) of counter (token id, step) and key (seed).

A token passes top-k if fewer than k tokens score higher. It passes top-p if the share of higher tokens among those that
passed top-k is below top_p. Equal tokens stay or go together. Shares are sums of integers,
floor(exp(score - highest score) * 2**40). They are exact, so the order of summation doesn't matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch

MASS_SCALE = float(1 << 40)
# Counts saturate here: the table holds bytes.
MAX_COUNT = 255
_MASK_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Column:
    """One tensor of `SamplingRows`.

    Attributes:
        neutral: the value that changes nothing; None if the column isn't a parameter.
    """

    dtype: torch.dtype
    neutral: float | None = None


def _column(dtype: torch.dtype, neutral: float | None = None) -> dict[str, Column]:
    return {"column": Column(dtype, neutral)}


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters and state of each row: dense tensors [B] on the logits' device.

    Writing into these tensors changes the values for a captured graph. Each parameter is a column here, read by
    `sample` in `reference`, `cpu`, `cpu.native` (sampling.cpp) and `gpu`. qwen35mm/contract/sampling.py has its range
    under the same name.

    Attributes:
        temperature: float32; 0 takes the likeliest token, like top_k = 1.
        top_k: int32; 0 keeps all.
        top_p: float32, above 0; 1 keeps all.
        min_p: float32; drops tokens less likely than this share of the likeliest one.
        typical_p: float32, above 0; keeps this share of the remaining mass, nearest to the entropy; 1 keeps all.
        top_n_sigma: float32; drops tokens whose logit is more than this many standard deviations below the highest; 0
            drops none.
        repetition_penalty: float32; divides (multiplies, if negative) the logits of tokens seen in the text.
        presence_penalty: float32; subtracted from the logits of tokens seen in the reply.
        frequency_penalty: float32; subtracted from a token's logit for each time it occurs in the reply.
        seeds: int64, the reply's random seed.
        steps: int64, the index of the token in its reply.
        slots: int64, the row's index in the pools of seen tokens.
    """

    temperature: torch.Tensor = field(metadata=_column(torch.float32, 1.0))
    top_k: torch.Tensor = field(metadata=_column(torch.int32, 0))
    top_p: torch.Tensor = field(metadata=_column(torch.float32, 1.0))
    min_p: torch.Tensor = field(metadata=_column(torch.float32, 0.0))
    typical_p: torch.Tensor = field(metadata=_column(torch.float32, 1.0))
    top_n_sigma: torch.Tensor = field(metadata=_column(torch.float32, 0.0))
    repetition_penalty: torch.Tensor = field(metadata=_column(torch.float32, 1.0))
    presence_penalty: torch.Tensor = field(metadata=_column(torch.float32, 0.0))
    frequency_penalty: torch.Tensor = field(metadata=_column(torch.float32, 0.0))
    seeds: torch.Tensor = field(metadata=_column(torch.int64))
    steps: torch.Tensor = field(metadata=_column(torch.int64))
    slots: torch.Tensor = field(metadata=_column(torch.int64))

    @classmethod
    def neutral(cls, batch: int, device: torch.device | str = "cpu") -> SamplingRows:
        """Rows of parameters that change nothing; seeds and steps 0, slots from 0 on."""
        columns = {
            name: torch.full((batch,), column.neutral or 0, dtype=column.dtype, device=device)
            for name, column in COLUMNS.items()
        }
        return cls(**columns | {"slots": torch.arange(batch, device=device)})


COLUMNS: dict[str, Column] = {each.name: each.metadata["column"] for each in fields(SamplingRows)}
PARAMETERS = {name: column for name, column in COLUMNS.items() if column.neutral is not None}


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    seen_in_text: torch.Tensor,
    counts_in_reply: torch.Tensor,
    banned: torch.Tensor,
) -> torch.Tensor:
    """Each row's next token id; the lowest id wins ties.

    Args:
        logits: [B, vocab], float32 or bfloat16, not changed. The arithmetic is float32. Each row needs at least one
            finite logit that isn't banned.
        rows: each row's parameters.
        seen_in_text: [S, vocab] bool, the tokens in the prompt and the reply of each slot. Adds the chosen token.
        counts_in_reply: [S, vocab] uint8, each token's count in the reply of each slot, at most `MAX_COUNT`. Counts the
            chosen token.
        banned: [vocab] or [B, vocab] bool, ids that can't be chosen; top-k, top-p and min-p ignore them.

    Returns:
        [B] int64. Implementations agree unless two numbers differ by no more than an exponential's rounding.
    """
    slots = rows.slots
    scores, greedy = _scores(logits, rows, seen_in_text[slots], counts_in_reply[slots], banned)
    token_ids = torch.arange(logits.shape[1])
    chosen = []
    for row, row_scores in enumerate(scores):
        if not greedy[row] and rows.top_n_sigma[row] > 0:
            lowest = lowest_within_sigmas(row_scores, rows.top_n_sigma[row])
            row_scores = torch.where(row_scores < lowest, -torch.inf, row_scores)
        weights = torch.exp(row_scores - row_scores.max())
        bits = random_bits(rows.seeds[row], rows.steps[row], token_ids)
        races = row_scores if greedy[row] else weights / exponentials(bits)
        kept = range(len(row_scores)) if greedy[row] else _kept(row_scores.tolist(), weights, rows, row)
        chosen.append(max(kept, key=lambda token_id, races=races: (races[token_id].item(), -token_id)))
        seen_in_text[slots[row], chosen[-1]] = True
        count = counts_in_reply[slots[row], chosen[-1]]
        count += count < MAX_COUNT
    return torch.tensor(chosen, dtype=torch.int64)


def lowest_within_sigmas(scores: torch.Tensor, num_sigmas: torch.Tensor) -> torch.Tensor:
    """The lowest of scores [vocab] that top-nσ (arXiv:2411.07641) keeps, float32.

    It is the highest minus `num_sigmas` standard deviations of the scores above -inf. Dividing scores by a temperature
    keeps the same tokens. Computed in float64, so that the order of summation can't move a score across the bound.
    """
    possible = scores[scores > -torch.inf].double()
    return (possible.max() - num_sigmas.double() * possible.std(correction=0)).float()


def random_bits(seeds: torch.Tensor, steps: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32 random bits as int64, the first word of Philox4x32-10; seeds, steps and token ids (int64) broadcast."""
    words = philox(
        (token_ids, steps & _MASK_32, (steps >> 32) & _MASK_32, torch.zeros_like(token_ids)),
        (seeds & _MASK_32, (seeds >> 32) & _MASK_32),
    )
    return words[0]


def philox(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor], num_rounds: int = 10
) -> tuple[torch.Tensor, ...]:
    """Philox4x32 on int64 tensors of 32 unsigned bits each: four words of counter, two of key, four out."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(num_rounds):
        # A 64-bit product may wrap into the sign. Shifting and masking still gives correct halves.
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((second >> 32) & _MASK_32) ^ c1 ^ k0, ((first >> 32) & _MASK_32) ^ c3 ^ k1
        c1, c3 = second & _MASK_32, first & _MASK_32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK_32, (k1 + 0xBB67AE85) & _MASK_32
    return c0, c1, c2, c3


def exponentials(bits: torch.Tensor) -> torch.Tensor:
    """32 random bits -> -log(1 - uniform) in float32, also precise for small results, since the smallest win."""
    uniform = (bits.float() + 0.5) * 2.0**-32
    series = uniform * (1 + uniform * (0.5 + uniform * (1 / 3)))
    return torch.where(uniform < 2.0**-7, series, -torch.log(1 - uniform.clamp(max=1 - 2.0**-24)))


def _scores(
    logits: torch.Tensor, rows: SamplingRows, in_text: torch.Tensor, in_reply: torch.Tensor, banned: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(penalised logits divided by temperature (greedy: by 1) [B, vocab], which rows are greedy [B])."""
    scores = logits.float()
    penalty = rows.repetition_penalty[:, None]
    scores = torch.where(in_text, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    scores = scores - rows.presence_penalty[:, None] * (in_reply > 0)
    scores = scores - rows.frequency_penalty[:, None] * in_reply
    scores = torch.where(banned, -torch.inf, scores)
    greedy = (rows.temperature == 0) | (rows.top_k == 1)
    return scores / torch.where(greedy, 1.0, rows.temperature)[:, None], greedy


def _kept(scores: list[float], weights: torch.Tensor, rows: SamplingRows, row: int) -> list[int]:
    masses = (weights * MASS_SCALE).long().tolist()
    order = sorted(range(len(scores)), key=lambda token_id: -scores[token_id])
    # (number, mass) of the tokens that score higher.
    higher: dict[int, tuple[int, int]] = {}
    mass = 0
    for place, token_id in enumerate(order):
        equal_to_last = place > 0 and scores[order[place - 1]] == scores[token_id]
        higher[token_id] = higher[order[place - 1]] if equal_to_last else (place, mass)
        mass += masses[token_id]
    top_k, top_p, min_p = int(rows.top_k[row]), rows.top_p[row], rows.min_p[row]
    kept = [token_id for token_id in order if top_k == 0 or higher[token_id][0] < top_k]
    if top_p < 1:
        bound = top_p * torch.tensor(sum(masses[token_id] for token_id in kept)).float()
        kept = [token_id for token_id in kept if torch.tensor(higher[token_id][1]).float() < bound]
    kept = torch.tensor([token_id for token_id in kept if weights[token_id] >= min_p])
    if rows.typical_p[row] < 1:
        drops = max(scores) - torch.tensor(scores)[kept]
        kept = kept[is_typical(drops, weights[kept], rows.typical_p[row])]
    return kept.tolist()


def is_typical(drops: torch.Tensor, weights: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """The tokens that locally typical sampling (arXiv:2202.00666) keeps, bool [n].

    |surprise - entropy| is the distance of a token's drop from the mean drop, since the sum of weights adds the same to
    both. A token is kept if the tokens with a smaller distance have less than typical_p of the mass. Equal tokens stay
    or go together. The mean also uses integers: floor(weight * 2**40 * drop).

    Args:
        drops: float32, the highest score minus each token's score.
        weights: float32, exp(-drop).
    """
    masses = (weights * MASS_SCALE).long()
    moments = torch.where(weights > 0, weights * MASS_SCALE * drops, 0.0).long()
    total = masses.sum().float()
    distances, order = torch.sort((drops - moments.sum().float() / total).abs())
    masses = masses[order]
    num_kept = ((masses.cumsum(0) - masses).float() < typical_p * total).sum()
    kept = torch.empty_like(order, dtype=torch.bool)
    kept[order] = distances <= distances[num_kept - 1]
    return kept
