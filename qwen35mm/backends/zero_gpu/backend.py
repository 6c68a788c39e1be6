"""The parent's side: reads media, asks for a GPU, and passes on the child's events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from qwen35mm.backends.model_backend import ModelBackend
from qwen35mm.backends.zero_gpu.call import Call, RunJob
from qwen35mm.backends.zero_gpu.child import Child, Failure, Job
from qwen35mm.backends.zero_gpu.duration import DurationModel
from qwen35mm.cache import CacheSettings, DiskStore
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.contract import Event, GenerationRequest, Progress
from qwen35mm.engine import EngineSettings, Request
from qwen35mm.errors import QueueFullError
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess.say import say

logger = logging.getLogger(__name__)

# How long closing waits for calls to stop.
CLOSE_S = 10.0


class ZeroGpuBackend(ModelBackend):
    """Answers with a model that has a GPU for one call at a time; otherwise like `LocalBackend`.

    The engine has one slot and no queue but ZeroGPU's; `settings.max_waiting` bounds the calls. Calls share only the
    cache's directory. Create it before launching the page, in the thread that loaded the model.

    Args:
        loaded: the model, placed where `spaces` expects it.
        gpu: `spaces.GPU`, or a substitute.
        max_duration_s: the most GPU seconds that one call asks for.
        options: `ModelBackend`'s.

    Raises:
        ConfigError: a setting can't be used.
    """

    idles = False

    def __init__(
        self, loaded: LoadedModel, gpu: Callable[..., Any], *, max_duration_s: int = 60, **options: Any
    ) -> None:
        self._gpu = gpu
        self._max_duration_s = max_duration_s
        super().__init__(loaded, **options)

    def _start(self, settings: EngineSettings, cache: CacheSettings) -> None:
        loaded = self.loaded
        self.context_length = settings.context_length_of(loaded.config.text)
        weights = list(loaded.model.parameters())
        self._durations = DurationModel(
            sum(weight.numel() for weight in weights), sum(weight.nbytes for weight in weights), self._max_duration_s
        )
        if cache.directory is not None and cache.reuse:
            # Would otherwise warn, or take long, in every child.
            DiskStore(cache.directory, max_bytes=cache.disk_bytes)
            weights_digest(loaded.path, cache.directory / "weights")
        child = Child(loaded, self, replace(settings, slots=1, max_waiting=1), cache)
        self._run: RunJob = self._gpu(duration=lambda job: job.duration_s)(child.run)
        self._max_calls = settings.max_waiting
        self._calls: set[Call] = set()

    async def _answer(
        self, work: Request, request: GenerationRequest | None, *, commits: bool = False
    ) -> AsyncGenerator[Event, None]:
        """After `Finished` the call continues until the conversation's history is on disk, or until a newer turn of the
        conversation ends it. Leaving the iterator stops the call within one step, without waiting for that step.

        Raises:
            RequestError: ZeroGPU refused; besides the errors of `stream`.
        """
        # Fails before a GPU is requested; the engine would raise the same error.
        work.check_length(self.context_length)
        duration_s = self._durations.estimate_s(len(work.prompt.token_ids), work.params.max_tokens)
        job = Job.make(work, request, duration_s, commits=commits)
        del work
        yield Progress("wait", 0, 0)
        await self._end_older(job.work.conversation)
        call = self._begin(job)
        try:
            async for item in call.items():
                if isinstance(item, Failure):
                    raise item.error()
                yield item
                if call.ends_with(item):
                    return
        finally:
            if not call.answered:
                call.stop()

    def memory(self) -> dict[str, int]:
        """Nothing: a call's memory ends with it."""
        return {}

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Blocks until no call is running, its history commit included; False if the time was over first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for call in list(self._calls):
            if not call.join(None if deadline is None else max(deadline - time.monotonic(), 0)):
                return False
        return True

    def close(self) -> None:
        """Stops the running calls; the computed part of their prompts is then on disk."""
        for call in list(self._calls):
            call.stop()
        if not self.wait_idle(CLOSE_S):
            logger.warning("a GPU call did not end in %.0f s and is left to itself", CLOSE_S)

    def _begin(self, job: Job) -> Call:
        num_unanswered = sum(not call.answered for call in self._calls)
        if num_unanswered >= self._max_calls:
            raise QueueFullError(
                say(
                    "{n} {n|request is|requests are} waiting already. Try again in a moment.",
                    n=num_unanswered,
                )
            )
        call = Call(self._run, job, self._calls.discard)
        self._calls.add(call)
        call.start()
        return call

    async def _end_older(self, conversation: str | None) -> None:
        """Ends the history commit of the conversation's last reply: this turn continues from its last cut."""
        older = [call for call in self._calls if conversation and call.conversation == conversation and call.answered]
        for call in older:
            call.stop()
        for call in older:
            await call.wait()
