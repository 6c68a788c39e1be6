"""Stands for Hugging Face's `spaces` on ZeroGPU: a call forks, its values are pickled, and the child is thrown away.

As there: the fork happens in the thread that draws from the generator; arguments and results go through pipes; the
task runs in a thread of the child; a closed generator sets a flag that is looked at behind each of the child's
yields; an exception arrives as its class's name, and the end of the process as "GPU task aborted".
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import struct
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

HEAD = struct.Struct("<Q")
# What must not exist in a process that forks for a GPU call.
FORBIDDEN = {
    "Engine",
    "AsyncEngine",
    "Threads",
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
        from_child, child_out = os.pipe()
        child_in, to_child = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(from_child)
            os.close(to_child)
            thread = threading.Thread(target=_serve, args=(task, child_in, child_out))
            thread.start()
            thread.join()
            os._exit(0)
        os.close(child_out)
        os.close(child_in)
        call.pid = pid
        try:
            yield from _draw(call, from_child, to_child, pickle.dumps((args, kwargs)))
        finally:
            os.close(from_child)
            os.close(to_child)
            os.waitpid(pid, 0)

    return run


def _is_forbidden(name: str) -> bool:
    module, _, kind = name.rpartition(".")
    return kind in FORBIDDEN and module.split(".")[0] in ("qwen35mm", "sqlite3")


def _draw(call: GpuCall, source: int, sink: int, arguments: bytes) -> Generator[Any, None, None]:
    _send(sink, arguments)
    while True:
        kind, value = _receive(source)
        if kind == "error":
            raise Error("ZeroGPU worker error", value)
        if kind == "end":
            call.closed = value
            return
        call.num_values += 1
        try:
            yield value
        except GeneratorExit:
            _send(sink, b"stop")
            while kind == "value":
                kind, value = _receive(source)
            call.closed = value is True
            raise


def _serve(task: Callable[..., Any], source: int, sink: int) -> None:
    args, kwargs = pickle.loads(_read(source, HEAD.unpack(_read(source, HEAD.size))[0]))
    generator = task(*args, **kwargs)
    closed = False
    try:
        for value in generator:
            if select.select([source], [], [], 0)[0]:
                generator.close()
                closed = True
                break
            _send(sink, pickle.dumps(("value", value)))
    except Exception as error:
        _send(sink, pickle.dumps(("error", type(error).__name__)))
    _send(sink, pickle.dumps(("end", closed)))


def _send(sink: int, content: bytes) -> None:
    view = memoryview(HEAD.pack(len(content)) + content)
    while view:
        view = view[os.write(sink, view) :]


def _receive(source: int) -> tuple[str, Any]:
    try:
        content = _read(source, HEAD.unpack(_read(source, HEAD.size))[0])
    except EOFError:
        raise Error("ZeroGPU worker error", "GPU task aborted") from None
    return pickle.loads(content)


def _read(source: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(source, min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
