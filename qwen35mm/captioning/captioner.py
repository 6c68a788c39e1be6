"""One medium to one caption: asks a backend, cleans what it says, and asks again where that isn't what was wanted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from qwen35mm.captioning.items import Item, failure_kind
from qwen35mm.captioning.records import Caption
from qwen35mm.captioning.texts.cleanup import clean, wrap
from qwen35mm.captioning.texts.json_schema import JsonSchema
from qwen35mm.captioning.texts.words import Words
from qwen35mm.engine import Finished, Result
from qwen35mm.errors import CaptioningError, ContextTooLongError, EngineError, RefusedError, RequestError
from qwen35mm.prompt import EncodedMedium, Image, Message, Text, Video
from qwen35mm.sampling import SamplingParams
from qwen35mm_preprocess import MediaError, MediaPlan, MediaSource, PreparedMedia

# A greedy reply would only repeat itself.
_RETRY_TEMPERATURE = 0.7


class CaptionBackend(Protocol):
    """What captions are asked of: `LocalBackend` or `RemoteBackend`."""

    def stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool | None = None,
        retain: Any = "shared",
    ) -> Any:
        """The events of a reply; see `LocalBackend.stream`."""
        ...


class UnmetError(CaptioningError):
    """No reply was of the form that was asked for."""


class FailedError(CaptioningError):
    """An item failed in another process, which says how; `kind` as in `failures.jsonl`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class CaptionStyle:
    """What a caption has to be, whatever the medium.

    Attributes:
        schema: the JSON schema that every caption satisfies; None for text.
        words: required and forbidden ones.
        max_attempts: replies until the last one is taken with a flag.
        prefix, suffix, trigger: see `wrap`.
        keep_unfinished: whether a last sentence that was cut off by the limit stays.
        one_line: whether line ends become spaces.
    """

    schema: JsonSchema | None = None
    words: Words = field(default_factory=Words)
    max_attempts: int = 3
    prefix: str = ""
    suffix: str = ""
    trigger: str = ""
    keep_unfinished: bool = False
    one_line: bool = False

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise CaptioningError(f"A caption needs at least one attempt; got {self.max_attempts}.")
        if self.schema is not None and (self.prefix or self.suffix or self.trigger):
            raise CaptioningError("A JSON caption takes no prefix, suffix or trigger word: they would break it.")

    def describe(self) -> dict[str, Any]:
        """Everything that decides the caption, as JSON values."""
        values = {name: value for name, value in vars(self).items() if name not in ("schema", "words")}
        return {
            **values,
            "schema": None if self.schema is None else self.schema.text,
            "words": [self.words.required, self.words.forbidden],
        }


class Captioner:
    """Asks for captions.

    Args:
        backend: answers.
        name: the model's name, for the records.
        params: how replies are sampled; its seed, 0 without one, is mixed with the medium's digest.
        enable_thinking: None takes the checkpoint's default.
    """

    def __init__(
        self,
        backend: CaptionBackend,
        name: str,
        params: SamplingParams,
        style: CaptionStyle,
        *,
        enable_thinking: bool | None = None,
    ) -> None:
        self._backend = backend
        self._name = name
        self._params = params.with_overrides(json_schema=None if style.schema is None else style.schema.text)
        self._style = style
        self._thinking = enable_thinking

    def describe(self) -> dict[str, Any]:
        """Everything that decides a caption besides model, medium and prompt, as JSON values."""
        return {"params": asdict(self._params), "thinking": self._thinking, "style": self._style.describe()}

    async def caption(
        self,
        item: Item,
        medium: MediaSource | PreparedMedia | EncodedMedium,
        plan: MediaPlan,
        content: bytes,
        question: str,
        system: str = "",
    ) -> Caption:
        """The caption of a medium.

        Args:
            medium: as `Image` and `Video` take it.
            plan: for the caption's facts.
            content: the digest of its bytes; with the seed it decides what is sampled, so that neither the order of
                the items nor what else is in the run does.

        Raises:
            UnmetError: no reply said anything, or met the schema.
            Qwen35mmError, MediaError: as `stream`.
        """
        part = Image(medium) if item.kind == "image" else Video(medium)  # pyright: ignore[reportArgumentType]
        messages = [Message("system", (Text(system),))] if system else []
        messages.append(Message("user", (part, Text(question))))
        replies: list[_Reply] = []
        results: list[Result] = []
        for attempt in range(self._style.max_attempts):
            results.append(await self._ask(messages, self._attempt_params(content, attempt)))
            replies.append(self._read(results[-1]))
            if not replies[-1].problems:
                break
        best = min(replies, key=lambda reply: (reply.unusable is not None, len(reply.problems)))
        if best.unusable is not None:
            raise UnmetError(best.unusable)
        height, width = plan.source_size
        return Caption(
            text=best.text,
            data=best.data,
            kind=item.kind,
            width=width,
            height=height,
            duration_s=plan.duration_s,
            prompt=question,
            model=self._name,
            flags=(*best.flags, *best.problems),
            num_attempts=len(replies),
            num_prompt_tokens=sum(result.num_prompt_tokens for result in results),
            num_generated_tokens=sum(result.num_generated_tokens for result in results),
            seconds=sum(result.cache.prefill_s + result.cache.decode_s for result in results),
        )

    async def _ask(self, messages: Sequence[Message], params: SamplingParams) -> Result:
        events = self._backend.stream(messages, params, enable_thinking=self._thinking, retain="shared")
        async with aclosing(events) as items:
            async for event in items:
                if isinstance(event, Finished):
                    return event.result
        raise AssertionError("a stream ends with Finished or an error")

    def _attempt_params(self, content: bytes, attempt: int) -> SamplingParams:
        seed = hashlib.sha256(f"{self._params.seed or 0} {attempt} ".encode() + content).digest()
        params = self._params.with_overrides(seed=int.from_bytes(seed[:7], "big"))
        return params.with_overrides(temperature=_RETRY_TEMPERATURE, top_k=0) if attempt and params.greedy else params

    def _read(self, result: Result) -> _Reply:
        style = self._style
        if style.schema is not None:
            try:
                data = style.schema.parse(result.text)
            except CaptioningError as error:
                return _Reply(problems=("schema",), unusable=f"No reply satisfied the schema: {error}")
            return _Reply(result.text.strip(), problems=style.words.problems(result.text), data=data)
        cleaned = clean(
            result.text,
            finished=result.finish_reason == "stop",
            keep_unfinished=style.keep_unfinished,
            one_line=style.one_line,
        )
        if not cleaned.text:
            return _Reply(
                problems=("empty",), unusable="The model answered nothing. Try another prompt, or more tokens."
            )
        text = wrap(cleaned.text, prefix=style.prefix, suffix=style.suffix, trigger=style.trigger)
        return _Reply(text, cleaned.flags, style.words.problems(text))


def caption_failure_kind(error: Exception) -> str:
    """How `failures.jsonl` calls why there is no caption."""
    if isinstance(error, FailedError):
        return error.kind
    if isinstance(error, MediaError):
        return failure_kind(error)
    if isinstance(error, UnmetError):
        return "unmet"
    if isinstance(error, ContextTooLongError):
        return "too long"
    if isinstance(error, RefusedError):
        return "refused"
    return "engine" if isinstance(error, EngineError | RequestError) else "prompt"


@dataclass(frozen=True)
class _Reply:
    """A reply as a caption.

    Attributes:
        problems: what another attempt might do better.
        unusable: why it can't be a caption at all; None if it can.
    """

    text: str = ""
    flags: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    data: Any = None
    unusable: str | None = None
