"""The processes that read media: one per concurrent caller, and a few idle ones for the next."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from qwen35mm.decoding.answers import Answer, Reads
from qwen35mm.decoding.child import Work
from qwen35mm.decoding.process import CLOCKS, Process, one_line
from qwen35mm.errors import DecoderCrashError, DecoderTimeoutError, EngineError
from qwen35mm.pools import Asker
from qwen35mm_preprocess import MediaLimits
from qwen35mm_preprocess.say import Said, english, say
from qwen35mm_preprocess.types import Progress

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Slower work is stuck: a base time, a second per so many bytes, and for videos a share of the longest duration.
LEAST_TIMEOUT_S = 60.0
_BYTES_PER_S, _VIDEO_SHARE = 1 << 20, 24
# An idle process takes 30 MiB; starting one takes a third of a second.
IDLE_S = 300.0
MOST_IDLE = 4


def timeout_for(
    num_bytes: int, limits: MediaLimits, *, reads_video: bool = False, least_s: float = LEAST_TIMEOUT_S
) -> float:
    """The most seconds that reading a medium may take.

    Args:
        reads_video: whether frames of the whole video are decoded.
        least_s: the limit for an empty medium.
    """
    base_s = max(limits.max_duration_s / _VIDEO_SHARE, least_s) if reads_video else least_s
    return base_s + num_bytes / _BYTES_PER_S


class Decoders:
    """Reads media in child processes. Each serves one caller at a time and is kept for the next one for a while.

    If a process dies over a medium, or takes too long, that is an error of this medium alone; the process is replaced.
    Callers are threads and bound the number of processes. Thread-safe; a forked process gets decoders of its own.

    Args:
        limits: of media; the limits of the processes follow from them. None takes the defaults.
        timeout_s: the most seconds for a job, instead of the caller's.
        idle_s: seconds without work after which a process ends.
        most_idle: idle processes to keep; others end with their work.
    """

    def __init__(
        self,
        limits: MediaLimits | None = None,
        *,
        timeout_s: float | None = None,
        idle_s: float = IDLE_S,
        most_idle: int = MOST_IDLE,
    ) -> None:
        self._limits = limits or MediaLimits()
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._most_idle = most_idle
        self._state = _State(os.getpid())

    def call(
        self,
        function: Callable[..., Answer],
        *arguments: Any,
        name: Said,
        timeout_s: float,
        read: Reads[T],
        progress: Progress | None = None,
        asker: Asker | None = None,
    ) -> T:
        """Calls the function in a child and applies `read` to its answer.

        Args:
            function: a module's function; takes `progress` as well if given here. It and its arguments are pickled.
            name: the medium's, for messages.
            read: reads the answer's values and data, and trusts neither.
            progress: called in this thread; if it raises, the work ends.
            asker: the work ends when they leave.

        Raises:
            MediaError: the function's; or it crashed, took too long or too much memory.
            RequestError: the asker left.
            EngineError: no process could be started, or these are closed.
        """
        work = Work(function, arguments, name, self._limits, self._timeout_s or timeout_s, progress is not None)
        with self._process(name) as process:
            try:
                return process.call(work, read, progress, asker)
            finally:
                shown = one_line(english(name))
                for line in process.said():
                    logger.log(logging.INFO if process.is_usable else logging.WARNING, "%s: %s", shown, line)

    def close(self) -> None:
        """Ends the processes and their work; later calls are refused."""
        state = self._mine()
        with state.lock:
            state.is_closed = True
            if state.timer is not None:
                state.timer.cancel()
            idle = [process for process, _ in state.idle]
            state.idle.clear()
            for process in (*state.busy, *idle):
                process.kill()
        for process in idle:
            process.end()

    @contextlib.contextmanager
    def _process(self, name: Said) -> Iterator[Process]:
        """A process for this caller alone."""
        state = self._mine()
        with state.lock:
            if state.is_closed:
                raise EngineError("The program is ending: no more media are read.")
            process = state.idle.pop()[0] if state.idle else None
            if process is not None:
                state.busy.add(process)
        if process is None:
            process = self._start(state, name)
        try:
            yield process
        except (DecoderCrashError, DecoderTimeoutError):
            if not state.is_closed:
                logger.warning("A decoder died on %s: %s", one_line(english(name)), process.end())
            raise
        finally:
            with state.lock:
                stays = process.is_usable and not state.is_closed and len(state.idle) < self._most_idle
                if stays:
                    state.busy.discard(process)
                    state.idle.append((process, time.monotonic()))
                    self._watch(state)
            if not stays:
                try:
                    process.kill()
                    process.end()
                finally:
                    with state.lock:
                        state.busy.discard(process)

    def _start(self, state: _State, name: Said) -> Process:
        try:
            process = Process()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise EngineError(
                say("No process could be started to read {name} ({reason}). Try again.", name=name, reason=reason)
            ) from error
        with state.lock:
            state.busy.add(process)
            if state.is_closed:
                process.kill()
        return process

    def _watch(self, state: _State) -> None:
        """Starts a timer for when the first idle process may have been idle for too long."""
        if state.timer is None and state.idle:
            left_s = self._idle_s - (time.monotonic() - state.idle[0][1])
            state.timer = threading.Timer(max(left_s, 0.01), self._end_idle, (state,))
            state.timer.daemon, state.timer.name = True, CLOCKS
            state.timer.start()

    def _end_idle(self, state: _State) -> None:
        with state.lock:
            newest_s = time.monotonic() - self._idle_s
            idle = [process for process, since_s in state.idle if since_s <= newest_s]
            state.idle = [each for each in state.idle if each[1] > newest_s]
            state.timer = None
            if not state.is_closed:
                self._watch(state)
        for process in idle:
            process.kill()
            process.end()

    def _mine(self) -> _State:
        # A fork inherits its parent's pipes, and maybe a lock that another thread held.
        if self._state.pid != os.getpid():
            self._state = _State(os.getpid())
        return self._state


class _State:
    """The child processes of one process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.lock = threading.Lock()
        self.idle: list[tuple[Process, float]] = []
        # Until they are idle or have ended.
        self.busy: set[Process] = set()
        self.timer: threading.Timer | None = None
        self.is_closed = False
