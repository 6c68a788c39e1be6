"""One GPU call in the parent: a thread that reads the child's events from `spaces`' generator."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Generator

from qwen35mm.backends.zero_gpu.child import Failure, Item, Job
from qwen35mm.errors import EngineError, QueueFullError, Qwen35mmError, RequestError
from qwen35mm_preprocess.say import Saying, say

logger = logging.getLogger(__name__)

RunJob = Callable[[Job], Generator[tuple[Item, ...], None, None]]

_WAIT = re.compile(r"Try again in ([0-9: ,a-z]+)", re.IGNORECASE)
# Parts of ZeroGPU's error messages, and what they mean to a person.
_REFUSALS: list[tuple[tuple[str, ...], type[Qwen35mmError], Saying]] = [
    (
        ("quota exceeded", "credits exceeded", "gpu limit"),
        RequestError,
        say(
            "The GPU time that this Space has for you is used up. Try again later; who is signed in to Hugging Face "
            "has more."
        ),
    ),
    (
        ("queue timeout", "no gpu was available"),
        QueueFullError,
        say("No GPU became free in time. Try again in a moment."),
    ),
    (
        ("illegal duration",),
        RequestError,
        say("This asks for more GPU time than ZeroGPU lends at once. Ask for a shorter answer."),
    ),
    (
        ("aborted",),
        EngineError,
        say(
            "The GPU process ended in the middle of its work: its time was over, or memory ran out. Try again, with "
            "less to read or a shorter answer."
        ),
    ),
]


class Call:
    """Created in the event loop that reads it. The thread starts in the caller's context, where `spaces` finds whose
    quota pays.
    """

    def __init__(self, run: RunJob, job: Job, on_end: Callable[[Call], None]) -> None:
        self.conversation = job.work.conversation
        self.ends_with = job.work.ends_with
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._batches: asyncio.Queue[tuple[Item, ...] | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        # Whether its last event came; all later work is for the next turn.
        self.answered = False
        self._stop = threading.Event()
        context = contextvars.copy_context()
        # A daemon: waiting for a GPU may take longer than the end of the program should.
        self._thread = threading.Thread(
            target=context.run, args=(self._work, run, job), name="qwen35mm-gpu-call", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the child after the current step; returns at once."""
        self._stop.set()

    def join(self, timeout_s: float | None) -> bool:
        """Blocks until the child is gone; False if the time was over first. Not for the event loop."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def wait(self) -> None:
        """Waits until the child is gone."""
        await self._ended.wait()

    async def items(self) -> AsyncIterator[Item]:
        """The child's events up to its last one, or a `Failure`, for every other end."""
        while (batch := await self._batches.get()) is not None:
            for item in batch:
                yield item

    def _work(self, run: RunJob, job: Job) -> None:
        try:
            with contextlib.closing(run(job)) as batches:
                for batch in batches:
                    self._put(batch)
                    if self._stop.is_set():
                        break
            failure = Failure(EngineError, say("The GPU call ended before the reply did. Try again."))
        except Qwen35mmError as error:
            failure = Failure.of(error)
        except Exception as error:
            logger.exception("a GPU call failed")
            failure = _failure(error)
        if not self.answered:
            self._put((failure,))
        with contextlib.suppress(RuntimeError):  # a closed loop has no reader left
            self._loop.call_soon_threadsafe(self._end)

    def _put(self, batch: tuple[Item, ...]) -> None:
        if self.answered or not batch:
            return
        last = batch[-1]
        self.answered = isinstance(last, Failure) or self.ends_with(last)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._batches.put_nowait, batch)

    def _end(self) -> None:
        self._on_end(self)
        self._batches.put_nowait(None)
        self._ended.set()


def _failure(error: Exception) -> Failure:
    """ZeroGPU's refusal in our words. Its errors have a title, and a message that may name a time to wait."""
    said = f"{getattr(error, 'title', '')} {error}".lower()
    for parts, kind, words in _REFUSALS:
        if any(part in said for part in parts):
            wait = _WAIT.search(str(error))
            if wait:
                words = say("{words} It may be free again in {wait}.", words=words, wait=wait[1].strip())
            return Failure(kind, words)
    return Failure(
        EngineError,
        say("The GPU could not be used ({error}); the log has the details. Try again.", error=type(error).__name__),
    )
