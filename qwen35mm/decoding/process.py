"""A child process that reads media, used by one caller at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from qwen35mm.decoding.answers import AnswerError, NonsenseError, Reads, receive
from qwen35mm.decoding.child import MAX_SAID_BYTES, Work
from qwen35mm.errors import DecoderCrashError, DecoderTimeoutError, RequestError
from qwen35mm.pools import Asker
from qwen35mm_preprocess.say import say
from qwen35mm_preprocess.types import Progress

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Not `-m`: the child's classes must have the names in the pickles. `-c` puts the current folder first on the path, and
# a stranger's folder may hold a json.py.
_CODE = 'import sys; sys.path[:1] == [""] and sys.path.pop(0); from qwen35mm.decoding.child import main; main()'
_COMMAND = (sys.executable, "-c", _CODE)
# The name of timer threads.
CLOCKS = "qwen35mm-decoders"
_MAX_SAID_LINES, _MAX_LINE = 5, 500
# The only variables that a child inherits. Others may hold keys and tokens.
_VARIABLES = {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "WINDIR"}
_PREFIXES = ("PYTHON", "LC_", "LD_", "DYLD_", "OMP_", "OPENBLAS_", "MALLOC_")


class Process:
    """A child process, started here. Its first work sets its limits. Raises OSError."""

    def __init__(self) -> None:
        # A file, not a pipe: nobody has to drain it, and it outlives the process.
        self._said = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `end`
        variables = {name: value for name, value in os.environ.items() if _is_for_children(name)}
        try:
            self._child = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                # The child finds the parent's modules; Ctrl-C reaches only the parent.
                env={**variables, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
                start_new_session=True,
            )
        except BaseException:
            self._said.close()
            raise
        self.is_usable = True
        self._lock = threading.Lock()
        # The job that is running: a late clock, or an asker who left, must not end the next one.
        self._work: Work | None = None
        self._ended_by = ""

    def call(self, work: Work, read: Reads[T], progress: Progress | None, asker: Asker | None) -> T:
        """Applies `read` to the child's answer. Without an answer, `is_usable` turns False.

        Raises:
            DecoderTimeoutError, DecoderCrashError: the child took too long, died, or sent an invalid answer.
            RequestError: the asker left.
            MediaError: the child's error about the medium.
        """
        stdin, stdout = cast(BinaryIO, self._child.stdin), cast(BinaryIO, self._child.stdout)
        self._work, self._ended_by = work, ""
        timer = threading.Timer(work.timeout_s, self._end_work, (work, "clock"))
        timer.daemon, timer.name = True, CLOCKS
        timer.start()
        leaving = contextlib.nullcontext() if asker is None else asker.ending(lambda: self._end_work(work, "asker"))
        try:
            with leaving:
                pickle.dump(work, stdin, protocol=pickle.HIGHEST_PROTOCOL)
                stdin.flush()
                return receive(stdout, read, progress)
        except AnswerError as answer:
            raise answer.error from None
        except (OSError, EOFError, NonsenseError) as error:
            self.kill()
            if self._ended_by == "asker":
                raise RequestError("Nobody waits for this file any more.") from None
            if self._ended_by == "clock":
                raise DecoderTimeoutError(
                    say("Reading {name} took too long, and was ended. Check the file, or leave it out.", name=work.name)
                ) from None
            if isinstance(error, NonsenseError):
                logger.warning("A decoder sent a bad answer: %s", error)
            raise DecoderCrashError(
                say("The decoder broke down over {name}: it is damaged, or hostile. Leave it out.", name=work.name)
            ) from None
        except BaseException:
            # Nobody has read the answer.
            self.kill()
            raise
        finally:
            with self._lock:
                self._work = None
            timer.cancel()
            if self._ended_by:
                self.is_usable = False

    def said(self) -> list[str]:
        """The last lines that libraries wrote since the last call; untrusted."""
        num_bytes = self._said.tell()
        if not num_bytes:
            return []
        self._said.seek(0)
        lines = self._said.read(MAX_SAID_BYTES).decode(errors="replace").splitlines()
        # The child shares the offset: it continues at the start.
        self._said.seek(0)
        self._said.truncate()
        lines = [one_line(line)[:_MAX_LINE] for line in dict.fromkeys(lines) if line.strip()]
        # Exceptions end with their message.
        more = [f"{len(lines) - _MAX_SAID_LINES} lines, and then:"] if len(lines) > _MAX_SAID_LINES else []
        return more + lines[-_MAX_SAID_LINES:]

    def kill(self) -> None:
        """Ends the child at once. Thread-safe."""
        self.is_usable = False
        self._child.kill()

    def end(self) -> str:
        """Waits for a child that was killed or died; returns how it ended."""
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

    def _end_work(self, work: Work, by: str) -> None:
        with self._lock:
            if self._work is work:
                self._ended_by = by
                self.kill()


def one_line(text: str) -> str:
    """A text from outside for the log, without control characters, which could forge lines."""
    return "".join(char if char.isprintable() else " " for char in text)


def _is_for_children(name: str) -> bool:
    return name.upper() in _VARIABLES or name.startswith(_PREFIXES)
