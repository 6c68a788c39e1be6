"""How many seconds of GPU to ask for: visitors have a daily quota, and shorter calls start sooner."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen35mm.errors import ConfigError

# Rough, safe figures for a model of a billion parameters on half an H200. A call that asks for too little is cut off,
# one that asks for too much waits longer. None is measured on ZeroGPU.
PREFILL_TOKENS_PER_S = 10_000.0
DECODE_TOKENS_PER_S = 40.0
WEIGHT_BYTES_PER_S = 4e9
START_S = 8.0
# Expected most tokens of a reply without its own limit.
EXPECTED_REPLY_TOKENS = 1024
# For the history commit and disk writes, after the reply's last token at the latest.
RESERVE_S = 4.0
MIN_DURATION_S = 15


@dataclass(frozen=True)
class DurationModel:
    """Estimates the seconds of a GPU call.

    Attributes:
        num_parameters: of the model. Prefill time grows with it, decode time with its root (small models wait for
            kernel launches, large ones for their weights).
        weight_bytes: bytes to move to the GPU first.
        max_duration_s: the most seconds ever asked for. A reply that isn't complete by then ends with a
            RequestTimeoutError.
    """

    num_parameters: int
    weight_bytes: int
    max_duration_s: int = 60

    def __post_init__(self) -> None:
        if self.max_duration_s < MIN_DURATION_S:
            raise ConfigError(f"A GPU call takes at least {MIN_DURATION_S} seconds; {self.max_duration_s} were given.")

    def estimate_s(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Seconds for a prompt, media tokens included, a reply of up to `max_tokens`, and its history commit."""
        billions = max(self.num_parameters / 1e9, 1.0)
        reply = min(max_tokens or EXPECTED_REPLY_TOKENS, EXPECTED_REPLY_TOKENS * 8)
        seconds = START_S + self.weight_bytes / WEIGHT_BYTES_PER_S
        seconds += (num_prompt_tokens + reply) * billions / PREFILL_TOKENS_PER_S
        seconds += reply * math.sqrt(billions) / DECODE_TOKENS_PER_S
        return min(max(math.ceil(seconds + RESERVE_S), MIN_DURATION_S), self.max_duration_s)
