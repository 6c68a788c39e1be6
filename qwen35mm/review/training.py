"""Trains on the captions of the page: `qwen35mm tune` in a child process, and how far it is."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
import shlex
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess.say import say

# Most lines of what the program says, and held-out losses, that the page is told.
_SHOWN = 12
_LINE_CHARS = 10_000
_STOP_S = 10.0
# `-c` and `-m` put the current folder first on the path, and a stranger's folder of pictures may hold a json.py.
PROGRAM = (
    sys.executable,
    "-c",
    'import sys; sys.path[:1] == [""] and sys.path.pop(0); from qwen35mm.cli.beside import main; main()',
)

State = Literal["none", "loading", "training", "done", "stopped", "failed"]


class Training:
    """One training at a time. Use it in one event loop.

    Args:
        words: the command that trains, from `qwen35mm` on.
        chooses: whether it can learn from accepted captions alone.
        program: runs it in place of `qwen35mm`, and ends with its input.
    """

    def __init__(
        self,
        words: Sequence[str],
        program: Sequence[str] = PROGRAM,
        *,
        chooses: bool = True,
    ) -> None:
        self.command = shlex.join(words)
        self._adapter = words[words.index("--out") + 1]
        self._chooses = chooses
        self._run = [*program, *words[1:], "--json"]
        self._child: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None
        self._state: State = "none"
        self._accepted = self._stops = False
        self._changing = asyncio.Lock()
        self._clear()

    def _clear(self) -> None:
        self._progress: dict[str, Any] = {}
        self._losses: deque[dict[str, Any]] = deque(maxlen=_SHOWN)
        self._answers: dict[str, dict[str, Any]] = {}
        self._said: deque[str] = deque(maxlen=_SHOWN)

    def look(self) -> dict[str, Any]:
        """How far it is, for the page."""
        return {
            "state": self._state,
            "command": self.command,
            "adapter": self._adapter,
            "chooses": self._chooses,
            "accepted": self._accepted,
            **self._progress,
            "losses": [*self._losses],
            "answers": [*self._answers.values()],
            "said": [*self._said],
        }

    async def start(self, *, accepted: bool = False, restart: bool = False) -> None:
        """Starts it, or resumes what was stopped; nothing while it runs.

        Args:
            accepted: whether to learn from accepted captions alone.
            restart: whether to begin anew, in place of the adapter that is there.

        Raises:
            CaptioningError: the program can't be started.
        """
        async with self._changing:
            if not self._runs():
                await self._start(accepted=accepted and self._chooses, restart=restart)

    async def _start(self, *, accepted: bool, restart: bool) -> None:
        self._clear()
        self._state, self._accepted, self._stops = "loading", accepted, False
        options = {"--accepted": accepted, "--restart": restart}
        try:
            self._child = await asyncio.create_subprocess_exec(
                *self._run,
                *(name for name, is_set in options.items() if is_set),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            self._state = "failed"
            why = str(error.strerror)
            raise CaptioningError(say("The training can't be started: {why}.", why=why)) from error
        self._following = asyncio.create_task(self._follow(self._child))

    async def stop(self) -> None:
        """Stops it. What is learned by the last saved step stays, and `start` resumes there."""
        async with self._changing:
            if self._child is None or self._following is None or not self._runs():
                return
            self._stops = True
            assert self._child.stdin is not None
            self._child.stdin.close()
            done, _ = await asyncio.wait((self._following,), timeout=_STOP_S)
            if not done:
                with contextlib.suppress(ProcessLookupError):
                    self._child.kill()
                await asyncio.wait((self._following,))

    def _runs(self) -> bool:
        return self._following is not None and not self._following.done()

    async def _follow(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        assert child.stderr is not None
        await asyncio.gather(self._read_events(child.stdout), self._read_words(child.stderr))
        code = await child.wait()
        self._state = "done" if code == 0 else "stopped" if self._stops else "failed"

    async def _read_events(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    self._take(event.pop("event", ""), event)

    def _take(self, name: str, values: dict[str, Any]) -> None:
        if name == "held_out":
            self._losses.append(values)
        elif name == "answer":
            known = self._answers.setdefault(values["name"], {**values, "before": values["answer"]})
            known["answer"] = values["answer"]
        else:
            self._progress |= values
            if self._state == "loading":
                self._state = "training"

    async def _read_words(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            self._said.append(line[:_LINE_CHARS])


async def _lines(stream: asyncio.StreamReader) -> AsyncGenerator[str, None]:
    """Lines that aren't empty; a bar that is drawn over itself is one, too."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    while data := await stream.read(1 << 16):
        *whole, rest = re.split(r"[\r\n]", rest + decoder.decode(data))
        for line in whole:
            if line.strip():
                yield line
        rest = rest[-_LINE_CHARS:]
    if rest.strip():
        yield rest
