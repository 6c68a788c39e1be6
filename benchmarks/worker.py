"""Engines in processes of their own, which a benchmark asks in turns: a JSON line in, a JSON line out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any


class Worker:
    """A process that runs `script` again with `--serve role` and answers requests until its input ends.

    Attributes:
        ready: what it said when it had started.
    """

    def __init__(self, script: str, argv: Sequence[str], role: str) -> None:
        command = [sys.executable, script, *argv, "--serve", role]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends one request and waits for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the process and waits until it is gone: it may have something to write first."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait() != 0:
            raise SystemExit(f"a worker ended with status {self._process.returncode}; its error stands above")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}; its error stands above")
        return json.loads(line)


def serve(ready: dict[str, Any], answer: Callable[..., dict[str, Any]]) -> None:
    """A worker's loop: says that it is ready, then calls `answer` with each request's values as arguments."""
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
