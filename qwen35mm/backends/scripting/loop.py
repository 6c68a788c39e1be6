"""The event loop that scripts' answers run on, in a thread of its own.

A script has no loop, a notebook has one that runs already, a program may have several: none of them can be asked to
wait for an answer that it works on itself. So no answer runs on a caller's loop, and a connection to a server, which
belongs to the loop that it was made in, serves all of them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotYetError
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# How often a waiting thread looks whether Ctrl-C was pressed: on Windows nothing else tells it.
_POLL_S = 0.2
# How long the end of a program waits for answers to end, which takes one step of the engine.
_PATIENCE_S = 5.0


class Job(Generic[T]):
    """A coroutine for the loop of scripts.

    It begins when it is told to, or waited for, so that whoever makes it can note it before: Ctrl-C comes between any
    two lines, and nothing may run on that nobody could end.

    Attributes:
        loop: that it runs on.
        ended: gets what it returned or raised, once nothing of it runs any more.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.ended: Future[T] = Future()
        self._coroutine = coroutine
        self.loop = running_loop()
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """A second call does nothing."""
        self.loop.call_soon_threadsafe(self._begin)

    def cancel(self) -> None:
        """Ends it within one step of the engine; returns at once."""
        begin_to_cancel([self])

    def wait(self) -> T:
        """Blocks until it has ended, and raises what it raised. Ctrl-C ends it first."""
        try:
            return self.result()
        except BaseException:
            cancel([self])
            raise

    def result(self) -> T:
        """As `wait`, but after Ctrl-C it goes on."""
        self.begin()
        while not self.ended.done():
            wait([self.ended], _POLL_S)
        return self.ended.result()

    async def awaited(self) -> T:
        """As `wait`, for a task of any loop; cancelling that task ends the job first."""
        self.begin()
        ended = asyncio.wrap_future(self.ended)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.gather(ended, return_exceptions=True)
            raise

    def _begin(self) -> None:
        if self._task is None and not self.ended.done():
            self._task = self.loop.create_task(self._coroutine)
            self._task.add_done_callback(self._end)

    def cancel_here(self) -> None:
        """`cancel`, on the loop itself."""
        if self._task is not None:
            self._task.cancel()
        elif not self.ended.done():
            self._coroutine.close()
            self.ended.set_exception(asyncio.CancelledError())

    def _end(self, task: asyncio.Task[T]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self.ended.set_result(task.result())
        else:
            self.ended.set_exception(error)


class LoopThread:
    """A loop that runs until the program ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="qwen35mm-scripts", daemon=True)
        self.thread.start()
        # Runs before the engines end: what is registered last is called first.
        atexit.register(self.close)

    def close(self) -> None:
        """Ends what still runs, and then the thread."""
        if not self.thread.is_alive():  # in a forked child
            return

        async def end_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self.loop.shutdown_asyncgens()

        with contextlib.suppress(NotYetError):
            asyncio.run_coroutine_threadsafe(end_all(), self.loop).result(_PATIENCE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_PATIENCE_S)


_lock = threading.Lock()
_running: LoopThread | None = None


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop of scripts, which begins with the first that asks for it."""
    global _running
    with _lock:
        if _running is None:
            _running = LoopThread()
    if threading.current_thread() is _running.thread:
        raise RuntimeError("What an answer itself calls can't wait for another one.")
    return _running.loop


def begin_to_cancel(jobs: Sequence[Job[Any]]) -> None:
    """Ends jobs within one step of the engine; returns at once. None of them gets its turn because another one ends,
    and Ctrl-C can't come between two of them."""

    def cancel_all() -> None:
        for job in reversed(jobs):
            job.cancel_here()

    if jobs:
        jobs[0].loop.call_soon_threadsafe(cancel_all)


def cancel(jobs: Sequence[Job[Any]]) -> None:
    """Ends jobs, and blocks until nothing of them runs any more."""
    begin_to_cancel(jobs)
    wait([job.ended for job in jobs])


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns or raises, run on the loop of scripts while this thread waits."""
    return Job(coroutine).wait()


async def arun(coroutine: Coroutine[Any, Any, T]) -> T:
    """`run` for a task of any loop."""
    return await Job(coroutine).awaited()


def _forget() -> None:
    global _running, _lock
    _running, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    # A forked child has no such thread.
    os.register_at_fork(after_in_child=_forget)
