"""One way to get an answer, whatever computes it: `stream(messages, params)` gives events up to `Finished`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.engine import AsyncEngine, Engine, EngineSettings, Event, MediaPlanned, Progress, Request
from qwen35mm.model import LoadedModel, load
from qwen35mm.prompt import Image, Message, Video, build_prompt, iter_media
from qwen35mm.sampling import SamplingParams
from qwen35mm_preprocess import MediaBudget, MediaLimits, MediaProcessor, PreparedMedia


class LocalBackend:
    """Answers with a model in this process.

    Args:
        loaded: the model.
        budget: what media may cost; None takes the defaults of the model's device.
        limits: what media are refused; None takes the defaults.
        settings: the engine's.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        budget: MediaBudget | None = None,
        limits: MediaLimits | None = None,
        settings: EngineSettings | None = None,
    ) -> None:
        self.loaded = loaded
        self.media = MediaProcessor(
            loaded.image_processing,
            loaded.video_processing,
            budget=budget or default_budget(loaded.model.device),
            limits=limits or MediaLimits(),
            cache_bytes_per_token=loaded.config.kv_bytes_per_token(loaded.model.dtype),
        )
        engine = Engine(loaded, settings)
        self.context_length = engine.context_length
        self.engine = AsyncEngine(engine)

    @classmethod
    def load(
        cls, path_or_hub_id: str | Path, *, dtype: str = "auto", device: str = "auto", **options: Any
    ) -> LocalBackend:
        """Loads a checkpoint and starts its engine; `options` are the constructor's.

        Raises:
            CheckpointError, ConfigError: the checkpoint can't be used.
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
    ) -> AsyncIterator[Event]:
        """Answers the last message.

        Args:
            messages: the conversation; a medium with a pinned plan is read by that plan.
            params: None takes the checkpoint's defaults.
            enable_thinking: None takes the checkpoint's default; a `thinking_budget` of 0 turns it off.
            tools: definitions in OpenAI's form, rendered by the checkpoint's template.

        Yields:
            Progress, one MediaPlanned where there are media, TextDelta, and at last Finished. Leaving the
            iterator cancels the work within one step.

        Raises:
            MediaError, PromptError, RequestError, EngineError: with a message for a person.
        """
        arrival_s = time.monotonic()
        params = params or self.loaded.generation
        if enable_thinking is None:
            enable_thinking = self.loaded.template.default_enable_thinking
        if params.thinking_budget == 0:
            enable_thinking = False
        media: list[PreparedMedia] = []
        async for item in self._read_media(messages):
            if isinstance(item, PreparedMedia):
                media.append(item)
            else:
                yield item
        if media:
            warnings = tuple(warning for medium in media for warning in medium.warnings)
            yield MediaPlanned(tuple(medium.plan for medium in media), warnings)
        prompt = await asyncio.to_thread(
            build_prompt,
            messages,
            [medium.plan for medium in media],
            tokenizer=self.loaded.tokenizer,
            template=self.loaded.template,
            config=self.loaded.config,
            tools=tools,
            enable_thinking=enable_thinking,
        )
        request = Request(prompt, params, tuple(media), arrival_s)
        events = self.engine.stream(request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        """Ends the engine's thread; running streams end with an error."""
        self.engine.close()

    async def _read_media(self, messages: Sequence[Message]) -> AsyncIterator[Progress | PreparedMedia]:
        """Reads the media one after the other in a thread, with progress in between."""
        loop = asyncio.get_running_loop()
        abandoned = threading.Event()
        for part in iter_media(messages):
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

    def _prepare(self, part: Image | Video, report: Callable[[int, int], None]) -> PreparedMedia:
        kind = "image" if isinstance(part, Image) else "video"
        return self.media.prepare(part.source, plan=part.plan, kind=kind, progress=report)


def default_budget(device: torch.device) -> MediaBudget:
    """What media may cost where nothing else is asked for: more on a GPU, which encodes them in no time."""
    return MediaBudget.for_gpu() if device.type == "cuda" else MediaBudget.for_cpu()


class _AbandonedError(Exception):
    """Ends the reading of a medium whose request is gone."""
