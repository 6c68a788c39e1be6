"""One way to get an answer, whatever computes it: `stream(messages, params)` gives events up to `Finished`."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CacheSettings
from qwen35mm.engine import (
    AsyncEngine,
    CachedPrompt,
    DeferredMedia,
    Engine,
    EngineSettings,
    Event,
    Finished,
    MediaPlanned,
    Progress,
    Request,
    Retain,
    TextDelta,
)
from qwen35mm.model import LoadedModel, load
from qwen35mm.prompt import (
    DEFAULT_MIN_SEGMENT,
    Image,
    Message,
    Text,
    Video,
    build_history,
    build_prompt,
    iter_media,
    pin_plans,
)
from qwen35mm.sampling import SamplingParams
from qwen35mm_preprocess import MediaBudget, MediaLimits, MediaProcessor, PreparedMedia

logger = logging.getLogger(__name__)

Media = PreparedMedia | DeferredMedia


class LocalBackend:
    """Answers with a model in this process.

    Args:
        loaded: the model.
        budget: what media may cost; None takes the defaults of the model's device.
        limits: what media are refused; None takes the defaults.
        settings: the engine's.
        cache: how much is kept of finished requests, and whether on disk too; None keeps it in memory.
        commit_history: whether a finished turn of a conversation is computed as its next turn will see it, while
            nothing else is to do.
        min_segment: fewest tokens between two places where a conversation is gone on from.

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
        cache: CacheSettings | None = None,
        commit_history: bool = True,
        min_segment: int = DEFAULT_MIN_SEGMENT,
    ) -> None:
        self.loaded = loaded
        self.media = MediaProcessor(
            loaded.image_processing,
            loaded.video_processing,
            budget=budget or default_budget(loaded.model.device),
            limits=limits or MediaLimits(),
            cache_bytes_per_token=loaded.config.kv_bytes_per_token(loaded.model.dtype),
        )
        self.engine = AsyncEngine(lambda background: Engine(loaded, settings, cache, background=background))
        self.context_length = self.engine.context_length
        self._commit_history = commit_history
        self._min_segment = min_segment
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="qwen35mm-history")
        self._commits: set[Future[None]] = set()

    @classmethod
    def load(
        cls, path_or_hub_id: str | Path, *, dtype: str = "auto", device: str = "auto", **options: Any
    ) -> LocalBackend:
        """Loads a checkpoint and starts its engine; `options` are the constructor's.

        Raises:
            CheckpointError, ConfigError: the checkpoint or a setting can't be used.
        """
        return cls(load(path_or_hub_id, dtype=dtype, device=device), **options)

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
    ) -> AsyncIterator[Event]:
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

        Yields:
            Progress, one MediaPlanned where there are media, TextDelta, and at last Finished. Leaving the
            iterator cancels the work within one step.

        Raises:
            MediaError, PromptError, RequestError, EngineError: with a message for a person.
        """
        arrival_s = time.monotonic()
        params = params or self.loaded.generation
        thinking = self._thinks(params, enable_thinking)
        media: list[Media] = []
        async for item in self._read_media(messages):
            if isinstance(item, Progress):
                yield item
            else:
                media.append(item)
        plans = tuple(medium.plan for medium in media)
        if media:
            yield MediaPlanned(plans, tuple(w for m in media if isinstance(m, PreparedMedia) for w in m.warnings))
        prompt = await asyncio.to_thread(
            build_prompt, messages, plans, enable_thinking=thinking, tools=tools, **self._prompt_options
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
        del media
        remember = functools.partial(
            self._remember, pin_plans(messages, plans), conversation, thinking, tools, tenant, retain
        )
        events = self.engine.stream(request)
        answer: list[str] = []
        reasoning: list[str] = []
        stopped = True
        try:
            async for event in events:
                if isinstance(event, TextDelta):
                    (reasoning if event.channel == "reasoning" else answer).append(event.text)
                elif isinstance(event, Finished):
                    stopped = False
                    remember(event.result.text, event.result.reasoning or None)
                yield event
        except Exception:
            stopped = False
            raise
        finally:
            await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]
            if stopped:
                remember("".join(answer), "".join(reasoning) or None)

    def commit_history(
        self,
        messages: Sequence[Message],
        *,
        conversation: str | None = None,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        tenant: str | None = None,
    ) -> None:
        """Computes a conversation that ends with a reply, in the background, so that its next turn begins at once.

        `stream` does this by itself; it is for replies that came from elsewhere. Arguments are `stream`'s.

        Raises:
            MediaError, PromptError: the messages can't become a prompt.
        """
        thinking = self._thinks(self.loaded.generation, enable_thinking)
        media = [self._find_media(part) or self._prepare(part, None) for part in iter_media(messages)]
        plans = [medium.plan for medium in media]
        prompt = build_history(messages, plans, enable_thinking=thinking, tools=tools, **self._prompt_options)
        salt, salt_from = _salt(tenant, prompt.system_stop)
        self.engine.commit(CachedPrompt(prompt, tuple(media), "conversation", conversation, salt, salt_from))

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Blocks until no request, no history commit and no writing is left; False where the time was over first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._commits:
            if wait(list(self._commits), _left(deadline)).not_done:
                return False
        return self.engine.wait_idle(_left(deadline))

    def close(self) -> None:
        """Ends the engine's thread; running streams end with an error, and the disk gets what it lacks."""
        self._committer.shutdown(cancel_futures=True)
        self.engine.close()

    @property
    def _prompt_options(self) -> dict[str, Any]:
        loaded = self.loaded
        return {
            "tokenizer": loaded.tokenizer,
            "template": loaded.template,
            "config": loaded.config,
            "min_segment": self._min_segment,
        }

    def _thinks(self, params: SamplingParams, enable_thinking: bool | None) -> bool:
        if params.thinking_budget == 0:
            return False
        return self.loaded.template.default_enable_thinking if enable_thinking is None else enable_thinking

    def _remember(
        self,
        messages: Sequence[Message],
        conversation: str | None,
        enable_thinking: bool,
        tools: Sequence[dict[str, Any]] | None,
        tenant: str | None,
        retain: Retain,
        text: str,
        reasoning: str | None,
    ) -> None:
        """Has a conversation's history computed with its new reply; the messages' media have their plans."""
        if not self._commit_history or retain != "conversation" or not text:
            return
        history = [*messages, Message("assistant", (Text(text),), reasoning=reasoning)]

        def commit() -> None:
            try:
                self.commit_history(
                    history, conversation=conversation, enable_thinking=enable_thinking, tools=tools, tenant=tenant
                )
            except Exception:
                logger.exception("a conversation's history could not be kept for its next turn")

        try:
            future = self._committer.submit(commit)
        except RuntimeError:
            return  # closed meanwhile
        self._commits.add(future)
        future.add_done_callback(self._commits.discard)

    async def _read_media(self, messages: Sequence[Message]) -> AsyncIterator[Progress | Media]:
        """Reads the media that have no plan yet, one after the other in a thread, with progress in between."""
        loop = asyncio.get_running_loop()
        abandoned = threading.Event()
        for part in iter_media(messages):
            deferred = self._find_media(part)
            if deferred is not None:
                yield deferred
                continue
            updates: asyncio.Queue[Progress | None] = asyncio.Queue()

            def report(done: int, total: int, updates: asyncio.Queue[Progress | None] = updates) -> None:
                if abandoned.is_set():
                    raise _AbandonedError
                loop.call_soon_threadsafe(updates.put_nowait, Progress("read", done, total))

            reading = asyncio.ensure_future(asyncio.to_thread(self._prepare, part, report))
            reading.add_done_callback(lambda _, updates=updates: updates.put_nowait(None))
            try:
                while (update := await updates.get()) is not None:
                    yield update
                yield await reading
            finally:
                abandoned.set() if not reading.done() else None

    def _find_media(self, part: Image | Video) -> DeferredMedia | None:
        """The medium by its plan alone, if that is complete and this model's; its pixels may never be asked for."""
        plan = part.plan
        if plan is None or plan.digest is None:
            return None
        processing = self.media.image_processing if plan.kind == "image" else self.media.video_processing
        kind = "image" if isinstance(part, Image) else "video"
        if plan.kind != kind or plan.processing != processing.fingerprint():
            return None  # `prepare` has the words for it
        return DeferredMedia(plan, functools.partial(self._prepare, part, None))

    def _prepare(self, part: Image | Video, report: Callable[[int, int], None] | None) -> PreparedMedia:
        kind = "image" if isinstance(part, Image) else "video"
        return self.media.prepare(part.source, plan=part.plan, kind=kind, progress=report)


def default_budget(device: torch.device) -> MediaBudget:
    """What media may cost where nothing else is asked for: more on a GPU, which encodes them in no time."""
    return MediaBudget.for_gpu() if device.type == "cuda" else MediaBudget.for_cpu()


def _salt(tenant: str | None, system_stop: int) -> tuple[bytes, int]:
    return (tenant or "").encode(), system_stop


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0)


class _AbandonedError(Exception):
    """Ends the reading of a medium whose request is gone."""
