"""LocalBackend: a model in this process."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen35mm.backends.history import ended_by
from qwen35mm.backends.local_texts import LocalTexts
from qwen35mm.backends.model_backend import ModelBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.checkpoints.lora_choices import Loras
from qwen35mm.contract import Event, Finished, GenerationRequest, SamplingParams, TextDelta
from qwen35mm.engine import AsyncEngine, Engine, EngineSettings, Request
from qwen35mm.errors import EngineError
from qwen35mm.folders import user_folder
from qwen35mm.model import load
from qwen35mm.model.weights import OnRead
from qwen35mm.model.weights_cache import WeightsCache
from qwen35mm.prompt import DEFAULT_MIN_SEGMENT
from qwen35mm.prompt.replies import is_cut
from qwen35mm_preprocess import MediaBudget, MediaLimits

logger = logging.getLogger(__name__)


class LocalBackend(ModelBackend, LocalTexts):
    """Answers with a model in this process, and commits histories while idle. See `ModelBackend`.

    The engine ends with `close()`, a `with` block, the last reference to the backend, or the program.
    """

    _refuses_when_full = True

    @property
    def default_params(self) -> SamplingParams:
        return self.loaded.generation

    @property
    def most_at_once(self) -> int:
        return self._most_at_once

    def _start(self, settings: EngineSettings, cache: CacheSettings) -> None:
        # While some requests are answered, the media of as many others are read.
        self._most_at_once = settings.slots + min(settings.slots, settings.max_waiting)
        self.engine = AsyncEngine(
            lambda reader, writer: Engine(
                self.loaded, settings, cache, reader=reader, writer=writer, budget=self.media.budget
            )
        )
        self.context_length = self.engine.context_length
        weakref.finalize(self, self.engine.begin_to_close)
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="qwen35mm-history")

    @classmethod
    def load(
        cls,
        path_or_hub_id: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        weights: str = "auto",
        rope_scaling: str | None = None,
        lora: Loras = None,
        budget: MediaBudget | None = None,
        limits: MediaLimits | None = None,
        settings: EngineSettings | None = None,
        cache: CacheSettings | str | Path | None = None,
        commit_history: bool = True,
        template_options: Mapping[str, Any] | None = None,
        min_segment: int = DEFAULT_MIN_SEGMENT,
        progress: OnRead | None = None,
    ) -> LocalBackend:
        """Loads a checkpoint as `load` does and starts its engine. From `budget` on, options are the constructor's.

        Args:
            progress: called with the bytes of weights that were read, and all of them.

        Raises:
            CheckpointError, ConfigError: the checkpoint or a setting can't be used.
        """
        cache = CacheSettings.of(cache)
        loaded = load(
            path_or_hub_id,
            dtype=dtype,
            device=device,
            weights=weights,
            weights_cache=weights_cache(cache),
            rope_scaling=rope_scaling,
            lora=lora,
            mtp=settings is not None and settings.wants_mtp,
            progress=progress,
        )
        return cls(
            loaded,
            budget=budget,
            limits=limits,
            settings=settings,
            cache=cache,
            commit_history=commit_history,
            template_options=template_options,
            min_segment=min_segment,
        )

    @property
    def has_ended(self) -> bool:
        """See `ModelBackend`."""
        return self.engine.has_ended

    def without_weights(self) -> LocalBackend:
        """A copy that makes and counts prompts but answers nothing, for the time after `close`."""
        shell = copy.copy(self)
        del shell.engine
        shell.loaded = replace(self.loaded, model=None)  # pyright: ignore[reportArgumentType]
        return shell

    async def _answer(
        self, work: Request, request: GenerationRequest | None, *, commits: bool = False
    ) -> AsyncGenerator[Event, None]:
        self.engine.check_process()
        events = self.engine.stream(work)
        del work
        texts: dict[str, list[str]] = {"answer": [], "reasoning": []}
        is_finished = False
        try:
            async with contextlib.aclosing(events):  # pyright: ignore[reportArgumentType]
                async for event in events:
                    if isinstance(event, TextDelta):
                        texts[event.channel].append(event.text)
                    elif isinstance(event, Finished):
                        is_finished = True
                        if commits and request is not None:
                            self._remember(request, texts, cut=is_cut(event.result))
                    yield event
        except (GeneratorExit, asyncio.CancelledError):
            if commits and request is not None and not is_finished:
                self._remember(request, texts, cut=True)
            raise

    def memory(self) -> dict[str, int]:
        """Bytes in the cache, and its budgets: `kv_bytes` and `kv_budget_bytes`, likewise for `states` and `vision`."""
        return self.engine.memory_use()

    def commit_history(self, request: GenerationRequest) -> None:
        """Computes a conversation in the background, so that its next turn starts at once.

        `stream` does this by itself. Use it for replies from elsewhere.

        Args:
            request: its messages end with a reply.

        Raises:
            MediaError, PromptError, ContextTooLongError: the messages can't become a prompt.
            EngineError: in a forked child.
        """
        self.engine.check_process()
        self.engine.commit(self.history(request))

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Blocks until requests, history commits and disk writes are done; False if the time was over first.

        Raises:
            EngineError: in a forked child.
        """
        self.engine.check_process()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with contextlib.suppress(RuntimeError):  # closed
            # The single thread runs this after all commits.
            if wait([self._committer.submit(lambda: None)], _left(deadline)).not_done:
                return False
        return self.engine.wait_idle(_left(deadline))

    def close(self) -> None:
        """Ends the engine's thread. Running streams end with an error, and pending cache entries go to disk.

        Does nothing in a forked child.
        """
        with contextlib.suppress(EngineError):
            self.engine.check_process()
            self._committer.shutdown(cancel_futures=True)
            self.engine.close()

    def _remember(self, request: GenerationRequest, texts: dict[str, list[str]], *, cut: bool) -> None:
        """Has the conversation's history computed with its new reply."""
        ended = ended_by(request, "".join(texts["answer"]), "".join(texts["reasoning"]), cut=cut)
        if ended is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._committer.submit(self._commit, ended)

    def _commit(self, request: GenerationRequest) -> None:
        try:
            self.engine.commit(self.history(request))
        except Exception:
            logger.exception("a conversation's history could not be kept for its next turn")


def weights_cache(cache: CacheSettings) -> WeightsCache | None:
    """Where quantised weights are kept: beside the disk cache, else in the user's cache folder, with the same limit."""
    folder = (cache.directory or user_folder("cache")) if cache.keep_weights and cache.reuse else None
    return None if folder is None else WeightsCache(folder, cache.disk_bytes)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0)
