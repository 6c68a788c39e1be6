"""A reply's statistics: live token counts, and what is stored with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from qwen35mm.contract import CacheReport, Event, Finished, Prefilled, Result, TextDelta

# Long enough for a steady number, short enough for a current one.
WINDOW_S = 3.0
# A speed over a shorter time is chance.
MIN_MEASURED_S = 0.5


class Tally:
    """Counts a reply's tokens as they come. What the backend doesn't report is None.

    Attributes:
        num_tokens: tokens generated up to the newest text.
        num_thinking_tokens: tokens up to the last text of the thinking; None without thinking.
    """

    def __init__(self) -> None:
        self.num_tokens: int | None = None
        self.num_thinking_tokens: int | None = None
        self._prefilled: Prefilled | None = None
        self._result: Result | None = None
        # Pairs of a time and the number of tokens by then. `_window` has the newest, `_first` the first of all.
        self._window: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None

    def take(self, event: Event) -> None:
        """Takes the next event of the reply's stream."""
        if isinstance(event, Prefilled):
            self._prefilled = event
        elif isinstance(event, Finished):
            self._result = event.result
        elif isinstance(event, TextDelta) and event.num_generated_tokens is not None:
            self.num_tokens = event.num_generated_tokens
            if event.channel == "reasoning":
                self.num_thinking_tokens = event.num_generated_tokens
            if event.at_s is not None:
                self._window.append((event.at_s, self.num_tokens))
                self._first = self._first or self._window[0]
                while self._window[0][0] < event.at_s - WINDOW_S:
                    self._window.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        """The speed over the last seconds with tokens; None until there are enough."""
        return _speed(self._window[0], self._window[-1], MIN_MEASURED_S) if self._window else None

    def stats(self) -> dict[str, Any] | None:
        """What is stored with the reply, as JSON values; None if nothing is known."""
        if self._result is not None:
            return stats_of(self._result, self.num_thinking_tokens)
        begun = self._prefilled
        if begun is None or self.num_tokens is None:
            return None
        tokens_per_s = decode_s = None
        if self._first is not None and self._window:
            last = self._window[-1]
            tokens_per_s, decode_s = _speed(self._first, last, 0.0), last[0] - self._first[0]
        return {
            "num_prompt_tokens": begun.num_prompt_tokens,
            "num_generated_tokens": self.num_tokens,
            "num_thinking_tokens": self.num_thinking_tokens,
            "tokens_per_s": tokens_per_s,
            "ttft_s": begun.ttft_s,
            "seed": begun.seed,
            **_cache_stats(begun.cache),
            "decode_s": decode_s,
            # The sequence has grown since.
            "cache_bytes": None,
        }


def stats_of(result: Result, num_thinking_tokens: int | None = None) -> dict[str, Any]:
    """The statistics that are stored with a finished reply, as JSON values."""
    return {
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_generated_tokens": result.num_generated_tokens,
        "num_thinking_tokens": num_thinking_tokens,
        "tokens_per_s": result.decode_tokens_per_s,
        "ttft_s": result.ttft_s,
        "seed": result.seed,
        "num_accepted_tokens": result.num_accepted_tokens,
        **_cache_stats(result.cache),
    }


def _cache_stats(cache: CacheReport) -> Mapping[str, Any]:
    return {
        "num_cached_tokens": cache.num_cached_tokens,
        "cached_from": dict(cache.cached_from),
        "num_evicted_tokens": cache.num_evicted_tokens,
        "miss": cache.miss,
        "num_encoded_units": cache.num_encoded_units,
        "num_cached_units": cache.num_cached_units,
        "prefill_s": cache.prefill_s,
        "decode_s": cache.decode_s,
        "cache_bytes": cache.cache_bytes,
    }


def _speed(first: tuple[float, int], last: tuple[float, int], min_s: float) -> float | None:
    seconds = last[0] - first[0]
    return (last[1] - first[1]) / seconds if seconds > min_s else None
