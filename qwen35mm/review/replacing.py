"""Regular expressions of a person, within a limit of time."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess.say import say

# For one caption. A sound expression takes microseconds.
MOST_S = 5.0
_CHILD = Path(__file__).with_name("replacing_child.py")


class Replacing:
    """Replaces by a regular expression in a child process, which ends with this object. Usable from all threads.

    Args:
        compiled: the expression.
        template: the new text, where `\\1` and `\\g<name>` stand for groups.
    """

    def __init__(self, compiled: re.Pattern[str], template: str) -> None:
        self._header = [compiled.pattern, compiled.flags & ~re.UNICODE, template]
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __call__(self, text: str) -> str:
        """The text after the replacement.

        Raises:
            CaptioningError: it took over `MOST_S` seconds, or all memory.
        """
        with self._lock:
            child = self._child or self._begin()
            assert child.stdin is not None
            assert child.stdout is not None
            clock = threading.Timer(MOST_S, child.kill)
            clock.daemon = True
            clock.start()
            try:
                child.stdin.write(f"{json.dumps(text)}\n")
                child.stdin.flush()
                answer = child.stdout.readline()
            except BrokenPipeError:
                answer = ""
            finally:
                clock.cancel()
            if not answer.endswith("\n"):
                self._child = None
                _end(child)
                raise CaptioningError(
                    say("The regular expression takes too long for some captions. Make it simpler: nest no * or +.")
                )
            return json.loads(answer)

    def _begin(self) -> subprocess.Popen[str]:
        # -I: neither this folder nor the environment affects the child's imports.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",
        )
        weakref.finalize(self, _end, self._child)
        assert self._child.stdin is not None
        self._child.stdin.write(f"{json.dumps(self._header)}\n")
        return self._child


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        # The child may end before it has read everything.
        with contextlib.suppress(BrokenPipeError):
            stream.close()
