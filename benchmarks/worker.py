"""Engines in processes of their own, which a benchmark asks in turns: a JSON line in, a JSON line out.

A benchmark has `parse` (on `parser`'s options) and `make_worker`, from a role and the options to a `Served`. Its `main`
begins with `serves`, which is all that the processes it starts run of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

import torch


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


class Served:
    """What answers in a worker's process.

    Attributes:
        ready: what the benchmark is told when it has started.
    """

    def __init__(self, ready: dict[str, Any] | None = None) -> None:
        self.ready = ready or {}

    def answer(self, **request: Any) -> dict[str, Any]:
        """Answers one request, whose values come as arguments."""
        raise NotImplementedError

    def close(self) -> None:
        """After the last request."""


def parser(description: str | None, *, needs_model: bool = True) -> argparse.ArgumentParser:
    """The options that every benchmark of engines has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=needs_model, help="a checkpoint's folder")
    made.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    made.add_argument("--device", default="cpu")
    made.add_argument("--threads", type=int, help="as many as torch takes by itself if left out")
    made.add_argument("--serve", help=argparse.SUPPRESS)
    return made


def numbers(text: str) -> list[int]:
    """An option's "1,2,3"."""
    return [int(number) for number in text.split(",")]


def serves(arguments: argparse.Namespace, make_worker: Callable[[str, argparse.Namespace], Served]) -> bool:
    """Sets the threads; in a worker's process, answers its requests until there are no more, and says so."""
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    if not arguments.serve:
        return False
    with closing(make_worker(arguments.serve, arguments)) as worker:
        print(json.dumps(worker.ready), flush=True)
        for line in sys.stdin:
            print(json.dumps(worker.answer(**json.loads(line))), flush=True)
    return True
