"""The program of a process that reads media. It takes one job after another, as pickles on standard input.

Its limits of memory and time follow from those of media. The parent logs what libraries write to standard error. The
process ends with its input, even in the middle of a job, so it doesn't outlive a killed parent.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import av.logging
import psutil

from qwen35mm.decoding.answers import Answer, send_answer, send_error, send_progress
from qwen35mm.malloc import give_back_freed
from qwen35mm_preprocess import MediaError, MediaLimitError, MediaLimits, MediaSourceError, libtiff
from qwen35mm_preprocess.say import Said, say

# A child may allocate this much more than at its start: a fixed amount for its libraries, per pixel the cost of the
# worst format (32-bit grey) or of a video's frames in flight, and three copies of the file.
_OWN_BYTES, _BYTES_PER_PIXEL, _COPIES = 1 << 30, 32, 3
# Only messages of libraries are written to files, and more of them are of no use.
MAX_SAID_BYTES = 1 << 20
# The parent's clock fires first. This one ends a child whose parent is gone while a decoder blocks the interpreter.
_GRACE_S = 5
_SOON_S = 1.0


class Work(NamedTuple):
    """One job: what is called, with what, and for how long.

    Attributes:
        name: the medium's, for messages.
        limits: the media's, which set those of the process.
        reports: whether the function takes a `progress`.
    """

    function: Callable[..., Answer]
    arguments: tuple[Any, ...]
    name: Said
    limits: MediaLimits
    timeout_s: float
    reports: bool


def main() -> None:
    """The child's program."""
    answers = os.fdopen(os.dup(1), "wb")
    # Prints of libraries must not mix with the answers.
    os.dup2(2, 1)
    messages: queue.SimpleQueue[Work] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(os.fdopen(os.dup(0), "rb"), messages), daemon=True).start()
    is_limited = False
    while True:
        asked = _next(messages)
        if not is_limited:
            _limit(asked.limits)
            is_limited = True
        with _clock(asked.timeout_s):
            try:
                send_answer(answers, work(asked, functools.partial(send_progress, answers)))
            except MediaError as error:
                send_error(answers, error)


def _next(messages: queue.SimpleQueue[Work]) -> Work:
    """The next job. If none comes soon, gives freed memory back to the system first."""
    with contextlib.suppress(queue.Empty):
        return messages.get(timeout=_SOON_S)
    give_back_freed()
    return messages.get()


def work(asked: Work, progress: Callable[[int, int], None]) -> Answer:
    """Does one job. Raises MediaError for faults of the medium."""
    try:
        return asked.function(*asked.arguments, **({"progress": progress} if asked.reports else {}))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise MediaSourceError(say("The file can't be read: {reason}.", reason=reason)) from error
    except MemoryError as error:
        raise MediaLimitError(
            say("{name} takes more memory than there is for one file. Make it smaller.", name=asked.name)
        ) from error


@contextlib.contextmanager
def _clock(timeout_s: float) -> Any:
    """Has the system end the process if the time is long over and nobody ended it."""
    if not hasattr(signal, "alarm"):  # Windows
        yield
        return
    signal.alarm(math.ceil(timeout_s) + _GRACE_S)
    try:
        yield
    finally:
        signal.alarm(0)


def _limit(limits: MediaLimits) -> None:
    """Limits the memory and files of this process where the system can, and lets libraries log errors."""
    libtiff.leave_lines()
    av.logging.set_libav_level(av.logging.ERROR)
    # PyAV's own callback takes the interpreter's lock in FFmpeg's threads; the default one only writes.
    av.logging.restore_default_callback()
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
    most_bytes = max(limits.max_image_bytes, limits.max_video_bytes)
    most = _OWN_BYTES + _BYTES_PER_PIXEL * limits.max_source_pixels + _COPIES * most_bytes
    # Not RLIMIT_AS: it counts reserved memory too, many times as much with OpenBLAS on many cores.
    for kind, value in (
        (resource.RLIMIT_DATA, psutil.Process().memory_info().data + most if psutil.LINUX else most),
        (resource.RLIMIT_FSIZE, MAX_SAID_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _receive(stream: BinaryIO, messages: queue.SimpleQueue[Work]) -> None:
    """Queues incoming jobs. At the end of the stream the process exits, even while decoding: nobody waits any more."""
    try:
        while True:
            messages.put(pickle.load(stream))
    finally:
        os._exit(0)
