"""A streamed answer gathered into a result."""

from __future__ import annotations

import time
from typing import Any

from qwen35mm.backends.remote.wire import DamageError, Delta, count
from qwen35mm.cache import CacheReport
from qwen35mm.engine import Result
from qwen35mm.engine.events import FinishReason

# Servers older than the common names end with the token or the string that they stopped at.
_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
}


class WithheldError(Exception):
    """The server's content filter ended the answer."""


class Reply:
    """What one attempt has brought so far.

    Args:
        start_s: when the caller asked, by `time.monotonic`.
        seed: of the sampling, where it was chosen.
    """

    def __init__(self, start_s: float, seed: int | None) -> None:
        self._start_s = start_s
        self._seed = seed
        self._answer: list[str] = []
        self._reasoning: list[str] = []
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._first_s: float | None = None
        self._last_s = start_s

    def add(self, delta: Delta) -> None:
        """Takes the next chunk."""
        if delta.answer or delta.reasoning:
            self._last_s = time.monotonic()
            if self._first_s is None:
                self._first_s = self._last_s
        self._answer.append(delta.answer)
        self._reasoning.append(delta.reasoning)
        self._finish_reason = delta.finish_reason or self._finish_reason
        self._usage = delta.usage or self._usage

    def result(self) -> Result:
        """The finished reply. Numbers of tokens are the server's, 0 where it gives none; token ids it never gives.

        Raises:
            DamageError: it isn't finished, or ended in a way that no reply should.
            WithheldError: it was kept back.
        """
        if self._finish_reason is None:
            raise DamageError("it ended before the reply was finished")
        if self._finish_reason == "content_filter":
            raise WithheldError
        if self._finish_reason not in _FINISH_REASONS:
            raise DamageError(f"it ended with the reason '{self._finish_reason}'")
        num_prompt, num_generated = count(self._usage, "prompt_tokens"), count(self._usage, "completion_tokens")
        num_cached = min(count(self._usage, "prompt_tokens_details", "cached_tokens"), num_prompt)
        decode_s = 0.0 if self._first_s is None else self._last_s - self._first_s
        return Result(
            text="".join(self._answer),
            reasoning="".join(self._reasoning) or None,
            finish_reason=_FINISH_REASONS[self._finish_reason],
            token_ids=(),
            prompt_token_ids=(),
            num_prompt_tokens=num_prompt,
            num_generated_tokens=num_generated,
            ttft_s=None if self._first_s is None else self._first_s - self._start_s,
            decode_tokens_per_s=(num_generated - 1) / decode_s if num_generated > 1 and decode_s > 0 else None,
            seed=self._seed,
            cache=CacheReport(
                num_cached_tokens=num_cached, num_prefilled_tokens=num_prompt - num_cached, decode_s=decode_s
            ),
        )
