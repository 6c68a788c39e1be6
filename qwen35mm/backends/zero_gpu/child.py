"""The forked child: an engine, stepped by the call's generator.

Inputs and outputs must pickle, since the two processes share only a pipe.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator
from dataclasses import dataclass, replace

from qwen35mm.backends.history import ended_by
from qwen35mm.backends.model_backend import ModelBackend
from qwen35mm.backends.zero_gpu.duration import RESERVE_S
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import Event, Finished, GenerationRequest, Message, Result, Text, TextDelta, iter_media
from qwen35mm.engine import Engine, EngineSettings, Request
from qwen35mm.engine.request import failed_on
from qwen35mm.errors import EngineError, Qwen35mmError
from qwen35mm.model import LoadedModel
from qwen35mm.prompt.replies import is_cut
from qwen35mm_preprocess import PreparedMedia
from qwen35mm_preprocess.say import Said, said_of

logger = logging.getLogger(__name__)

# Events go through the pipe at most this often. Empty batches go too, since a call can only be stopped at a yield.
BATCH_S = 0.05


@dataclass(frozen=True, eq=False)
class Job:
    """One GPU call.

    Attributes:
        work: without its media; `request` has them.
        request: its media have the pixels that were read for this call as sources; None for a plain prompt.
        duration_s: seconds of GPU asked for; work left after that is dropped.
        commits: whether the history with the reply is computed.
    """

    work: Request
    request: GenerationRequest | None
    duration_s: int
    commits: bool = False

    @classmethod
    def make(cls, work: Request, request: GenerationRequest | None, duration_s: int, *, commits: bool = False) -> Job:
        media = iter(work.media)

        def with_pixels(message: Message) -> Message:
            parts = []
            for part in message.content:
                medium = None if isinstance(part, Text) else next(media)
                parts.append(replace(part, source=medium) if isinstance(medium, PreparedMedia) else part)
            return replace(message, content=tuple(parts))

        if request is not None:
            # A class may be a schema, and classes of functions don't pickle.
            request = replace(request, messages=[with_pixels(message) for message in request.messages], schema=None)
        return cls(replace(work, media=()), request, duration_s, commits)


@dataclass(frozen=True)
class Failure:
    """One of our errors on its way to the parent: class and message."""

    kind: type[Qwen35mmError]
    message: Said

    @classmethod
    def of(cls, error: Qwen35mmError) -> Failure:
        return cls(type(error), said_of(error))

    def error(self) -> Qwen35mmError:
        # Skips `__init__`, which may take other arguments.
        return self.kind.__new__(self.kind, self.message)


Item = Event | Failure


class Child:
    """Made in the parent, with only what a fork may inherit; used in the child.

    Args:
        backend: reads prompts and media.
    """

    def __init__(
        self, loaded: LoadedModel, backend: ModelBackend, settings: EngineSettings, cache: CacheSettings
    ) -> None:
        self._loaded = loaded
        self._backend = backend
        self._settings = settings
        self._cache = cache
        # A child may get a second call, with its memory warm.
        self._engine: Engine | None = None

    def run(self, job: Job) -> Generator[tuple[Item, ...], None, None]:
        """Answers one request: batches of events up to `Finished` or a `Failure`, then empty ones.

        Closing the generator ends the work within a step. The computed part of the prompt still goes to the disk tier,
        as it does before a successful call returns.
        """
        batch: list[Item] = []
        sent_s, has_begun = time.monotonic(), False
        with contextlib.closing(self._items(job)) as items:
            for item in items:
                if item is not None:
                    add_item(batch, item)
                # The first text is sent at once.
                begins = not has_begun and isinstance(item, TextDelta)
                ends = isinstance(item, Failure) or (item is not None and job.work.ends_with(item))
                if begins or ends or time.monotonic() - sent_s >= BATCH_S:
                    yield tuple(batch)
                    batch.clear()
                    sent_s, has_begun = time.monotonic(), has_begun or begins

    def _items(self, job: Job) -> Generator[Item | None, None, None]:
        """Items of each step, and None at its end."""
        try:
            yield from self._answer(job)
        except Qwen35mmError as error:
            yield Failure.of(error)
        except Exception as error:
            logger.exception("a GPU call failed")
            self._engine = None
            yield Failure(EngineError, failed_on(error))

    def _answer(self, job: Job) -> Generator[Item | None, None, None]:
        deadline_s = time.monotonic() + job.duration_s - RESERVE_S
        if self._engine is None:
            self._engine = Engine(self._loaded, self._settings, self._cache, budget=self._backend.media.budget)
        engine, work = self._engine, job.work
        parts = iter_media(job.request.messages) if job.request else ()
        work = replace(
            work,
            media=tuple(self._backend.find(part) or self._backend.media_of(part) for part in parts),
            deadline_s=min(work.deadline_s or deadline_s, deadline_s),
        )
        engine.add(work)
        try:
            last: Event | None = None
            while last is None:
                for output in engine.step():
                    if isinstance(output.event, Qwen35mmError):
                        raise output.event
                    yield output.event
                    if work.ends_with(output.event):
                        last = output.event
                yield None
            if isinstance(last, Finished) and job.commits and job.request is not None:
                self._commit(engine, job.request, last.result)
            while engine.has_unfinished and time.monotonic() < deadline_s + RESERVE_S / 2:
                engine.step()
                yield None
        finally:
            engine.cancel(work.id)
            engine.flush()

    def _commit(self, engine: Engine, request: GenerationRequest, result: Result) -> None:
        ended = ended_by(request, result.text, result.reasoning or "", cut=is_cut(result))
        try:
            if ended is not None:
                engine.commit(self._backend.history(ended))
        except Exception:
            logger.exception("a conversation's history could not be kept for its next turn")


def add_item(batch: list[Item], item: Item) -> None:
    """Appends an event; joins text with the last chunk of its channel."""
    last = batch[-1] if batch else None
    if isinstance(item, TextDelta) and isinstance(last, TextDelta) and last.channel == item.channel:
        batch[-1] = replace(item, text=last.text + item.text, logprobs=last.logprobs + item.logprobs)
    else:
        batch.append(item)
