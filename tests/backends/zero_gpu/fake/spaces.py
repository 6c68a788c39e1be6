"""Stands for Hugging Face's `spaces` on ZeroGPU: a call forks, its values are pickled, and the child is thrown away.

As there: the fork happens in the thread that draws from the generator; arguments and results go through a pipe; the
task runs in a thread of the child; a closed generator sets a flag that is looked at behind each of the child's
yields; an exception arrives as its class's name, and the end of the process as "GPU task aborted".
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

# What must not exist in a process that forks for a GPU call.
FORBIDDEN = {
    "Engine",
    "AsyncEngine",
    "FileThread",
    "CachePools",
    "DiskTier",
    "DiskStore",
    "Connection",
    "ThreadPoolExecutor",
}


@dataclass
class GpuCall:
    """What was seen of one call."""

    duration: Any
    pid: int = 0
    threads: list[str] = field(default_factory=list)
    forbidden: list[str] = field(default_factory=list)
    num_values: int = 0
    closed: bool = False


calls: list[GpuCall] = []


class Error(Exception):
    """Like gradio.Error: a title and a message."""

    def __init__(self, title: str, message: str) -> None:
        super().__init__(message)
        self.title = title


def GPU(task: Callable[..., Any] | None = None, *, duration: Any = None, size: str | None = None) -> Any:
    if task is None:
        return lambda function: GPU(function, duration=duration, size=size)

    def run(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        call = GpuCall(duration(*args, **kwargs) if callable(duration) else duration)
        calls.append(call)
        call.threads = [thread.name for thread in threading.enumerate()]
        found = {f"{type(thing).__module__}.{type(thing).__name__}" for thing in gc.get_objects()}
        call.forbidden = sorted(name for name in found if _is_forbidden(name))
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            thread = threading.Thread(target=_serve, args=(task, theirs))
            thread.start()
            thread.join()
            os._exit(0)
        theirs.close()
        call.pid = pid
        try:
            ours.send((args, kwargs))
            yield from _draw(call, ours)
        finally:
            ours.close()
            os.waitpid(pid, 0)

    return run


def _is_forbidden(name: str) -> bool:
    module, _, kind = name.rpartition(".")
    return kind in FORBIDDEN and module.split(".")[0] in ("qwen35mm", "sqlite3")


def _draw(call: GpuCall, pipe: Connection) -> Generator[Any, None, None]:
    while True:
        kind, value = _receive(pipe)
        if kind == "error":
            raise Error("ZeroGPU worker error", value)
        if kind == "end":
            call.closed = value
            return
        call.num_values += 1
        try:
            yield value
        except GeneratorExit:
            pipe.send("stop")
            while kind == "value":
                kind, value = _receive(pipe)
            call.closed = value is True
            raise


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        raise Error("ZeroGPU worker error", "GPU task aborted") from None


def _serve(task: Callable[..., Any], pipe: Connection) -> None:
    args, kwargs = pipe.recv()
    generator = task(*args, **kwargs)
    closed = False
    try:
        for value in generator:
            if pipe.poll():
                generator.close()
                closed = True
                break
            pipe.send(("value", value))
    except Exception as error:
        pipe.send(("error", type(error).__name__))
    pipe.send(("end", closed))
