"""The processes that read media: as many as there are callers at one time, and a few that wait for the next."""

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

# What is slower is stuck: so long, and a second for each so many bytes; a long video is a share of its length besides.
LEAST_TIMEOUT_S = 60.0
_BYTES_PER_S, _VIDEO_SHARE = 1 << 20, 24
# A process takes 30 MiB of its own while it waits, and a third of a second to start.
IDLE_S = 300.0
MOST_IDLE = 4


def timeout_for(
    num_bytes: int, limits: MediaLimits, *, reads_video: bool = False, least_s: float = LEAST_TIMEOUT_S
) -> float:
    """The most seconds that a medium may take.

    Args:
        reads_video: whether frames from all of a video are decoded.
        least_s: what a medium without bytes may take.
    """
    base_s = max(limits.max_duration_s / _VIDEO_SHARE, least_s) if reads_video else least_s
    return base_s + num_bytes / _BYTES_PER_S


class Decoders:
    """Reads media in child processes. Each is used by one caller at a time, and kept for the next one for a while.

    A medium over which a process dies, or doesn't end in time, is an error of that medium alone; the process is
    replaced. Callers are threads: how many processes there are is theirs to bound. Usable from any thread; a process
    that was forked has decoders of its own.

    Args:
        limits: of media; those of the processes follow from them. None takes the defaults.
        timeout_s: the most that a piece of work may take, in place of what its caller says.
        idle_s: after so long without work a process ends.
        most_idle: processes that wait for work; further ones end with theirs.
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
        """What `read` makes of the function's answer, which a child calls with these arguments.

        Args:
            function: of a module; it is given a `progress` too, where there is one here. It and its arguments are
                pickled.
            name: the medium's, for messages.
            read: is given the answer's values and data, and trusts neither.
            progress: called in this thread; what it raises ends the work.
            asker: when they leave, the work ends.

        Raises:
            MediaError: what the function raises of them; or it crashed, took too long or too much memory.
            RequestError: the asker has left.
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
        """Ends the processes, and what they are at; what comes from now on is refused."""
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
        """A process that nobody else uses."""
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
                state.busy.discard(process)
                stays = process.is_usable and not state.is_closed and len(state.idle) < self._most_idle
                if stays:
                    state.idle.append((process, time.monotonic()))
                    self._watch(state)
            if not stays:
                process.kill()
                process.end()

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
        """Has idle processes looked at when the first of them may be idle for too long."""
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
        # A fork has its parent's pipes, and maybe its lock as another thread held it.
        if self._state.pid != os.getpid():
            self._state = _State(os.getpid())
        return self._state


class _State:
    """The processes of one process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.lock = threading.Lock()
        self.idle: list[tuple[Process, float]] = []
        self.busy: set[Process] = set()
        self.timer: threading.Timer | None = None
        self.is_closed = False
