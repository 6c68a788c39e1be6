"""The events of a running request: a stream that ends in one `Finished`."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from qwen35mm.contract.cache_report import CacheReport
from qwen35mm.contract.parts import ToolCall
from qwen35mm.contract.typed_schemas import is_type, value_of
from qwen35mm_preprocess import MediaPlan
from qwen35mm_preprocess.say import Said

if TYPE_CHECKING:
    import torch

Phase = Literal["load", "wait", "read", "encode", "prefill"]
Channel = Literal["reasoning", "answer"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Progress:
    """Progress of the work before the first token.

    `load` counts nothing: the model is being loaded. `wait` counts the requests ahead, `read` decoded frames or images,
    `encode` vision layers times units, `prefill` prompt tokens.
    """

    phase: Phase
    done: int
    total: int


@dataclass(frozen=True)
class MediaPlanned:
    """The plans by which the request's media were read, in order of appearance.

    Keep the plans with the message. Given back with its media, they make later turns see the same pixels, whatever the
    settings are then. A plan is None if the medium couldn't be read, and the model read its `stand_in` instead.
    """

    plans: tuple[MediaPlan | None, ...]
    warnings: tuple[Said, ...] = ()


@dataclass(frozen=True)
class Prefilled:
    """The prompt is computed and the first token chosen. All that is known of a reply that never reaches `Finished`.

    `ttft_s` and `seed` are the Result's; `cache` lacks `decode_s` and `cache_bytes`, which are known only at the end.
    """

    num_prompt_tokens: int
    ttft_s: float
    seed: int | None
    cache: CacheReport


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log probability in the model's own distribution, before any sampling parameter.

    `text` has U+FFFD where a token is part of a character; `bytes` are the token's own. `token_id` is None where a
    server doesn't report it. `top` lists as many of the likeliest tokens as requested, likeliest first.
    """

    text: str
    logprob: float
    bytes: tuple[int, ...]
    token_id: int | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, eq=False)
class PromptRead:
    """What a `Reading` asked of the prompt's tokens; the last event if no reply was requested.

    Attributes:
        token_ids: the prompt's.
        logprobs: of the tokens from the reading's `start` on.
        states: hidden states on the model's device, [N, hidden] in its dtype; pooled ones are [1, hidden] in float32 on
            the CPU. None if not requested.
        cache: the Result's, without the fields about replies.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    states: torch.Tensor | None
    cache: CacheReport


@dataclass(frozen=True)
class TextDelta:
    """The next chunk of text, in whole characters.

    `num_generated_tokens` counts all tokens of the reply so far, those without text included. `at_s` is when the last
    of them was chosen, by the engine's clock: compare it only within one reply. Both are None where a backend doesn't
    know. `logprobs`, if requested, covers the tokens since the last chunk, but not the one that ended the reply. A
    chunk without text carries those of tokens whose text isn't shown.
    """

    text: str
    channel: Channel = "answer"
    num_generated_tokens: int | None = None
    at_s: float | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class MediaReport:
    """How the model saw one medium."""

    kind: Literal["image", "video"]
    digest: str
    grid_thw: tuple[int, int, int]
    num_tokens: int
    frame_timestamps: tuple[float, ...] | None


@dataclass(frozen=True)
class Result:
    """A finished reply and what it cost; its `str` is the answer.

    `text` is the answer without its `tool_calls`. `schema` is the answer's schema as the caller gave it, for `parsed`;
    it isn't in `to_dict`. `token_ids` are all generated tokens, the closing control token included. `ttft_s` is the
    time from the call to the first generated token, media included. `decode_tokens_per_s` counts the tokens after the
    first; None if there were none. `seed` is the one that the reply was sampled with. `stopped_by` is the stop string
    or the id of `stop_token_ids` that ended the reply; None if the model or a limit did. `logprobs`, if requested, has
    one for each of `token_ids`. Of `num_drafted_tokens`, which were computed together with a token before them,
    `num_accepted_tokens` saved a step.
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
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    schema: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return "\n".join([*([self.text] if self.text or not self.tool_calls else []), *map(str, self.tool_calls)])

    @functools.cached_property
    def parsed(self) -> Any:
        """The answer's value by its schema: an instance of the type, or JSON types.

        None without a schema, and if the answer was cut off or calls a tool.

        Raises:
            ValidationError: pydantic's, if the class requires more than its schema says.
        """
        if self.schema is None or self.finish_reason != "stop" or self.tool_calls:
            return None
        return value_of(self.schema, self.text) if is_type(self.schema) else json.loads(self.text)

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
