"""Media are read ahead of the model in child processes, each used by one thread at a time, which can end it.

A decoder that crashes, or never ends, on a damaged file ends its process only. Standard input and output of a child
carry pickles. When its input ends, so does the process, whatever it is at: it doesn't outlive a parent that was killed.
"""

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

from qwen35mm.captioning.items import Failed, Item, failure_kind
from qwen35mm.captioning.media.similar import media_similarity
from qwen35mm_preprocess import MediaError, MediaPlan, MediaProcessor, PreparedMedia

if TYPE_CHECKING:
    from qwen35mm.prompt import EncodedMedium

logger = logging.getLogger(__name__)

# An inspection hashes a file, a decoding may take a long video: slower than this is stuck.
TIMEOUT_S = 600.0
# Not `-m`: the child's classes have to be those that the pickles name.
_COMMAND = (sys.executable, "-c", "from qwen35mm.captioning.media.workers import main; main()")

MediumForm = Literal["pixels", "frames", "video_url"]
"""What a medium is prepared as: the engine's own input, or a part of a server's request with videos as `VideoMode`."""


@dataclass(frozen=True)
class Inspected:
    """What an item is; `digest` and `plan` where they were asked for.

    Attributes:
        status: of the file before its bytes were read, None for what isn't a file.
    """

    digest: bytes | None
    plan: MediaPlan | None
    status: os.stat_result | None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A medium as a backend takes it, and what it looks like; see `similar`."""

    medium: PreparedMedia | EncodedMedium
    similarity: int | None = None


# What was read must be the bytes that the caption is kept under.
CHANGED = Failed("changed", "The file changed while it was read. Run again when nothing writes to it.")


def inspect(item: Item, processor: MediaProcessor, *, with_digest: bool, with_plan: bool) -> Inspected:
    """What an item is, without decoding it.

    Args:
        with_digest: whether its bytes are hashed; not where the digest is known.
        with_plan: whether it is planned: its size, its length and what it costs.
    """
    source = item.read()
    status = source.stat() if isinstance(source, Path) else None
    digest = item.digest() if with_digest else None
    return Inspected(digest, processor.plan(source, item.kind) if with_plan else None, status)


def prepare(
    item: Item, processor: MediaProcessor, *, digest: bytes, form: MediumForm, with_similarity: bool
) -> Prepared | Failed:
    """An item as a backend takes it.

    Args:
        digest: of the bytes that its caption is for.
        with_similarity: whether it is compared with other media.
    """
    source = item.read()
    medium = processor.prepare(source, kind=item.kind) if form == "pixels" or with_similarity else None
    similarity = None
    if with_similarity:
        assert medium is not None
        processing = processor.image_processing if item.kind == "image" else processor.video_processing
        similarity = media_similarity(medium, processing)
    if form != "pixels":
        # Only for those that need it: a tenth of a second of their start.
        from qwen35mm.backends.remote.media import encode_medium
        from qwen35mm.prompt import Image, Video

        medium = encode_medium(Image(source) if item.kind == "image" else Video(source), processor, form)
    assert medium is not None
    return Prepared(medium, similarity) if item.digest() == digest else CHANGED


def main() -> None:
    """The child's program."""
    answers = os.fdopen(os.dup(1), "wb")
    # Nothing that a library prints may come between the answers.
    os.dup2(2, 1)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(os.fdopen(os.dup(0), "rb"), messages), daemon=True).start()
    while True:
        _send(answers, work(*messages.get()))


def _receive(stream: BinaryIO, messages: queue.SimpleQueue[Any]) -> None:
    """Hands messages on; at the end of their stream nobody waits for an answer, also in the middle of a decoding."""
    try:
        while True:
            messages.put(pickle.load(stream))
    finally:
        os._exit(0)


def _send(stream: BinaryIO, value: object) -> None:
    pickle.dump(value, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def work(
    function: Callable[..., Inspected | Prepared | Failed], item: Item, processor: MediaProcessor, options: Any
) -> Inspected | Prepared | Failed:
    """Calls `inspect` or `prepare`; what the item is to blame for becomes `Failed`."""
    try:
        return function(item, processor, **options)
    except MediaError as error:
        return Failed(failure_kind(error), str(error))
    except OSError as error:
        return Failed("unreadable", f"The file can't be read: {error.strerror or type(error).__name__}.")
    except MemoryError:
        return Failed("too large", "Memory ran out while it was decoded. Make it smaller, or lower the limits.")


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
        """See `inspect`; `Failed` where the item can't be read."""
        return await self._do(inspect, item, with_digest=with_digest, with_plan=with_plan)

    async def prepare(
        self, item: Item, digest: bytes, form: MediumForm, *, with_similarity: bool = False
    ) -> Prepared | Failed:
        """See `prepare`; `Failed` where the item can't be read."""
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
            _send(cast(BinaryIO, self._child.stdin), message)
            return pickle.load(cast(BinaryIO, self._child.stdout))
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
