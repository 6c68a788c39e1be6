"""The program of a process that reads media: one piece of work after the other, from pickles on its standard input.

Its limits of memory and time follow from those of media. What libraries write to its standard error is logged by its
parent. When its input ends, so does the process, whatever it is at: it doesn't outlive a parent that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from qwen35mm_preprocess import MediaError, MediaLimitError, MediaLimits, MediaSourceError, libtiff
from qwen35mm_preprocess.say import Said, say

# What a child may allocate beside what it starts with: its libraries' own, and of each pixel what the worst format
# takes (32-bit grey), or a video's frames on their way; of each byte of a file three copies.
_OWN_BYTES, _BYTES_PER_PIXEL, _COPIES = 1 << 30, 32, 3
# Nothing but what libraries say is written by a child, and of that more is of no use.
MAX_SAID_BYTES = 1 << 20
# The parent's clock comes first. This one is for a child whose parent is gone, and which a decoder won't let see that.
_GRACE_S = 5
_SOON_S = 1.0


class Work(NamedTuple):
    """A piece of work: what is called, with what, and for how long.

    Attributes:
        name: the medium's, for messages.
        limits: of media, which those of the process follow from.
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
    # Nothing that a library prints may come between the answers.
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
    """The next piece of work; what the last ones took is given back to the system where it doesn't come soon."""
    with contextlib.suppress(queue.Empty):
        return messages.get(timeout=_SOON_S)
    # glibc's; it keeps some hundred MiB else.
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    return messages.get()


def work(asked: Work, progress: Callable[[int, int], None]) -> Answer:
    """Does a piece of work. Raises MediaError for what the medium is to blame for."""
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
    """Has the system end the process where the time is over long since, and nobody ended it."""
    if not hasattr(signal, "alarm"):  # Windows
        yield
        return
    signal.alarm(math.ceil(timeout_s) + _GRACE_S)
    try:
        yield
    finally:
        signal.alarm(0)


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
        (resource.RLIMIT_FSIZE, MAX_SAID_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _receive(stream: BinaryIO, messages: queue.SimpleQueue[Work]) -> None:
    """Hands messages on; at the end of their stream nobody waits for an answer, also in the middle of a decoding."""
    try:
        while True:
            messages.put(pickle.load(stream))
    finally:
        os._exit(0)
