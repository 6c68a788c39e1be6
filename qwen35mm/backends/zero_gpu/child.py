"""What runs in the forked child: an engine, stepped by the generator that the call is."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from qwen35mm.backends.requests import RequestMaker
from qwen35mm.backends.zero_gpu.duration import RESERVE_S
from qwen35mm.backends.zero_gpu.job import Failure, Item, Job, add_event
from qwen35mm.cache import CacheSettings
from qwen35mm.engine import Engine, EngineSettings, Finished, Result, TextDelta
from qwen35mm.errors import EngineError, Qwen35mmError
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess import MediaError

logger = logging.getLogger(__name__)

# Events go through the pipe at most this often. Empty batches go too: only behind a yield is a call stopped.
BATCH_S = 0.05


class Child:
    """Made in the parent, where it holds nothing but what a fork may inherit; used in the child."""

    def __init__(
        self, loaded: LoadedModel, requests: RequestMaker, settings: EngineSettings, cache: CacheSettings
    ) -> None:
        self._loaded = loaded
        self._requests = requests
        self._settings = settings
        self._cache = cache
        self._engine: Engine | None = None

    def run(self, job: Job) -> Iterator[tuple[Item, ...]]:
        """Answers one request: batches of events up to `Finished` or a `Failure`, then empty ones behind it.

        Closing it ends the work within a step; what was computed of the prompt is written to the disk tier all the
        same, as it is before a call that went well returns.
        """
        try:
            yield from self._answer(job)
        except (Qwen35mmError, MediaError) as error:
            yield (Failure.of(error),)
        except Exception as error:
            logger.exception("a GPU call failed")
            self._engine = None
            words = f"The model failed on this request ({type(error).__name__}); the log has the details. Try again."
            yield (Failure(EngineError, words),)

    def _answer(self, job: Job) -> Iterator[tuple[Item, ...]]:
        deadline_s = time.monotonic() + job.duration_s - RESERVE_S
        engine = self._open_engine()
        request = job.open_request(self._requests, deadline_s=deadline_s)
        engine.add(request)
        try:
            result = yield from self._reply(engine)
            if job.history is not None and result.text:
                self._commit(engine, job, result)
            sent_s = time.monotonic()
            while engine.has_work and time.monotonic() < deadline_s + RESERVE_S / 2:
                engine.step()
                if time.monotonic() - sent_s >= BATCH_S:
                    yield ()
                    sent_s = time.monotonic()
        finally:
            engine.cancel(request.id)
            engine.flush()

    def _reply(self, engine: Engine) -> Iterator[tuple[Item, ...]]:
        """Steps the only request to its end; returns its result.

        Raises:
            Qwen35mmError, MediaError: how it ended instead, after all that it gave until then.
        """
        batch: list[Item] = []
        sent_s, is_first = time.monotonic(), True
        while True:
            for output in engine.step():
                if isinstance(output.event, (Qwen35mmError, MediaError)):
                    yield tuple(batch)
                    raise output.event
                add_event(batch, output.event)
                if isinstance(output.event, Finished):
                    yield tuple(batch)
                    return output.event.result
            # The first word is waited for.
            starts = is_first and any(isinstance(item, TextDelta) for item in batch)
            if starts or time.monotonic() - sent_s >= BATCH_S:
                yield tuple(batch)
                batch.clear()
                sent_s, is_first = time.monotonic(), is_first and not starts

    def _commit(self, engine: Engine, job: Job, result: Result) -> None:
        history = job.history
        assert history is not None
        try:
            source = self._requests.history(
                history.ended_by(result.text, result.reasoning or ""),
                thinking=history.thinking,
                tools=history.tools,
                conversation=job.request.conversation,
                tenant=history.tenant,
            )
        except Exception:
            logger.exception("a conversation's history could not be kept for its next turn")
        else:
            engine.commit(source)

    def _open_engine(self) -> Engine:
        """The engine: a child may be used for a second call, and its memory is warm then."""
        if self._engine is None:
            self._engine = Engine(self._loaded, self._settings, self._cache)
        return self._engine
