"""Asks a model for another caption. The model is loaded on first use and stays loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from qwen35mm.captioning.items import Failed, Unreadable
from qwen35mm.captioning.media.workers import MediaWorkers
from qwen35mm.captioning.sources.candidates import Candidate, probe
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.errors import CaptioningError

if TYPE_CHECKING:
    from qwen35mm.captioning.captioner import Captioner
    from qwen35mm.captioning.job import Job
    from qwen35mm.captioning.records import Caption

T = TypeVar("T")


@dataclass(frozen=True)
class _Opened:
    job: Job
    captioner: Captioner
    workers: MediaWorkers


class Asker:
    """Asks the model for captions. Use it in one event loop.

    Args:
        open_job: makes the job with a person's sampling and style; called when the model is loaded: its imports are
            slow.
        open_captioner: loads the model, or connects to a server.
    """

    def __init__(
        self, open_job: Callable[[], Job], open_captioner: Callable[[Job], AbstractAsyncContextManager[Captioner]]
    ) -> None:
        self._open_job = open_job
        self._open_captioner = open_captioner
        self._stack = AsyncExitStack()
        self._opening: asyncio.Task[_Opened] | None = None
        self._num_asked = 0

    async def ask(self, name: str, path: Path, question: Question, text: str) -> Caption:
        """A new caption, which isn't stored. Each call samples anew.

        Args:
            text: the present caption, for `{sidecar}`.

        Raises:
            Qwen35mmError: the model can't be loaded, the prompt can't be used, or there is no caption.
        """
        opened = await self._open()
        from qwen35mm.captioning.requests import RequestBuilder

        self._num_asked += 1
        prompts = PromptSet([question], system=opened.job.prompts.system)
        seed = opened.job.sampling.get("seed", 0) + self._num_asked
        job = replace(opened.job, prompts=prompts, sampling={**opened.job.sampling, "seed": seed})
        captioner, workers = opened.captioner, opened.workers
        requests = RequestBuilder(prompts, job.settings(captioner.params), captioner.describe())
        item = await asyncio.to_thread(probe, Candidate(name, path, is_expected=True), name, job.scan.limits)
        assert item is not None, "it is expected to be one"
        if isinstance(item, Unreadable):
            raise CaptioningError(item.message)
        seen = _there(await workers.inspect(item, with_digest=True, with_plan=requests.needs_plan(item)))
        assert seen.digest is not None, "it was asked for"
        request = requests.build(item, seen.digest, seen.plan, lambda _: text)
        assert captioner.form is not None, "no cluster is asked"
        prepared = _there(await workers.prepare(item, seen.digest, captioner.form))
        return _there(await captioner.caption(request, prepared))

    async def close(self) -> None:
        """Closes the model."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._stack.aclose()

    async def _open(self) -> _Opened:
        if self._opening is None or (self._opening.done() and not _is_usable(self._opening)):
            self._opening = asyncio.create_task(self._load())
        # If the caller is cancelled, the model is loaded anyway.
        return await asyncio.shield(self._opening)

    async def _load(self) -> _Opened:
        job = await asyncio.to_thread(self._open_job)
        captioner = await self._stack.enter_async_context(self._open_captioner(job))
        workers = self._stack.enter_context(closing(MediaWorkers(captioner.processor, 1)))
        return _Opened(job, captioner, workers)


def _is_usable(opening: asyncio.Task[_Opened]) -> bool:
    return not opening.cancelled() and opening.exception() is None


def _there(found: T | Failed) -> T:
    if isinstance(found, Failed):
        raise CaptioningError(found.message)
    return found
