"""Requests to the engine, and what it returns."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.safetensors_files import not_finite
from qwen35mm.checkpoints.shards import some
from qwen35mm.checkpoints.sources import PlainSource
from qwen35mm.contract import Event, Finished, PromptRead, Retain, SamplingParams
from qwen35mm.engine.grammar import Matcher
from qwen35mm.engine.reading import Reading
from qwen35mm.errors import CheckpointError, ContextTooLongError, EngineError, Qwen35mmError, RequestError
from qwen35mm.model.devices import shortage
from qwen35mm.prompt import Prompt
from qwen35mm_preprocess import MediaPlan, PreparedMedia
from qwen35mm_preprocess.say import Said, say

P = TypeVar("P", bound="CachedPrompt")

# Libraries, Triton, CUDA and torch's host allocator have their own errors for lack of memory.
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDA(\]:| error:) out of memory"
)


@dataclass(frozen=True, eq=False)
class DeferredMedia:
    """A medium with a known plan and digests, whose pixels are read only if its embeddings aren't cached.

    `load` runs in another thread and may raise a MediaError, which ends the request. It keeps `num_bytes` in memory.
    """

    plan: MediaPlan
    load: Callable[[], PreparedMedia]
    num_bytes: int = 0


def _not_any_more() -> PreparedMedia:
    raise AssertionError("a prompt that was read is read again")


@dataclass(frozen=True, eq=False)
class CachedPrompt:
    """A prompt, its media in order of appearance, and its owner.

    Attributes:
        conversation: a newer prompt of a conversation drops its pending history commit.
        salt: a tenant's secret: two salts share nothing but the tokens before `salt_from`.
        adapter: the name of the adapter that it is computed with; nothing is shared with others.
    """

    prompt: Prompt
    media: tuple[PreparedMedia | DeferredMedia, ...] = ()
    retain: Retain = "conversation"
    conversation: str | None = None
    salt: bytes = b""
    salt_from: int = 0
    adapter: str | None = None

    @property
    def num_media_bytes(self) -> int:
        """What its media keep in memory: files, or pixels."""
        held = (
            each.num_bytes if isinstance(each, DeferredMedia) else each.patches.pixels.nbytes for each in self.media
        )
        return sum(held)

    @property
    def person(self) -> bytes:
        """Its owner, for equal shares; see `person_of`."""
        return self.salt.partition(b"\0")[0]

    def without_pixels(self: P) -> P:
        """The same with only its media's plans, for a prompt that is in the cache."""
        return replace(self, media=tuple(DeferredMedia(medium.plan, _not_any_more) for medium in self.media))


@dataclass(frozen=True, eq=False)
class Request(CachedPrompt):
    """A prompt and how to answer it.

    Attributes:
        arrival_s: on the clock of `time.monotonic`; the time to the first token starts here.
        deadline_s: on the same clock; after it the request ends with a RequestTimeoutError.
        calls: the grammar of an answer that calls tools (`grammar_of_calls`); None if calls are unconstrained.
        reading: what to read of the prompt's own tokens.
        replies: whether to generate a reply.
        finds_thinking: whether to separate a reply's thinking from its answer.
        matcher: for the answer's grammar, at its start; the engine makes it.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float = field(default_factory=time.monotonic)
    deadline_s: float | None = None
    calls: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    reading: Reading | None = None
    replies: bool = True
    finds_thinking: bool = True
    matcher: Matcher | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether its answer follows a grammar."""
        return self.params.is_constrained or self.calls is not None

    def check_length(self, context_length: int) -> None:
        """Raises ContextTooLongError for a prompt that leaves no room for a requested reply."""
        check_num_tokens(len(self.prompt.token_ids) - (not self.replies), context_length)

    @property
    def last_event(self) -> type[Finished | PromptRead]:
        """The type of its last event."""
        return Finished if self.replies else PromptRead

    def ends_with(self, event: Event) -> bool:
        """Whether an event is the request's last one."""
        return isinstance(event, self.last_event)


@dataclass(frozen=True)
class StepOutput:
    """One event of one request; an error is a request's last event."""

    request_id: str
    event: Event | Qwen35mmError


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError if parameters name an unknown token."""
    missing = [token_id for token_id in params.token_ids if token_id >= vocab_size]
    if missing:
        name = "stop_token_ids" if missing[0] in params.stop_token_ids else "logit_bias"
        raise RequestError(f"{name}: there is no token {missing[0]:,} here; ids are 0 to {vocab_size - 1:,}.")


def check_num_tokens(num_tokens: int, context_length: int, *, or_more: bool = False) -> None:
    """Raises ContextTooLongError if a prompt of `num_tokens` leaves no room for a reply.

    Args:
        or_more: whether counting stopped at `num_tokens`.
    """
    if num_tokens >= context_length and or_more:
        raise ContextTooLongError(
            say(
                "The conversation has {n} tokens or more and the context holds {context}, reply included. Start a new "
                "chat, send shorter texts, or raise the context length.",
                n=num_tokens,
                context=context_length,
            ),
            num_tokens,
            context_length,
        )
    if num_tokens >= context_length:
        raise ContextTooLongError(
            say(
                "The conversation has {n} tokens and the context holds {context}, reply included. Start a new chat, "
                "send fewer or smaller pictures and videos, or raise the context length.",
                n=num_tokens,
                context=context_length,
            ),
            num_tokens,
            context_length,
        )


def is_shortage(error: Exception) -> bool:
    """Whether an error says that there isn't enough memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY.search(str(error)) is not None


def engine_error(error: Exception, device: torch.device) -> EngineError:
    """Returns our own errors as they are; others without their message, which may contain private details."""
    if isinstance(error, EngineError):
        return error
    if is_shortage(error):
        message = shortage(error, device)
    elif isinstance(error, torch.AcceleratorError):
        # CUDA refuses everything after this.
        message = say(
            "The GPU has failed; this program can't use it until it is started again. The log has the details."
        )
    else:
        message = failed_on(error)
    return EngineError(message)


def damage(checkpoint: Path, quantization: Mapping[str, Any] | None) -> Said:
    """Explains why a model's values are NaN or infinite, and what to do. Reads all its files.

    Args:
        quantization: the configuration's section.
    """
    try:
        sources = read_checkpoint(checkpoint, quantization).values()
        # Other formats refuse such values on loading.
        damaged = list(not_finite(source.tensor for source in sources if isinstance(source, PlainSource)))
    except (CheckpointError, OSError):
        return say("Its checkpoint can't be read any more to see why. Download it again.")
    if damaged:
        return say(
            "Weights of {name} are damaged: {weights}. Download it again.",
            name=checkpoint.name,
            weights=some(damaged, 3),
        )
    return say("Its weights are finite, but this prompt overflows. Ask in other words.")


def failed_on(error: Exception) -> Said:
    """The message for errors whose details belong only in the log."""
    return say(
        "The model failed on this request ({error}); the log has the details. Try again.", error=type(error).__name__
    )
