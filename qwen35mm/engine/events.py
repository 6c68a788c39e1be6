"""What a caller sees of a request while it runs: a stream of events that ends in one `Finished`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from qwen35mm.cache.report import CacheReport
from qwen35mm_preprocess import MediaPlan
from qwen35mm_preprocess.say import Said

Phase = Literal["wait", "read", "encode", "prefill"]
Channel = Literal["reasoning", "answer"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Progress:
    """How far the work before the first token is.

    `wait` counts the requests ahead, `read` frames or images decoded, `encode` vision layers times
    units, `prefill` prompt tokens.
    """

    phase: Phase
    done: int
    total: int


@dataclass(frozen=True)
class MediaPlanned:
    """The media of the request as they were read: one plan each, in order of appearance.

    Keep the plans with the message: given back with its media, they make later turns see the same
    pixels whatever the settings are by then.
    """

    plans: tuple[MediaPlan, ...]
    warnings: tuple[Said, ...] = ()


@dataclass(frozen=True)
class Prefilled:
    """The prompt is computed, and the first token chosen: what is known of a reply that never gets to its `Finished`.

    `ttft_s` and `seed` are the Result's; `cache` lacks what is only known at the end: `decode_s` and `cache_bytes`.
    """

    num_prompt_tokens: int
    ttft_s: float
    seed: int | None
    cache: CacheReport


@dataclass(frozen=True)
class TextDelta:
    """The next piece of text, in whole characters.

    `num_generated_tokens` are all tokens of the reply up to here, those that gave no text included; `at_s` is when the
    last of them was chosen, by the clock of the engine that chose it: two of one reply can be compared. Both are None
    where a backend doesn't know.
    """

    text: str
    channel: Channel = "answer"
    num_generated_tokens: int | None = None
    at_s: float | None = None


@dataclass(frozen=True)
class MediaReport:
    """What one medium was for the model."""

    kind: Literal["image", "video"]
    digest: str
    grid_thw: tuple[int, int, int]
    num_tokens: int
    frame_timestamps: tuple[float, ...] | None


@dataclass(frozen=True)
class Result:
    """A finished reply and what it cost.

    `token_ids` are all generated tokens, the closing control token included. `ttft_s` is the time from
    the call to the first generated token, media included; `decode_tokens_per_s` counts the tokens after
    the first, None where there was none. `seed` is the one that the reply was sampled with.
    """

    text: str
    reasoning: str | None
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_generated_tokens: int
    ttft_s: float | None
    decode_tokens_per_s: float | None
    seed: int | None = None
    media: tuple[MediaReport, ...] = ()
    cache: CacheReport = field(default_factory=CacheReport)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict, with the fields in the order above."""
        return asdict(self)


@dataclass(frozen=True)
class Finished:
    """The last event of a stream."""

    result: Result


Event = Progress | MediaPlanned | Prefilled | TextDelta | Finished
