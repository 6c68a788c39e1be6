"""Reads media and builds prompts, for backends with a model in this process.

This half of an answer computes nothing on the model. It has no engine, so a process that must not have one can use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.history import with_calls
from qwen35mm.backends.options import check_options
from qwen35mm.backends.plain import PlainPrompts
from qwen35mm.backends.stand_ins import check_stand_in
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import (
    EncodedMedium,
    Event,
    Finished,
    GenerationRequest,
    Image,
    MediaPlanned,
    Message,
    ModelInfo,
    Progress,
    SamplingParams,
    Video,
    iter_media,
    pin_plans,
)
from qwen35mm.contract.messages import check_conversation, with_stand_ins
from qwen35mm.contract.request import person_of
from qwen35mm.decoding import Decoders, DecodingProcessor, asked_by
from qwen35mm.engine import (
    CachedPrompt,
    DeferredMedia,
    EngineSettings,
    Request,
    check_num_tokens,
    check_token_ids,
    constrained_calls,
)
from qwen35mm.errors import ConfigError, RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.pools import MEDIA, PROMPTS, Asker
from qwen35mm.prompt import DEFAULT_MIN_SEGMENT, ChatTemplate, PromptBuilder
from qwen35mm_preprocess import (
    MediaBudget,
    MediaError,
    MediaLimits,
    MediaPlan,
    MediaProcessor,
    MediaSourceError,
    PreparedMedia,
)

logger = logging.getLogger(__name__)


class ModelBackend(PlainPrompts):
    """Answers with a model in this process.

    Args:
        loaded: the model.
        budget: the most that media may cost; None takes the defaults of the model's device.
        limits: which media are refused; None takes the defaults.
        settings: the engine's.
        cache: how much of finished requests is cached, and whether on disk; a folder caches there, None in memory.
        commit_history: whether a finished turn is computed as the next turn will see it.
        min_segment: fewest tokens between two cuts where a conversation can continue.
        template_options: values of the chat template's switches for requests that don't say them.
        decoders: processes for reading media; None reads them in this process.

    Raises:
        ConfigError: a setting can't be used.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        budget: MediaBudget | None = None,
        limits: MediaLimits | None = None,
        settings: EngineSettings | None = None,
        cache: CacheSettings | str | Path | None = None,
        commit_history: bool = True,
        min_segment: int = DEFAULT_MIN_SEGMENT,
        template_options: Mapping[str, Any] | None = None,
        decoders: Decoders | None = None,
    ) -> None:
        check_options(
            budget=(budget, MediaBudget),
            limits=(limits, MediaLimits),
            settings=(settings, EngineSettings),
            commit_history=(commit_history, bool),
            decoders=(decoders, Decoders),
        )
        cache = CacheSettings.of(cache)
        self.loaded = loaded
        template = loaded.template
        self.info = ModelInfo(
            loaded.name,
            loaded.generation,
            template.default_enable_thinking,
            weights=loaded.weights,
            thinking=template.switches_thinking,
            template_options={name: template.values_of(name) for name in sorted(template.switches)},
            adapters=tuple(loaded.named_adapters),
        )
        self.template_options = _checked_options(template_options, template)
        media = MediaProcessor(
            loaded.image_processing,
            loaded.video_processing,
            budget=budget or MediaBudget.for_device(loaded.model.device.type),
            limits=limits or MediaLimits(),
            cache_bytes_per_token=loaded.config.kv_bytes_per_token(loaded.model.dtype),
            blind=loaded.name if loaded.config.tower is None else None,
        )
        self.media = media if decoders is None else DecodingProcessor.of(media, decoders)
        self._prompts = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config, min_segment=min_segment)
        self._commits_history = commit_history
        self._start(settings or EngineSettings(), replace(cache, min_segment=min_segment))

    @abstractmethod
    def _start(self, settings: EngineSettings, cache: CacheSettings) -> None:
        """Prepares for requests."""

    # Whether requests that nobody waits for may run while idle. Not where each request costs money.
    idles = True

    @property
    def has_ended(self) -> bool:
        """Whether it was closed, or failed: then it answers nothing any more."""
        return False

    @property
    def is_demo(self) -> bool:
        """Whether this is the bundled demo model, which every surface must say."""
        return self.loaded.path == demo_model_path()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Answers the last message. The checkpoint's template renders the tools.

        Args:
            request: `retain` "conversation" keeps what the next turn, an edit or another answer needs, and computes the
                history with the reply in the background. "memory" does the same without writing to disk. "prompt" keeps
                the prompt in memory, for other questions about the same media. "shared" keeps only prefixes that were
                requested before, "nothing" keeps nothing. All tenants share the system message.

        Yields:
            Progress, one MediaPlanned if there are media, Prefilled, TextDelta, and finally Finished. Leaving the
            iterator cancels the work within one step.

        Raises:
            MediaError, PromptError, RequestError, EngineError: with a message for a person.
        """
        arrival_s = time.monotonic()
        check_conversation(request.messages)
        self.loaded.adapter_number(request.adapter)
        request = self._with_options(request)
        params = request.params or self.loaded.generation
        check_token_ids(params, self.loaded.config.text.vocab_size)
        person = person_of(request.tenant)
        calls = await constrained_calls(request, params, self.loaded, person=person)
        found: list[PreparedMedia | DeferredMedia | None] = []
        async with contextlib.aclosing(self._read_media(request.messages, found, person)) as updates:
            async for progress in updates:
                yield progress
        told = tuple(None if medium is None else medium.plan for medium in found)
        if found:
            yield MediaPlanned(told, tuple(w for m in found if isinstance(m, PreparedMedia) for w in m.warnings))
        messages = with_stand_ins(request.messages, told)
        media = [medium for medium in found if medium is not None]
        plans = [medium.plan for medium in media]
        del found
        # The history commit needs the request with its plans and the decision about thinking.
        request = replace(
            request,
            messages=pin_plans(messages, plans),
            enable_thinking=self._thinks(params, request.enable_thinking),
        )
        tools = request.shown_tools
        prompt = await PROMPTS.run_for(
            person,
            self._prompt,
            request.messages,
            plans,
            enable_thinking=request.enable_thinking,
            template_options=request.template_options,
            tools=tools or None,
            continue_reply=request.continue_reply,
        )
        work = Request(
            prompt,
            tuple(media),
            request.retain,
            request.conversation,
            salt=_salt(request.tenant),
            salt_from=prompt.system_stop,
            adapter=request.adapter,
            params=params,
            arrival_s=arrival_s,
            deadline_s=None if request.timeout_s is None else arrival_s + request.timeout_s,
            calls=None if calls is None else calls.lark,
        )
        commits = request.retain == "conversation" or (request.retain == "memory" and self.idles)
        answering = self._answer(work, request, commits=commits and self._commits_history)
        # Their pixels are large, and the answer may take long.
        del work, media
        async with contextlib.aclosing(answering) as events:
            async for event in events:
                yield with_calls(event, tools) if tools and isinstance(event, Finished) else event

    def count_tokens(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Tokens of the prompt that these messages become. Arguments and errors as `prompt_ids`."""
        how: dict[str, Any] = {"enable_thinking": enable_thinking, "template_options": template_options}
        return len(self.prompt_ids(messages, tools=tools, **how))

    def prompt_ids(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_reply: bool = False,
    ) -> np.ndarray:
        """Token ids, int64 `[T]`, of the prompt that these messages become. Media need no plan and aren't decoded, so
        damage behind a file's head isn't noticed.

        Raises:
            MediaError, PromptError: the messages can't become a prompt.
            ContextTooLongError: they exceed two contexts; the count stops there.
        """
        check_conversation(messages)
        found = [self._plan_of(part) for part in iter_media(messages)]
        messages = with_stand_ins(messages, found)
        plans = [plan for plan in found if plan is not None]
        asked = GenerationRequest(enable_thinking=enable_thinking, template_options=template_options or {})
        asked = self._with_options(asked)
        how = {
            "enable_thinking": self._thinks(self.loaded.generation, asked.enable_thinking),
            "template_options": asked.template_options,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_reply": continue_reply,
        }
        return self._prompt(messages, plans, **how).token_ids

    def history(self, request: GenerationRequest) -> CachedPrompt:
        """A conversation that ends with a reply, as its next turn will see it. Reads media without a plan.

        Raises:
            MediaError, PromptError: the messages can't become a prompt.
            ContextTooLongError: they exceed two contexts; the count stops there.
        """
        check_conversation(request.messages)
        request = self._with_options(request)
        media = [self.find(part) or self.media_of(part) for part in iter_media(request.messages)]
        with self._counting():
            prompt = self._prompts.history(
                request.messages,
                [medium.plan for medium in media],
                enable_thinking=self._thinks(request.params or self.loaded.generation, request.enable_thinking),
                template_options=request.template_options,
                tools=request.shown_tools or None,
                most_tokens=self._most_tokens,
            )
        return CachedPrompt(
            prompt,
            tuple(media),
            request.retain,
            conversation=request.conversation,
            salt=_salt(request.tenant),
            salt_from=prompt.system_stop,
            adapter=request.adapter,
        )

    def find(self, part: Image | Video) -> DeferredMedia | None:
        """The medium by its plan alone, if that is complete and this model's; reads pixels only on demand."""
        plan = part.plan
        if plan is None or plan.digest is None:
            return None
        processing = self.media.image_processing if plan.kind == "image" else self.media.video_processing
        if plan.kind != part.kind or plan.processing != processing.fingerprint():
            return None  # `prepare` raises the error
        if not isinstance(part.source, PreparedMedia | EncodedMedium):
            self.media.check(plan, part.source)
        num_bytes = len(part.source) if isinstance(part.source, str | bytes) else 0
        return DeferredMedia(plan, functools.partial(self.media_of, part), num_bytes)

    def media_of(
        self, part: Image | Video, report: Callable[[int, int], None] | None = None, asker: Asker | None = None
    ) -> PreparedMedia:
        """Reads a medium, by its plan if it has one. Reading in another process ends when the asker leaves.

        Raises:
            MediaError: it can't be read.
        """
        if isinstance(part.source, PreparedMedia):
            return part.source
        if isinstance(part.source, EncodedMedium):
            raise MediaSourceError("A medium that was encoded for a server can't be read here. Pass its file.")
        plan = self.media.kept(part.plan, part.source)
        media = asked_by(part.planner(self.media), asker)
        return media.prepare(part.source, plan=plan, kind=part.kind, progress=report, clip=part.clip)

    def _thinks(self, params: SamplingParams, enable_thinking: bool | None) -> bool:
        """Whether the model thinks first: as requested, else the template's default."""
        if params.thinking_budget == 0 and self.loaded.template.switches_thinking:
            return False
        return self.loaded.template.default_enable_thinking if enable_thinking is None else enable_thinking

    def _with_options(self, request: GenerationRequest) -> GenerationRequest:
        """The request with this backend's template options beneath its own."""
        if not self.template_options:
            return request
        return replace(request, template_options={**self.template_options, **request.template_options})

    def _plan_of(self, part: Image | Video) -> MediaPlan | None:
        """None if the medium's stand-in takes its place."""
        if isinstance(part.source, PreparedMedia | EncodedMedium):
            assert part.plan is not None
            return part.plan
        try:
            plan = self.media.kept(part.plan, part.source)
            if plan is None:
                return part.planner(self.media).plan(part.source, kind=part.kind, clip=part.clip)
            self.media.check(plan, part.source)
        except MediaError as error:
            check_stand_in(part, error)
            return None
        return plan

    async def _read_media(
        self, messages: Sequence[Message], media: list[PreparedMedia | DeferredMedia | None], person: str | None
    ) -> AsyncGenerator[Progress, None]:
        """Appends the messages' media, None for one whose stand-in takes its place. Reads those without a plan one
        after the other in a thread.

        Raises:
            ContextTooLongError: the media alone exceed the context; reading stops there.
        """
        loop = asyncio.get_running_loop()
        asker, abandoned = Asker(), threading.Event()
        num_tokens = sum(part.plan.num_tokens for part in iter_media(messages) if part.plan is not None)
        for part in iter_media(messages):
            # The pixels of all media are in memory at the same time.
            check_num_tokens(num_tokens, self.context_length)
            deferred = self.find(part)
            if deferred is not None:
                media.append(deferred)
                continue
            updates: asyncio.Queue[Progress | None] = asyncio.Queue()

            def report(done: int, total: int, updates: asyncio.Queue[Progress | None] = updates) -> None:
                if abandoned.is_set():
                    raise _AbandonedError
                loop.call_soon_threadsafe(updates.put_nowait, Progress("read", done, total))

            def end(done: asyncio.Future[PreparedMedia], updates: asyncio.Queue[Progress | None] = updates) -> None:
                updates.put_nowait(None)
                # Retrieves the exception: otherwise asyncio logs it as lost when nobody waits any more.
                if not done.cancelled():
                    done.exception()

            reading = asyncio.ensure_future(MEDIA.run_for(person, self.media_of, part, report, asker))
            reading.add_done_callback(end)
            try:
                while (update := await updates.get()) is not None:
                    yield update
                medium = await reading
                media.append(medium)
                num_tokens += 0 if part.plan is not None else medium.plan.num_tokens
            except MediaError as error:
                check_stand_in(part, error)
                media.append(None)
            finally:
                if not reading.done():
                    abandoned.set()
                    asker.leave()


def _checked_options(options: Mapping[str, Any] | None, template: ChatTemplate) -> dict[str, Any]:
    """Warns of names that the template doesn't read: another model may be loaded with the same options."""
    given = dict(options or {})
    try:
        GenerationRequest(template_options=given)
    except RequestError as error:
        raise ConfigError(str(error)) from None
    if unread := sorted(given.keys() - template.switches - {"enable_thinking"}):
        known = ", ".join(sorted(template.switches)) or "no others"
        logger.warning("The chat template doesn't read the option %s; it reads %s.", ", ".join(unread), known)
    return given


def _salt(tenant: str | None) -> bytes:
    return (tenant or "").encode()


class _AbandonedError(Exception):
    """Stops reading a medium whose request is gone."""
