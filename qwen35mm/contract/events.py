"""What a caller sees of a request while it runs: a stream of events that ends in one `Finished`."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from qwen35mm.contract.cache_report import CacheReport
from qwen35mm.contract.parts import ToolCall
from qwen35mm_preprocess import MediaPlan
from qwen35mm_preprocess.say import Said

if TYPE_CHECKING:
    import torch

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
class TokenLogprob:
    """A token and the logarithm of its probability, in the model's own distribution: no parameter is part of it.

    `text` has U+FFFD where a token is a part of a character; `bytes` are its own. `token_id` is None where a server
    doesn't say it. `top` has the likeliest tokens at this place, the likeliest first: as many as were asked for.
    """

    text: str
    logprob: float
    bytes: tuple[int, ...]
    token_id: int | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, eq=False)
class PromptRead:
    """What was asked of a prompt's own tokens (see `Reading`); the last event where no reply was asked for.

    Attributes:
        token_ids: the prompt's.
        logprobs: of the tokens from the reading's `start` on.
        states: hidden states, on the model's device: [N, hidden] in its dtype; pooled ones [1, hidden] in float32, on
            the CPU. None where none were wanted.
        cache: as a Result's; it lacks what is only known of replies.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    states: torch.Tensor | None
    cache: CacheReport


@dataclass(frozen=True)
class TextDelta:
    """The next piece of text, in whole characters.

    `num_generated_tokens` are all tokens of the reply up to here, those that gave no text included; `at_s` is when the
    last of them was chosen, by the clock of the engine that chose it: two of one reply can be compared. Both are None
    where a backend doesn't know. `logprobs` are of the tokens since the piece before, where they were asked for, but
    not of one that ended the reply; a piece without text has those of tokens whose text isn't told.
    """

    text: str
    channel: Channel = "answer"
    num_generated_tokens: int | None = None
    at_s: float | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


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
    """A finished reply and what it cost; its `str` is what it says.

    `text` is the answer without its calls where there were tools, and these are `tool_calls`. `schema` is what the
    answer was held to, as it was given, where somebody wants `parsed`; it isn't in `to_dict`.
    `token_ids` are all generated tokens, the closing control token included. `ttft_s` is the time from
    the call to the first generated token, media included; `decode_tokens_per_s` counts the tokens after
    the first, None where there was none. `seed` is the one that the reply was sampled with. `stopped_by` is the stop
    string or the id of `stop_token_ids` that ended the reply; None where the model or a limit did. `logprobs` has one
    for each of `token_ids`, where they were asked for.
    """

    text: str
    reasoning: str | None
    finish_reason: FinishReason
    token_ids: tuple[int, ...] = field(repr=False)
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    num_prompt_tokens: int
    num_generated_tokens: int
    ttft_s: float | None
    decode_tokens_per_s: float | None
    seed: int | None = None
    media: tuple[MediaReport, ...] = ()
    cache: CacheReport = field(default_factory=CacheReport)
    tool_calls: tuple[ToolCall, ...] = ()
    stopped_by: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    schema: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return "\n".join([*([self.text] if self.text or not self.tool_calls else []), *map(str, self.tool_calls)])

    @functools.cached_property
    def parsed(self) -> Any:
        """The value of an answer that was held to a schema: an instance of its pydantic class, else of JSON's types.

        None where there was no schema, and where the answer was cut off or calls a tool.

        Raises:
            ValidationError: pydantic's, where the class asks for more than its schema says.
        """
        if self.schema is None or self.finish_reason != "stop" or self.tool_calls:
            return None
        return self.schema.model_validate_json(self.text) if isinstance(self.schema, type) else json.loads(self.text)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict, with the fields in the order above."""
        values = asdict(replace(self, schema=None))
        del values["schema"]
        return values


@dataclass(frozen=True)
class Finished:
    """The last event of a stream."""

    result: Result


Event = Progress | MediaPlanned | PromptRead | Prefilled | TextDelta | Finished
