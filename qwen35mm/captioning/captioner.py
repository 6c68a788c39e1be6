"""Captions one medium: asks a model, cleans its reply, and asks again if the reply isn't usable."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from qwen35mm.captioning.items import Failed, failure_kind
from qwen35mm.captioning.judge import BY_ANSWER, BY_CHANCE, judge, not_judged
from qwen35mm.captioning.media.workers import MediumForm, Prepared
from qwen35mm.captioning.records import Caption, Judged, medium_facts, medium_flags, one_line
from qwen35mm.captioning.requests import CaptionRequest, CaptionStyle, work_of
from qwen35mm.captioning.texts.cleanup import TRUNCATED, Around, Cleaned, clean, wrap
from qwen35mm.captioning.texts.refusals import REFUSAL, is_refusal
from qwen35mm.captioning.texts.trainers import SHORTENED, TOO_LONG, shorter_texts
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.contract import (
    Event,
    Finished,
    GenerationRequest,
    Image,
    Message,
    Result,
    Retain,
    SamplingParams,
    Text,
    Video,
)
from qwen35mm.errors import CaptioningError, Qwen35mmError, RequestError
from qwen35mm_preprocess import MediaBudget, MediaProcessor

if TYPE_CHECKING:
    from qwen35mm.backends.engine_pool import Member
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.backends.remote.backend import RemoteBackend
    from qwen35mm.backends.remote.pool import RemotePool

C = TypeVar("C", bound="Captioner")

_log = logging.getLogger(__name__)

# A second greedy reply would be the same.
_RETRY_TEMPERATURE = 0.7
# The most characters of a refusal that a message quotes.
_MAX_SAID = 200


@dataclass(frozen=True, kw_only=True)
class Captioner:
    """The model that writes captions.

    Attributes:
        name: the model's, for the records.
        identity: identifies the model, as JSON values.
        params: its default sampling.
        processor: reads its media.
        form: what its media are prepared as; None if a remote engine does that.
        is_demo: whether it is the bundled model.
        num_at_once: captions that keep it busy, including those whose media a remote engine is reading; None if
            unknown.
        engines: several engines and what each did; empty if there is one.
        others: what `describe` returns elsewhere for the same model. Captions from there count as this model's.
    """

    backend: LocalBackend | RemoteBackend | RemotePool
    name: str
    identity: Mapping[str, Any]
    params: SamplingParams
    processor: MediaProcessor
    form: MediumForm | None = "pixels"
    is_demo: bool = False
    num_at_once: int | None = None
    engines: Sequence[Member[Any]] = ()
    others: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def local(cls, backend: LocalBackend, memo: Path | None) -> Captioner:
        """The model of this process.

        Args:
            memo: see `weights_digest`.

        Raises:
            CheckpointError: its files can't be read.
        """
        loaded = backend.loaded
        identity: dict[str, Any] = {"weights": weights_digest(loaded.path, memo), "dtype": str(loaded.model.dtype)}
        if loaded.model.integers is not None:
            identity["integers"] = loaded.model.integers
        if loaded.adapters:
            identity["adapters"] = [each.digest for each in loaded.adapters]
        if backend.template_options:
            identity["template_options"] = dict(backend.template_options)
        return cls(
            backend=backend,
            name=loaded.name,
            identity=identity,
            params=loaded.generation,
            processor=backend.media,
            is_demo=backend.is_demo,
            num_at_once=backend.engine.plan.num_slots,
        )

    def describe(self) -> dict[str, Any]:
        """Identifies the model and how it reads media, as JSON values."""
        defaults = asdict(MediaBudget())
        budget = {name: value for name, value in asdict(self.processor.budget).items() if value != defaults[name]}
        return {"model": self.identity, "budget": budget}

    def on_any_device(self: C, asked: Collection[str]) -> C:
        """A copy that also accepts the captions of the same checkpoint on every other device.

        Only for a model of this process or of a cluster.

        Args:
            asked: the settings that a person chose, not the device: any of `dtype`, `weights`, `max_image_tokens` and
                `max_video_tokens`.
        """
        from qwen35mm.model.load import DTYPES
        from qwen35mm.model.weight_formats import AS_STORED, FP8, ROUNDED_FORMATS

        own = self.describe()
        model, budget = own["model"], own["budget"]
        dtypes = [model["dtype"]] if "dtype" in asked else map(str, DTYPES.values())
        formats = [model.get("integers")] if "weights" in asked else (None, *ROUNDED_FORMATS, AS_STORED, FP8)
        others: list[Mapping[str, Any]] = []
        for dtype, integers, device in product(dtypes, formats, ("cpu", "cuda")):
            sizes = vars(MediaBudget.for_device(device))
            chosen = {name: sizes[name] for name in ("max_image_tokens", "max_video_tokens") if name not in asked}
            there = {**model, "dtype": dtype, "integers": integers}
            if integers is None:
                del there["integers"]
            others.append({"model": there, "budget": {**budget, **chosen}})
        return replace(self, others=[other for other in others if other != own])

    async def caption(
        self, request: CaptionRequest, prepared: Prepared | None, known: Caption | None = None, *, judges: bool = False
    ) -> Caption | Failed:
        """The requested caption, or why there is none.

        Sampling depends on the seed and the medium's bytes, not on the order of items or on other items of the run.

        Args:
            prepared: the medium in this model's `form`; None if that is None.
            known: the caption, if it exists already.
            judges: whether to judge its sentences. If the engine fails at that, a new caption has no judgement, and a
                known caption is a failure.
        """
        assert prepared is not None
        # Then the next question about the medium hits the cache.
        retain = "prompt" if judges or request.is_followed else "shared"
        try:
            caption = known or await self._caption(request, prepared, retain)
        except Qwen35mmError as error:
            return Failed(failure_kind(error), str(error))
        if isinstance(caption, Failed) or not judges:
            return caption
        try:
            return replace(caption, judged=await self._judge(caption, request, prepared))
        except Qwen35mmError as error:
            kind = failure_kind(error)
            if kind == "engine" and known is not None:
                return Failed(kind, str(error))
            _log.warning("The caption of %s isn't judged: %s", one_line(request.item.name), error)
            return caption if kind == "engine" else not_judged(caption)

    async def _judge(self, caption: Caption, request: CaptionRequest, prepared: Prepared) -> tuple[Judged, ...]:
        params = BY_CHANCE
        try:
            if self.form != "pixels":
                cast("RemoteBackend | RemotePool", self.backend).check(
                    GenerationRequest(params=params, enable_thinking=False)
                )
        except RequestError:
            params = BY_ANSWER

        async def ask(question: str) -> Result:
            messages = _messages(request, prepared, question)
            asked = GenerationRequest(
                messages,
                params,
                enable_thinking=False,
                conversation=_conversation(request),
                retain="prompt",
                adapter=request.adapter,
            )
            return await _result(self.backend.stream(asked))

        return await judge(caption, request, ask)

    async def answer(self, request: CaptionRequest, facts: Caption) -> Caption | Failed:
        """The answer to a question of text alone, with the medium's facts and flags of `facts`."""
        messages = [Message("user", (Text(request.question),))]
        medium = {name: getattr(facts, name) for name in ("kind", "width", "height", "duration_s")}
        try:
            return await self._answer(request, messages, "shared", medium, facts.flags)
        except Qwen35mmError as error:
            return Failed(failure_kind(error), str(error))

    async def _caption(self, request: CaptionRequest, prepared: Prepared, retain: Retain) -> Caption | Failed:
        plan, messages = prepared.medium.plan, _messages(request, prepared, request.question)
        facts = {**medium_facts(request.item, plan), **prepared.measured}
        return await self._answer(request, messages, retain, facts, medium_flags(plan))

    async def _answer(
        self,
        request: CaptionRequest,
        messages: list[Message],
        retain: Retain,
        medium: Mapping[str, Any],
        flags: tuple[str, ...],
    ) -> Caption | Failed:
        """The first usable reply as a caption, or why there is none.

        Args:
            medium, flags: see `medium_facts` and `medium_flags`.
        """
        style = request.settings.style
        replies: list[_Reply] = []
        results: list[Result] = []
        for attempt in range(style.max_attempts):
            asked = GenerationRequest(
                messages,
                _attempt_params(request, attempt),
                enable_thinking=request.settings.thinking,
                conversation=_conversation(request),
                retain=retain,
                adapter=request.adapter,
            )
            results.append(await _result(self.backend.stream(asked)))
            replies.append(_read(results[-1], style, request.around))
            if not replies[-1].problems:
                break
        best = min(replies, key=lambda reply: (reply.unusable is not None, len(reply.problems)))
        if best.unusable is not None:
            return Failed(best.kind, best.unusable)
        return Caption(
            text=best.text,
            data=best.data,
            **medium,
            prompt=request.question,
            model=self.name,
            flags=(*flags, *best.flags, *best.problems),
            num_attempts=len(replies),
            num_prompt_tokens=sum(result.num_prompt_tokens for result in results),
            num_generated_tokens=sum(result.num_generated_tokens for result in results),
            seconds=sum(result.cache.prefill_s + result.cache.decode_s for result in results),
            prefill_s=results[0].ttft_s or 0.0,
        )


@dataclass(frozen=True)
class _Reply:
    """A reply as a caption.

    Attributes:
        problems: what another attempt might improve.
        unusable: why it can't be a caption; None if it can.
        kind: the failure's kind if it can't.
    """

    text: str = ""
    flags: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    data: Any = None
    unusable: str | None = None
    kind: str = "unmet"


def _messages(request: CaptionRequest, prepared: Prepared, question: str) -> list[Message]:
    """A question about a medium. The medium comes first."""
    part = Image(prepared.medium) if request.item.kind == "image" else Video(prepared.medium)
    messages = [Message("system", (Text(request.system),))] if request.system else []
    return [*messages, Message("user", (part, Text(question)))]


def _conversation(request: CaptionRequest) -> str:
    """The name that all questions about a medium share."""
    return work_of(request.item, request.content).hex()


def _attempt_params(request: CaptionRequest, attempt: int) -> SamplingParams:
    params = request.settings.params
    seed = hashlib.sha256(f"{params.seed or 0} {attempt} ".encode() + request.content).digest()
    params = params.with_overrides(seed=int.from_bytes(seed[:7], "big"))
    return params.with_overrides(temperature=_RETRY_TEMPERATURE, top_k=0) if attempt and params.greedy else params


async def _result(events: AsyncGenerator[Event, None]) -> Result:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finished):
                return event.result
    raise AssertionError("a stream ends with Finished or an error")


def _read(result: Result, style: CaptionStyle, around: Around) -> _Reply:
    if style.schema is not None:
        try:
            data = style.schema.parse(result.text)
        except CaptioningError as error:
            return _Reply(problems=("schema",), unusable=f"No reply satisfied the schema: {error}")
        return _Reply(result.text.strip(), problems=style.words.problems(result.text), data=data)
    finished = result.finish_reason == "stop"
    if style.cleans:
        cleaned = clean(result.text, finished=finished, keep_unfinished=style.keep_unfinished, one_line=style.one_line)
    else:
        cleaned = Cleaned(result.text.strip("\n"), () if finished else (TRUNCATED,))
    if not cleaned.text.strip():
        return _Reply(problems=("empty",), unusable="The model answered nothing. Try another prompt, or more tokens.")
    if is_refusal(cleaned.text):
        said = one_line(cleaned.text)[:_MAX_SAID]
        return _Reply(problems=(REFUSAL,), unusable=f"The model refused: {said} Try another prompt.", kind="refused")
    text, flags = wrap(cleaned.text, **around._asdict()), cleaned.flags
    if style.length is not None and not style.length.takes(text):
        shorter = (wrap(each, **around._asdict()) for each in shorter_texts(cleaned.text))
        fitting = next(filter(style.length.takes, shorter), None)
        text, flags = fitting or text, (*flags, SHORTENED if fitting else TOO_LONG)
    return _Reply(text, flags, style.words.problems(text))
