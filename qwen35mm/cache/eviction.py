"""Which keys and values of a finished segment are kept.

Each head of each layer keeps as many tokens as every other: those whose keys are long and far from the segment's mean
key. (Keys like many others say little: KeyDiff, arXiv:2504.15364. How the choice was made: docs/decisions.md.) Where a
model has gates (`gates.py`), their scores are added. The choice depends on the segment alone, so a conversation that
continues from the cache keeps the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qwen35mm.cache.kv_keep import NUM_SINKS, KVKeep, media_mask
from qwen35mm.cache.placement import moved
from qwen35mm.prompt import Prompt


@dataclass(frozen=True, eq=False)
class EvictedRows:
    """What a segment keeps.

    Attributes:
        num_tokens: the segment's.
        groups: the places of its tokens of each kind, [n] int64 and ascending, and how many of them are kept.
        always: [a] int64, places that are kept first.
    """

    num_tokens: int
    groups: Sequence[tuple[torch.Tensor, int]]
    always: torch.Tensor

    @classmethod
    def of(cls, prompt: Prompt, index: int, keep: KVKeep) -> EvictedRows | None:
        """What segment `index` of a prompt keeps; None if that is everything."""
        segment = prompt.segments[index]
        if not keep.evicts:
            return None
        is_media = media_mask(prompt, segment)
        text, media = np.flatnonzero(~is_media), np.flatnonzero(is_media)
        counts = keep.kept(len(text), len(media))
        if sum(counts) == len(is_media):
            return None
        groups = [(torch.from_numpy(places), count) for places, count in zip((text, media), counts, strict=True)]
        return cls(len(is_media), groups, torch.arange(max(NUM_SINKS - segment.start, 0)))

    @property
    def num_kept(self) -> int:
        """Rows that are kept."""
        return sum(count for _, count in self.groups)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """The places that each head keeps, by scores [n, heads]: [num_kept, heads] int64, ascending.

        Of equal scores the first place is taken.
        """
        scores[moved(self.always, scores.device)] = torch.inf
        kept = []
        for places, count in self.groups:
            there = moved(places, scores.device)
            order = scores[there].sort(dim=0, descending=True, stable=True).indices
            kept.append(there[order[:count]])
        return torch.cat(kept).sort(dim=0).values


def key_scores(k: torch.Tensor) -> torch.Tensor:
    """How far each key is from the segment's mean key, and how long, both in standard deviations.

    Args:
        k: [n, heads, D] float32.

    Returns:
        [n, heads].
    """
    far, long = (torch.linalg.vector_norm(each, dim=-1) for each in (k - k.mean(0), k))
    return standard(far) + standard(long)


def standard(x: torch.Tensor) -> torch.Tensor:
    """x: [n, heads], moved and scaled to mean 0 and variance 1 in each head."""
    centred = x - x.mean(0)
    return centred / centred.square().mean(0).sqrt().clamp(min=1e-6)
