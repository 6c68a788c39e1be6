"""Computes a prompt's M-RoPE positions and rope_delta from its text and vision runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from qwen35mm_preprocess.types import GridTHW


class TextRun(NamedTuple):
    """A run of text tokens; may be empty."""

    num_tokens: int


class VisionRun(NamedTuple):
    """A run of placeholders over a merged grid: one image, or one temporal patch of a video (t = 1)."""

    t: int
    h: int
    w: int

    @classmethod
    def from_grid(cls, grid_thw: GridTHW, merge_size: int = 2) -> VisionRun:
        """The run of a medium's `grid_thw`, which counts patches."""
        return cls(grid_thw.t, grid_thw.h // merge_size, grid_thw.w // merge_size)

    @property
    def num_tokens(self) -> int:
        return self.t * self.h * self.w


Run = TextRun | VisionRun


def mrope_positions(runs: Iterable[Run]) -> tuple[np.ndarray, int]:
    """Temporal, height and width positions of every token, and rope_delta.

    Text positions rise by one in all three rows. A vision run that starts at position p has positions p + its (t, h, w)
    index, and the next token's position is p + max(h, w). Equal to `get_rope_index` of transformers' Qwen3_5Model,
    where each temporal patch of a video is also its own run.

    Returns:
        positions: int64 [3, T], where T is the total of the runs' tokens.
        rope_delta: the next token's position minus T; in decode, position = cache_position + rope_delta.
    """
    parts = [np.zeros((3, 0), np.int64)]
    position = 0
    for run in runs:
        if min(run) < (0 if isinstance(run, TextRun) else 1):
            raise ValueError(f"A text run has 0 or more tokens and a vision run 1 or more on each side, not {run}.")
        if isinstance(run, TextRun):
            index = np.broadcast_to(np.arange(run.num_tokens), (3, run.num_tokens))
            step = run.num_tokens
        else:
            index = np.indices(run).reshape(3, -1)
            step = max(run.h, run.w)
        parts.append(index.astype(np.int64) + position)
        position += step
    positions = np.concatenate(parts, axis=1)
    return positions, position - positions.shape[1]
