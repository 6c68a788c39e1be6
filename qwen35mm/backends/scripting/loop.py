"""The event loop of scripts' answers, in its own thread.

A script has no loop, a notebook has a running one, a program may have several. None of them can both wait for an answer
and work on it. So no answer runs on a caller's loop, and a connection to a server, which belongs to the loop that
opened it, serves all callers.
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

# How often a waiting thread checks for Ctrl-C; on Windows nothing else reports it.
_POLL_S = 0.2
# Seconds that the end of a program waits for answers to end, which takes one step of the engine.
_PATIENCE_S = 5.0


class Job(Generic[T]):
    """A coroutine for the loop of scripts.

    It starts with `begin`, or when waited for. So its maker can store it first: Ctrl-C may come between any two lines,
    and then something must be able to end the job.

    Attributes:
        loop: the loop that it runs on.
        ended: gets its result or error, once nothing of it runs any more.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.ended: Future[T] = Future()
        self._coroutine = coroutine
        self.loop = running_loop()
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Starts it; a second call does nothing."""
        self.loop.call_soon_threadsafe(self._begin)

    def cancel(self) -> None:
        """Ends it within one step of the engine; returns at once."""
        begin_to_cancel([self])

    def wait(self) -> T:
        """Blocks until it has ended; returns its result or raises its error. Ctrl-C ends it first."""
        try:
            return self.result()
        except BaseException:
            cancel([self])
            raise

    def result(self) -> T:
        """As `wait`, but it continues after Ctrl-C."""
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
        """As `cancel`, called on the loop itself."""
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
        # Runs before the engines end: atexit calls the last registered function first.
        atexit.register(self.close)

    def close(self) -> None:
        """Ends everything that still runs, then the thread."""
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
    """The loop of scripts; the first call starts it."""
    global _running
    with _lock:
        if _running is None:
            _running = LoopThread()
    if threading.current_thread() is _running.thread:
        raise RuntimeError("Code that runs inside an answer can't wait for another answer.")
    return _running.loop


def begin_to_cancel(jobs: Sequence[Job[Any]]) -> None:
    """Ends jobs within one step of the engine; returns at once. Ends them all in one callback, so that none gets its
    turn because another ends, and Ctrl-C can't come in between."""

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
    """Runs a coroutine on the loop of scripts while this thread waits; returns its result or raises its error."""
    return Job(coroutine).wait()


async def arun(coroutine: Coroutine[Any, Any, T]) -> T:
    """As `run`, for a task of any loop."""
    return await Job(coroutine).awaited()


def _forget() -> None:
    global _running, _lock
    _running, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    # A forked child doesn't have the thread.
    os.register_at_fork(after_in_child=_forget)
