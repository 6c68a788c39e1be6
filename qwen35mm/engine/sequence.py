"""One admitted request and everything that it holds while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

import torch

from qwen35mm.cache import SequenceCache
from qwen35mm.engine.events import FinishReason, MediaReport, Result
from qwen35mm.engine.output import OutputProcessor
from qwen35mm.engine.request import Request
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.vision import VisionEncoding
from qwen35mm.prompt import Prompt
from qwen35mm_preprocess import MediaPlan


class Sequence:
    """The state of one request between two steps; `Engine` does the work.

    `pieces` are what is left to prefill. `last_token_id` is the newest token of the reply: chosen, not
    yet in the cache.
    """

    def __init__(
        self, request: Request, cache: SequenceCache, vision: VisionEncoding, sampler: Sampler, output: OutputProcessor
    ) -> None:
        self.request = request
        self.cache = cache
        self.vision = vision
        self.sampler = sampler
        self.output = output
        self.vision_features: torch.Tensor | None = None
        self.pieces: list[tuple[int, int]] = []
        self.last_token_id: int | None = None
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None

    @property
    def phase(self) -> Literal["encode", "prefill", "decode"]:
        """What the sequence needs next."""
        if not self.vision.finished:
            return "encode"
        return "prefill" if self.pieces else "decode"

    def token_time(self) -> None:
        """Notes that a token has just been generated."""
        self._last_token_s = time.monotonic()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s

    def result(self, finish_reason: FinishReason) -> Result:
        """The reply as it stands."""
        prompt, output = self.request.prompt, self.output
        num_generated = len(output.token_ids)
        ttft_s = decode_tokens_per_s = None
        if self._first_token_s is not None and self._last_token_s is not None:
            ttft_s = self._first_token_s - self.request.arrival_s
            if self._last_token_s > self._first_token_s:
                decode_tokens_per_s = (num_generated - 1) / (self._last_token_s - self._first_token_s)
        return Result(
            text=output.text,
            reasoning=output.reasoning,
            finish_reason=finish_reason,
            token_ids=tuple(output.token_ids),
            prompt_token_ids=tuple(prompt.token_ids.tolist()),
            num_prompt_tokens=len(prompt.token_ids),
            num_generated_tokens=num_generated,
            ttft_s=ttft_s,
            decode_tokens_per_s=decode_tokens_per_s,
            seed=None if self.request.params.greedy else self.sampler.seed,
            media=tuple(media_report(medium.plan) for medium in self.request.media),
        )


def media_report(plan: MediaPlan) -> MediaReport:
    """What a prepared medium's plan says of it."""
    assert plan.digest is not None, "the plan of a prepared medium has its digest"
    grid = plan.grid_thw
    return MediaReport(plan.kind, plan.digest, (grid.t, grid.h, grid.w), plan.num_tokens, plan.timestamps_s)


def prefill_pieces(prompt: Prompt, piece_tokens: int) -> Iterator[tuple[int, int]]:
    """The token ranges that a prompt is prefilled in: each segment, then the tail, in pieces from its own start."""
    bounds = [(segment.start, segment.stop) for segment in prompt.segments]
    if prompt.tail_start < len(prompt.token_ids):
        bounds.append((prompt.tail_start, len(prompt.token_ids)))
    for start, stop in bounds:
        for at in range(start, stop, piece_tokens):
            yield at, min(at + piece_tokens, stop)
