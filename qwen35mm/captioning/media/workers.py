"""Worker processes that read media ahead of the model, each used by one thread at a time, which can end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, cast

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.media.worker import (
    Failed,
    Inspected,
    MediumForm,
    Prepared,
    inspect,
    prepare,
    read_message,
    write_message,
)
from qwen35mm_preprocess import MediaProcessor

logger = logging.getLogger(__name__)

# An inspection hashes a file, a decoding may take a long video: slower than this is stuck.
TIMEOUT_S = 600.0
# Not `-m`: the child's classes have to be those that the pickles name.
_COMMAND = (sys.executable, "-c", "from qwen35mm.captioning.media.worker import main; main()")


class MediaWorkers:
    """Reads media in child processes, first come, first served.

    A file on which a process dies, or doesn't end in time, is answered with `Failed`; the process is replaced, and no
    other file notices.

    Args:
        processor: what media are planned and decoded with.
        num_workers: processes.
        timeout_s: the most that one medium may take.
    """

    def __init__(self, processor: MediaProcessor, num_workers: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._processor = processor
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="qwen35mm-media")
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    async def inspect(self, item: Item, *, with_digest: bool, with_plan: bool) -> Inspected | Failed:
        """See `worker.inspect`; `Failed` where the item can't be read."""
        return await self._do(inspect, item, with_digest=with_digest, with_plan=with_plan)

    async def prepare(
        self, item: Item, digest: bytes, form: MediumForm, *, with_similarity: bool = False
    ) -> Prepared | Failed:
        """See `worker.prepare`; `Failed` where the item can't be read."""
        return await self._do(prepare, item, digest=digest, form=form, with_similarity=with_similarity)

    def close(self) -> None:
        """Ends the processes; what they are at is left, and what waits is not begun."""
        with self._lock:
            self._closed = True
            for process in self._busy:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._idle:
            process.end()

    async def _do(self, function: Callable[..., Any], item: Item, **options: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, function, item, options)

    def _call(self, function: Callable[..., Any], item: Item, options: Any) -> Inspected | Prepared | Failed:
        try:
            process = self._take()
        except OSError as error:
            return Failed("worker", f"No process could be started for it: {error.strerror}.")
        answer = process.call((function, item, self._processor, options), self._timeout_s)
        with self._lock:
            self._busy.discard(process)
            if answer is not None:
                self._idle.append(process)
                return answer
        how = process.end()
        if not self._closed:
            logger.warning("A decoder died on %s: %s", item.name, how)
        return process.blame

    def _take(self) -> _Process:
        """A process that nobody uses, and that `close` can end. Raises OSError."""
        with self._lock:
            process = self._idle.pop() if self._idle else _Process()
            self._busy.add(process)
            if self._closed:
                process.kill()
        return process


class _Process:
    """A child process, used by one thread at a time."""

    def __init__(self) -> None:
        self._timed_out = False
        self._child = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Where this process finds its modules; Ctrl-C is for the parent alone.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,
        )

    @property
    def blame(self) -> Failed:
        """Why the last call has no answer."""
        if self._timed_out:
            return Failed("timeout", "Reading it took too long and was ended. Check the file, or leave it out.")
        return Failed("crash", "The decoder crashed on it. The file is damaged, or hostile: leave it out.")

    def call(self, message: tuple[Any, ...], timeout_s: float) -> Any:
        """What the child answers; None where it died, or was killed because its time was over."""
        timer = threading.Timer(timeout_s, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            write_message(cast(BinaryIO, self._child.stdin), message)
            return read_message(cast(BinaryIO, self._child.stdout))
        except (OSError, EOFError, pickle.UnpicklingError):
            return None
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Ends the child at once; from any thread."""
        self._child.kill()

    def end(self) -> str:
        """Ends the child; how it ended."""
        for stream in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # pyright: ignore[reportOptionalMemberAccess]
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        return f"exit status {self._child.returncode}"

    def _give_up(self) -> None:
        self._timed_out = True
        self.kill()
