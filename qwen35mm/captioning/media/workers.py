"""Media are read ahead of the model in child processes, each used by one thread at a time, which can end it.

A decoder that crashes, or never ends, on a damaged file ends its process only. A child has limits of memory and time
that follow from those of media. Its standard input carries pickles, its output what `answers` has, which executes
nothing here; what libraries write to its standard error is logged under the file's name. When its input ends, so does
the process, whatever it is at: it doesn't outlive a parent that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import av.logging
import psutil

from qwen35mm.captioning.items import Failed, Item, failure_kind
from qwen35mm.captioning.media.answers import Answer, Inspected, MediumForm, Prepared, read_answer, write_answer
from qwen35mm.captioning.media.similar import media_similarity
from qwen35mm.captioning.records import one_line
from qwen35mm_preprocess import MediaError, MediaLimits, MediaProcessor, libtiff

logger = logging.getLogger(__name__)

# What is slower is stuck: so long, and a second for each so many bytes; a long video is a share of its length besides.
_TIMEOUT_S, _BYTES_PER_S, _VIDEO_SHARE = 120.0, 1 << 20, 24
# What a child may allocate beside what it starts with: its libraries' own, and of each pixel what the worst format
# takes (32-bit grey), or a video's frames on their way; of each byte of a file three copies.
_OWN_BYTES, _BYTES_PER_PIXEL, _COPIES = 1 << 30, 32, 3
# Nothing but what libraries say is written by a child, and of that more is of no use.
_MAX_SAID_BYTES, _MAX_SAID_LINES, _MAX_LINE = 1 << 20, 5, 500
# A larger file is read from disk by its decoder, and once more afterwards for its digest.
_WHOLE_BYTES = 64 << 20
# Not `-m`: the child's classes have to be those that the pickles name.
_COMMAND = (sys.executable, "-c", "from qwen35mm.captioning.media.workers import main; main()")

# What was read must be the bytes that the caption is kept under.
CHANGED = Failed("changed", "The file changed while it was read. Run again when nothing writes to it.")


def inspect(item: Item, processor: MediaProcessor, *, with_digest: bool, with_plan: bool) -> Inspected:
    """What an item is, without decoding it.

    Args:
        with_digest: whether its bytes are hashed; not where the digest is known.
        with_plan: whether it is planned: its size, its length and what it costs.
    """
    source = item.read(_WHOLE_BYTES if with_digest and with_plan else 0)
    digest = None
    if with_digest:
        digest = hashlib.sha256(source).digest() if isinstance(source, bytes) else item.digest()
    return Inspected(digest, processor.plan(source, item.kind) if with_plan else None)


def prepare(
    item: Item, processor: MediaProcessor, *, digest: bytes, form: MediumForm, with_similarity: bool
) -> Prepared | Failed:
    """An item as a backend takes it.

    Args:
        digest: of the bytes that its caption is for.
        with_similarity: whether it is compared with other media.
    """
    source = item.read(_WHOLE_BYTES)
    if isinstance(source, bytes) and hashlib.sha256(source).digest() != digest:
        return CHANGED
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
    is_same = isinstance(source, bytes) or item.digest() == digest
    return Prepared(medium, similarity) if is_same else CHANGED


def main() -> None:
    """The child's program."""
    answers = os.fdopen(os.dup(1), "wb")
    # Nothing that a library prints may come between the answers.
    os.dup2(2, 1)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(os.fdopen(os.dup(0), "rb"), messages), daemon=True).start()
    is_limited = False
    while True:
        function, item, processor, options = messages.get()
        if not is_limited:
            _limit(processor.limits)
            is_limited = True
        write_answer(answers, work(function, item, processor, options))


def _limit(limits: MediaLimits) -> None:
    """Limits what this process may allocate and write, where the system can, and lets libraries say what is wrong."""
    libtiff.leave_lines()
    av.logging.set_libav_level(av.logging.ERROR)
    # PyAV's own takes the interpreter's lock in FFmpeg's threads; this one writes.
    av.logging.restore_default_callback()
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
    most_bytes = max(limits.max_image_bytes, limits.max_video_bytes)
    most = _OWN_BYTES + _BYTES_PER_PIXEL * limits.max_source_pixels + _COPIES * most_bytes
    # RLIMIT_AS would count what is only reserved, which is many times as much with OpenBLAS and many cores.
    for kind, value in (
        (resource.RLIMIT_DATA, psutil.Process().memory_info().data + most if psutil.LINUX else most),
        (resource.RLIMIT_FSIZE, _MAX_SAID_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _receive(stream: BinaryIO, messages: queue.SimpleQueue[Any]) -> None:
    """Hands messages on; at the end of their stream nobody waits for an answer, also in the middle of a decoding."""
    try:
        while True:
            messages.put(pickle.load(stream))
    finally:
        os._exit(0)


def work(function: Callable[..., Answer], item: Item, processor: MediaProcessor, options: Any) -> Answer:
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
        timeout_s: the most that one medium may take; None goes by its kind and its bytes.
    """

    def __init__(self, processor: MediaProcessor, num_workers: int, *, timeout_s: float | None = None) -> None:
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

    def _call(self, function: Callable[..., Any], item: Item, options: Any) -> Answer:
        try:
            process = self._take()
        except OSError as error:
            return Failed("worker", f"No process could be started for it: {error.strerror}.")
        timeout_s = self._timeout_s or self._time_for(item)
        status = None
        if function is inspect and isinstance(item.source, Path):
            with contextlib.suppress(OSError):
                status = item.source.stat()
        answer = process.call((function, item, self._processor, options), timeout_s)
        for line in process.said():
            logger.log(logging.WARNING if answer is None else logging.INFO, "%s: %s", one_line(item.name), line)
        if isinstance(answer, Inspected):
            answer = replace(answer, status=status)
        with self._lock:
            self._busy.discard(process)
            if answer is not None:
                self._idle.append(process)
                return answer
        how = process.end()
        if not self._closed:
            logger.warning("A decoder died on %s: %s", item.name, how)
        return process.blame

    def _time_for(self, item: Item) -> float:
        base = _TIMEOUT_S if item.kind == "image" else self._processor.limits.max_duration_s / _VIDEO_SHARE
        try:
            return max(base, _TIMEOUT_S) + item.num_bytes / _BYTES_PER_S
        except OSError:
            return _TIMEOUT_S

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
        self._is_wrong = False
        # No pipe: nobody has to read it meanwhile, and it is there when the process has died.
        self._said = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `end`
        self._child = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            # Where this process finds its modules; Ctrl-C is for the parent alone.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,
        )

    @property
    def blame(self) -> Failed:
        """Why the last call has no answer."""
        if self._timed_out:
            return Failed("timeout", "Reading it took too long and was ended. Check the file, or leave it out.")
        if self._is_wrong:
            return Failed("crash", "The decoder answered nonsense. The file may be hostile: leave it out.")
        return Failed("crash", "The decoder crashed on it. The file is damaged, or hostile: leave it out.")

    def call(
        self, message: tuple[Callable[..., Answer], Item, MediaProcessor, dict[str, Any]], timeout_s: float
    ) -> Answer | None:
        """What the child answers; None where it died, or was killed: its time was over, or it answered nonsense."""
        _, item, processor, options = message
        timer = threading.Timer(timeout_s, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            stdin = cast(BinaryIO, self._child.stdin)
            pickle.dump(message, stdin, protocol=pickle.HIGHEST_PROTOCOL)
            stdin.flush()
            return read_answer(cast(BinaryIO, self._child.stdout), item, processor, options.get("form"))
        except (OSError, EOFError):
            return None
        except ValueError as error:
            logger.warning("A decoder's answer is none: %s", error)
            self._is_wrong = True
            self.kill()
            return None
        finally:
            timer.cancel()

    def said(self) -> list[str]:
        """What libraries wrote since the last call, the last lines of it; none of it is trusted."""
        num_bytes = self._said.tell()
        if not num_bytes:
            return []
        self._said.seek(0)
        lines = self._said.read(_MAX_SAID_BYTES).decode(errors="replace").splitlines()
        # The offset is the child's, too: it goes on at the start.
        self._said.seek(0)
        self._said.truncate()
        lines = [one_line(line)[:_MAX_LINE] for line in dict.fromkeys(lines) if line.strip()]
        # An exception is told at the end.
        more = [f"{len(lines) - _MAX_SAID_LINES} lines, and then:"] if len(lines) > _MAX_SAID_LINES else []
        return more + lines[-_MAX_SAID_LINES:]

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
        self._said.close()
        return f"exit status {self._child.returncode}"

    def _give_up(self) -> None:
        self._timed_out = True
        self.kill()
