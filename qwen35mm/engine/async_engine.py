"""The engine for asynchronous callers: one worker thread steps it, any number of tasks read from it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

import torch

from qwen35mm.contract import Event
from qwen35mm.engine.engine import Engine
from qwen35mm.engine.request import CachedPrompt, Request, StepOutput
from qwen35mm.errors import EngineError, Qwen35mmError
from qwen35mm.pools import GRAMMARS
from qwen35mm_preprocess.say import say

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# How often to check deadlines while everything waits for a file.
DEADLINE_POLL_S = 0.25


# So that one prompt's cached segments don't wait for another prompt's video.
_NUM_READERS = 3


class FileThreads(Executor):
    """Threads for files. Calls start in the order in which they come; `on_done` runs after each.

    The standard library's pools refuse work at interpreter exit, when the engine still has entries to write.
    """

    def __init__(self, name: str, on_done: Callable[[], None], num_threads: int = 1) -> None:
        self._work: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._on_done = on_done
        self._is_shut_down = False
        self._threads = [
            threading.Thread(target=self._run, name=f"qwen35mm-{name}", daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._is_shut_down:
            raise RuntimeError("This thread has ended: nothing can be read or written any more.")
        future: Future[T] = Future()
        future.add_done_callback(lambda _: self._on_done())
        self._work.put((future, lambda: fn(*args, **kwargs)))  # pyright: ignore[reportArgumentType]
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut_down = True
        if cancel_futures:
            with contextlib.suppress(queue.Empty):
                while (work := self._work.get_nowait()) is not None:
                    work[0].cancel()
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, do = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(do())
                except BaseException as error:
                    future.set_exception(error)
            # Keep no references while idle.
            del work, future, do


class AsyncEngine:
    """Runs an `Engine` in a thread of its own.

    All calls into the engine happen in that thread; callers hand it commands. `close()` ends the thread. So does the
    end of the program: a thread that computes during Python's shutdown aborts the process. A forked child has no
    threads: there every call raises.

    Args:
        make_engine: makes the engine from a reader and a writer.
    """

    def __init__(self, make_engine: Callable[[Executor, Executor], Engine]) -> None:
        self._process = os.getpid()
        self._wake = threading.Condition()
        self._reader = FileThreads("reader", self._notify, _NUM_READERS)
        self._writer = FileThreads("writer", self._notify)
        try:
            self._engine = make_engine(self._reader, self._writer)
        except BaseException:
            self._end_files()
            raise
        self.context_length = self._engine.context_length
        self.plan = self._engine.runtime.plan
        self._commands: deque[Callable[[], None]] = deque()
        # Streams add and remove themselves.
        self._listeners: dict[str, Callable[[StepOutput], None]] = {}
        self._closing = False
        self._idle = threading.Event()
        self._idle.set()
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="qwen35mm-engine", daemon=True)
        _RUNNING.add(self)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether the engine has nothing to do: no request, no history commit, nothing to hand to the disk."""
        return self._idle.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether it was closed, or failed."""
        return self._closing

    def memory_use(self) -> dict[str, int]:
        """The cache's bytes and budgets; see `Runtime.memory_use`."""
        return self._engine.runtime.memory_use()

    def check_process(self) -> None:
        """Raises EngineError in a forked child. Takes no lock: a thread of the parent may have held any of them."""
        if self._process != os.getpid():
            raise EngineError(
                f"This model was loaded in process {self._process}, and a forked child has none of its threads. "
                "Load the model in the child, or use it in the parent alone."
            )

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Blocks until the engine is idle; False after the timeout.

        Raises:
            EngineError: in a forked child.
        """
        self.check_process()
        return self._idle.wait(timeout_s)

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """The events of a request; the last is `Finished`, or `PromptRead` if no reply was requested.

        Closing the iterator cancels the request within one step.

        Raises:
            RequestError: the engine refuses the request, or its time is over.
            MediaError: a medium can't be read any more.
            EngineError: the engine failed on it, is closed, or belongs to the parent of this forked process.
        """
        self.check_process()
        if request.is_constrained:
            request = await GRAMMARS.run_for(request.person.decode() or None, self._engine.prepared, request)
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[StepOutput] = asyncio.Queue()

        def deliver(output: StepOutput) -> None:
            # A closed loop has no readers; their iterators cancel their requests.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        # Before the command: so that the engine's end reaches this stream, too.
        request_id, last = request.id, request.last_event
        self._listeners[request_id] = deliver
        event: Event | None = None
        try:
            self._submit(functools.partial(self._add, request, deliver))
            del request  # its pixels are large, and the reply may take long
            while not isinstance(event, last):
                told = (await outputs.get()).event
                if isinstance(told, Qwen35mmError):
                    try:
                        raise told
                    finally:
                        del told  # else this frame and its error form a cycle that keeps the request
                event = told
                yield event
        finally:
            self._listeners.pop(request_id, None)
            with contextlib.suppress(EngineError):
                self._submit(lambda: self._engine.cancel(request_id))

    def commit(self, source: CachedPrompt) -> None:
        """Has the engine compute a finished conversation's history for its next turn when idle."""
        with contextlib.suppress(EngineError):
            self._submit(lambda: self._engine.commit(source))

    def close(self) -> None:
        """Ends the thread after the current step; running requests end with an `EngineError`.

        Writes pending entries to the disk tier before it returns.
        """
        self.begin_to_close()
        self._thread.join()

    def begin_to_close(self) -> None:
        """As `close`, without waiting, for finalizers. Does nothing in a forked child."""
        if self._process != os.getpid():
            return
        with self._wake:
            self._closing = True
            self._wake.notify()

    def _end_files(self) -> None:
        """Ends the file threads; waits until everything handed to the writer is written."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _submit(self, command: Callable[[], None]) -> None:
        self.check_process()
        with self._wake:
            if self._closing:
                raise EngineError(say("The engine is shut down until the program is started again."))
            self._idle.clear()
            self._commands.append(command)
            self._wake.notify()

    def _add(self, request: Request, deliver: Callable[[StepOutput], None]) -> None:
        try:
            self._engine.add(request)
        except Exception as error:
            deliver(StepOutput(request.id, self._engine.explained(error, request.id)))

    def _run(self) -> None:
        # OpenMP keeps this number per thread, and torch sets it late in a new thread. Until then products would use,
        # and round with, the machine's default number instead of the one in the cache's root.
        torch.set_num_threads(self._num_threads)
        try:
            while self._take_commands():
                self._tell(self._engine.step())
            reason = say("The engine was shut down.")
            self._engine.flush()
        except BaseException:
            # A request's errors go to that request; an error here is our bug, or a panic in a Rust library, which is no
            # Exception.
            logger.exception("the engine's thread failed")
            reason = say(
                "The engine failed and is stopped until the program is started again; the log has the details."
            )
        with self._wake:
            self._closing = True
            self._commands.clear()
        for request_id, deliver in list(self._listeners.items()):
            deliver(StepOutput(request_id, EngineError(reason)))
        self._end_files()
        self._idle.set()

    def _tell(self, outputs: list[StepOutput]) -> None:
        """Delivers events. Not in `_run`: its frame would keep the last output and its request while idle."""
        for output in outputs:
            deliver = self._listeners.get(output.request_id)
            if deliver is not None:
                deliver(output)

    def _take_commands(self) -> bool:
        """Runs the callers' commands; sleeps while idle. False once the engine closes."""
        while True:
            is_late = False
            with self._wake:
                while not (self._commands or self._closing or self._can_step() or is_late):
                    if not (self._engine.has_work or self._engine.writing):
                        self._idle.set()
                    # A request may wait for a file longer than its deadline allows.
                    is_late = not self._wake.wait(DEADLINE_POLL_S if self._engine.has_requests else None)
                if self._closing:
                    return False
            while self._commands:
                self._commands.popleft()()
            if self._can_step() or is_late:
                return True

    def _can_step(self) -> bool:
        return self._engine.has_work and not self._engine.blocked


_RUNNING: weakref.WeakSet[AsyncEngine] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    # A forked child has no threads to close.
    os.register_at_fork(after_in_child=_RUNNING.clear)


@atexit.register
def _close_all() -> None:
    for engine in list(_RUNNING):
        engine.close()
