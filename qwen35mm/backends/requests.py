"""From a conversation to what an engine is asked: media read, the prompt built, whose words they are.

The half of a backend that computes nothing. It knows no engine, so a process that must not hold one can use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.engine import (
    CachedPrompt,
    DeferredMedia,
    Event,
    MediaPlanned,
    Progress,
    Request,
    Retain,
    check_json_schema,
)
from qwen35mm.model import LoadedModel
from qwen35mm.prompt import (
    DEFAULT_MIN_SEGMENT,
    EncodedMedium,
    Image,
    Message,
    PromptBuilder,
    Text,
    Video,
    iter_media,
    pin_plans,
)
from qwen35mm.sampling import SamplingParams
from qwen35mm_preprocess import MediaBudget, MediaLimits, MediaPlan, MediaProcessor, MediaSourceError, PreparedMedia

Media = PreparedMedia | DeferredMedia


@dataclass(frozen=True)
class History:
    """The conversation that a reply will end, for the history commit behind it.

    Attributes:
        messages: with a plan for each medium, up to the question.
        before: the reply's beginning, where one that ended early is continued.
    """

    messages: tuple[Message, ...]
    before: Message | None
    thinking: bool
    tools: Sequence[dict[str, Any]] | None
    tenant: str | None

    def ended_by(self, text: str, reasoning: str) -> list[Message]:
        """The conversation with the whole reply."""
        if self.before is not None:
            text, reasoning = self.before.text + text, (self.before.reasoning or "") + reasoning
        return [*self.messages, Message("assistant", (Text(text),), reasoning=reasoning or None)]


@dataclass(frozen=True, eq=False)
class Asked:
    """A request, and the conversation that its reply will end."""

    request: Request
    history: History


class RequestMaker:
    """Makes requests for one loaded model.

    Args:
        loaded: the model.
        budget: what media may cost; None takes the defaults of the model's device.
        limits: what media are refused; None takes the defaults.
        min_segment: fewest tokens between two places where a conversation is gone on from.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        budget: MediaBudget | None = None,
        limits: MediaLimits | None = None,
        min_segment: int = DEFAULT_MIN_SEGMENT,
    ) -> None:
        self._loaded = loaded
        self._prompts = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config, min_segment=min_segment)
        self.media = MediaProcessor(
            loaded.image_processing,
            loaded.video_processing,
            budget=budget or default_budget(loaded.model.device),
            limits=limits or MediaLimits(),
            cache_bytes_per_token=loaded.config.kv_bytes_per_token(loaded.model.dtype),
        )

    def thinks(self, params: SamplingParams, enable_thinking: bool | None) -> bool:
        """Whether the model thinks first: as asked, else as its template does by itself."""
        if params.thinking_budget == 0:
            return False
        return self._loaded.template.default_enable_thinking if enable_thinking is None else enable_thinking

    def count_tokens(self, messages: Sequence[Message], *, enable_thinking: bool | None = None) -> int:
        """Tokens of the prompt that `make` builds; a medium without a plan is planned for it, and not decoded.

        Raises:
            MediaError, PromptError: the messages can't become a prompt.
        """
        plans = [self._plan_of(part) for part in iter_media(messages)]
        thinking = self.thinks(self._loaded.generation, enable_thinking)
        prompt = self._prompts.prompt(messages, plans, enable_thinking=thinking)
        return len(prompt.token_ids)

    async def make(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        thinking: bool,
        tools: Sequence[dict[str, Any]] | None = None,
        conversation: str | None = None,
        retain: Retain = "conversation",
        tenant: str | None = None,
        timeout_s: float | None = None,
        continue_reply: bool = False,
    ) -> AsyncGenerator[Progress | MediaPlanned | Asked, None]:
        """Reads what has to be read, then gives what is asked for as its last item; see `LocalBackend.stream`.

        Raises:
            MediaError, PromptError, RequestError: with a message for a person.
        """
        if params.json_schema is not None:
            check_json_schema(params.json_schema)
        arrival_s = time.monotonic()
        media: list[Media] = []
        async with contextlib.aclosing(self._read_media(messages)) as items:
            async for item in items:
                if isinstance(item, Progress):
                    yield item
                else:
                    media.append(item)
        plans = tuple(medium.plan for medium in media)
        if media:
            yield MediaPlanned(plans, tuple(w for m in media if isinstance(m, PreparedMedia) for w in m.warnings))
        prompt = await asyncio.to_thread(
            self._prompts.prompt,
            messages,
            plans,
            enable_thinking=thinking,
            tools=tools,
            continue_reply=continue_reply,
        )
        request = Request(
            prompt,
            tuple(media),
            retain,
            conversation,
            *_salt(tenant, prompt.system_stop),
            params=params,
            arrival_s=arrival_s,
            deadline_s=None if timeout_s is None else arrival_s + timeout_s,
        )
        pinned = pin_plans(messages, plans)
        before = pinned.pop() if continue_reply else None
        yield Asked(request, History(tuple(pinned), before, thinking, tools, tenant))

    def history(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool,
        tools: Sequence[dict[str, Any]] | None = None,
        conversation: str | None = None,
        tenant: str | None = None,
    ) -> CachedPrompt:
        """A conversation that ends with a reply, as its next turn will see it. Media without a plan are read.

        Raises:
            MediaError, PromptError: the messages can't become a prompt.
        """
        media = [self.find(part) or self.media_of(part) for part in iter_media(messages)]
        plans = [medium.plan for medium in media]
        prompt = self._prompts.history(messages, plans, enable_thinking=thinking, tools=tools)
        salt, salt_from = _salt(tenant, prompt.system_stop)
        return CachedPrompt(prompt, tuple(media), "conversation", conversation, salt, salt_from)

    def find(self, part: Image | Video) -> DeferredMedia | None:
        """The medium by its plan alone, if that is complete and this model's; its pixels may never be asked for."""
        plan = part.plan
        if plan is None or plan.digest is None:
            return None
        processing = self.media.image_processing if plan.kind == "image" else self.media.video_processing
        if plan.kind != part.kind or plan.processing != processing.fingerprint():
            return None  # `prepare` has the words for it
        return DeferredMedia(plan, functools.partial(self.media_of, part))

    def media_of(self, part: Image | Video, report: Callable[[int, int], None] | None = None) -> PreparedMedia:
        """Reads a medium; by its plan, where it has one.

        Raises:
            MediaError: it can't be read.
        """
        if isinstance(part.source, PreparedMedia):
            return part.source
        if isinstance(part.source, EncodedMedium):
            raise MediaSourceError("A medium that was encoded for a server can't be read here. Pass its file.")
        return self.media.prepare(part.source, plan=part.plan, kind=part.kind, progress=report)

    def _plan_of(self, part: Image | Video) -> MediaPlan:
        if part.plan is not None:
            return part.plan
        assert not isinstance(part.source, PreparedMedia | EncodedMedium), "they have their plans"
        return self.media.plan(part.source, kind=part.kind)

    async def _read_media(self, messages: Sequence[Message]) -> AsyncGenerator[Progress | Media, None]:
        """Reads the media that have no plan yet, one after the other in a thread, with progress in between."""
        loop = asyncio.get_running_loop()
        abandoned = threading.Event()
        for part in iter_media(messages):
            deferred = self.find(part)
            if deferred is not None:
                yield deferred
                continue
            updates: asyncio.Queue[Progress | None] = asyncio.Queue()

            def report(done: int, total: int, updates: asyncio.Queue[Progress | None] = updates) -> None:
                if abandoned.is_set():
                    raise _AbandonedError
                loop.call_soon_threadsafe(updates.put_nowait, Progress("read", done, total))

            reading = asyncio.ensure_future(asyncio.to_thread(self.media_of, part, report))
            reading.add_done_callback(lambda _, updates=updates: updates.put_nowait(None))
            try:
                while (update := await updates.get()) is not None:
                    yield update
                yield await reading
            finally:
                abandoned.set() if not reading.done() else None


class ModelBackend(ABC):
    """What every backend with a model in this process has, however it computes.

    Args:
        loaded: the model.
        budget, limits, min_segment: `RequestMaker`'s.
    """

    def __init__(
        self, loaded: LoadedModel, *, budget: MediaBudget | None, limits: MediaLimits | None, min_segment: int
    ) -> None:
        self.loaded = loaded
        self._requests = RequestMaker(loaded, budget=budget, limits=limits, min_segment=min_segment)
        self.media = self._requests.media

    @property
    def is_demo(self) -> bool:
        """Whether this is the bundled demo model, which every surface has to say."""
        return self.loaded.path == demo_model_path()

    async def stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        conversation: str | None = None,
        retain: Retain = "conversation",
        tenant: str | None = None,
        timeout_s: float | None = None,
        continue_reply: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """Answers the last message.

        Args:
            messages: the conversation; a medium with a pinned plan is read by that plan, and only if nothing is
                kept of it.
            params: None takes the checkpoint's defaults.
            enable_thinking: None takes the checkpoint's default; a `thinking_budget` of 0 turns it off.
            tools: definitions in OpenAI's form, rendered by the checkpoint's template.
            conversation: a name for it; a newer turn takes the place of an older one's unfinished history.
            retain: "conversation" keeps what the next turn, an edit or another answer will need, and computes the
                history with the reply in the background; "shared" keeps only beginnings that were asked for before;
                "nothing" keeps nothing.
            tenant: whose words and media these are: nothing of them is ever found for another tenant. The system
                message counts as everybody's.
            timeout_s: the most that this may take.
            continue_reply: the last message is a reply that ended early; what comes is the rest of its text.

        Yields:
            Progress, one MediaPlanned where there are media, TextDelta, and at last Finished. Leaving the
            iterator cancels the work within one step.

        Raises:
            MediaError, PromptError, RequestError, EngineError: with a message for a person.
        """
        params = params or self.loaded.generation
        asked: Asked | None = None
        making = self._requests.make(
            messages,
            params,
            thinking=self._requests.thinks(params, enable_thinking),
            tools=tools,
            conversation=conversation,
            retain=retain,
            tenant=tenant,
            timeout_s=timeout_s,
            continue_reply=continue_reply,
        )
        async with contextlib.aclosing(making) as items:
            async for item in items:
                if isinstance(item, Asked):
                    asked = item
                else:
                    yield item
        assert asked is not None, "what is asked for is the last item"
        answering = self._answer(asked.request, asked.history)
        # Its pixels are large, and the answer may take long.
        del asked, item
        async with contextlib.aclosing(answering) as events:
            async for event in events:
                yield event

    @abstractmethod
    def _answer(self, request: Request, history: History) -> AsyncGenerator[Event, None]:
        """The events of a request from here on; whoever leaves them ends the work."""

    def count_tokens(self, messages: Sequence[Message], *, enable_thinking: bool | None = None) -> int:
        """Tokens of the prompt that these messages become; media need no plan, and aren't decoded.

        Raises:
            MediaError, PromptError: the messages can't become a prompt.
        """
        return self._requests.count_tokens(messages, enable_thinking=enable_thinking)


def default_budget(device: torch.device) -> MediaBudget:
    """What media may cost where nothing else is asked for: more on a GPU, which encodes them in no time."""
    return MediaBudget.for_gpu() if device.type == "cuda" else MediaBudget.for_cpu()


def _salt(tenant: str | None, system_stop: int) -> tuple[bytes, int]:
    return (tenant or "").encode(), system_stop


class _AbandonedError(Exception):
    """Ends the reading of a medium whose request is gone."""
