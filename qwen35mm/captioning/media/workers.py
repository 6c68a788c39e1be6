"""Worker processes that read media ahead of the model, each held by a thread that can end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO, cast

from qwen35mm.captioning.media.worker import Answer, Failed, Task, read_message, write_message
from qwen35mm_preprocess import MediaProcessor

logger = logging.getLogger(__name__)

# A look hashes a file, a decoding may take a long video: slower than this is stuck.
TIMEOUT_S = 600.0
# Not `-m`: the child's classes have to be those that the pickles name.
_COMMAND = (sys.executable, "-c", "from qwen35mm.captioning.media.worker import main; main()")


class MediaWorkers:
    """Carries tasks out in child processes, first come, first served.

    A file on which a process dies, or doesn't end in time, is answered with `Failed`; the process is replaced, and no
    other file notices.

    Args:
        processor: what media are planned and decoded with.
        num_workers: processes.
        timeout_s: the most that one task may take.
    """

    def __init__(self, processor: MediaProcessor, num_workers: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._processor = processor
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._running: set[_Worker] = set()
        self._closed = False
        self._tasks: queue.SimpleQueue[tuple[Task, Future[Answer]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"qwen35mm-media-{number}", daemon=True)
            for number in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    async def do(self, task: Task) -> Any:
        """The task's answer; `Failed` where the item can't be read."""
        future: Future[Answer] = Future()
        self._tasks.put((task, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the processes; what they are at is left, and what waits is not begun."""
        with contextlib.suppress(queue.Empty):
            while waiting := self._tasks.get_nowait():
                waiting[1].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        with self._lock:
            self._closed = True
            for worker in self._running:
                worker.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        worker: _Worker | None = None
        while (next_task := self._tasks.get()) is not None:
            task, future = next_task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                worker = worker or self._start()
                answer = worker.do(task, self._timeout_s)
            except OSError as error:
                answer, worker = Failed("worker", f"No process could be started for it: {error.strerror}."), None
            if answer is None:
                assert worker is not None
                how = self._end(worker)
                if not self._closed:
                    logger.warning("A decoder died on %s: %s", task.item.name, how)
                answer, worker = worker.blame, None
            future.set_result(answer)
        if worker is not None:
            self._end(worker)

    def _start(self) -> _Worker:
        """A process that `close` can end. Raises OSError."""
        worker = _Worker(self._processor)
        with self._lock:
            self._running.add(worker)
            if self._closed:
                worker.kill()
        return worker

    def _end(self, worker: _Worker) -> str:
        with self._lock:
            self._running.discard(worker)
        return worker.end()


class _Worker:
    """One process, used by one thread."""

    def __init__(self, processor: MediaProcessor) -> None:
        self._timed_out = False
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Where this process finds its modules; Ctrl-C is for the parent alone.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,
        )
        self._send(processor)

    @property
    def blame(self) -> Failed:
        """Why the last task has no answer."""
        if self._timed_out:
            return Failed("timeout", "Reading it took too long and was ended. Check the file, or leave it out.")
        return Failed("crash", "The decoder crashed on it. The file is damaged, or hostile: leave it out.")

    def do(self, task: Task, timeout_s: float) -> Answer | None:
        """The answer; None where the process died, or was killed because its time was over."""
        assert self._process.stdout is not None
        with _timer(timeout_s, self._give_up):
            if not self._send(task):
                return None
            try:
                return read_message(cast(BinaryIO, self._process.stdout))
            except (OSError, EOFError, pickle.UnpicklingError):
                return None

    def kill(self) -> None:
        """Ends the process at once; from any thread."""
        self._process.kill()

    def end(self) -> str:
        """Ends the process; how it ended."""
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # pyright: ignore[reportOptionalMemberAccess]
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return f"exit status {self._process.returncode}"

    def _send(self, value: object) -> bool:
        assert self._process.stdin is not None
        try:
            write_message(cast(BinaryIO, self._process.stdin), value)
        except OSError:
            return False
        return True

    def _give_up(self) -> None:
        self._timed_out = True
        self.kill()


@contextlib.contextmanager
def _timer(seconds: float, function: Callable[[], None]) -> Any:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
