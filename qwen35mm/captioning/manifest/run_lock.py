"""The lock that a run holds on its manifest: it dies with its process, however that ends."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from qwen35mm.errors import CaptioningError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Windows lets nobody read bytes that are locked, so the lock is on one behind the number that the file tells.
_LOCKED_BYTE = 1 << 20
# A process never waits for a lock of its own: POSIX locks belong to a process, and closing any descriptor of the file
# gives them up. They are used all the same, since worker processes that are forked don't inherit them.
_held: set[Path] = set()
_held_lock = threading.Lock()


class RunLock:
    """A lock on the file at `path`, made where it is missing.

    Raises:
        CaptioningError: another run holds it, or the file can't be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        with _held_lock:
            if self._path in _held:
                raise CaptioningError(_held_by(str(os.getpid())))
            try:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
            except OSError as error:
                raise CaptioningError(
                    f"The run's folder {path.parent.name!r} can't be written to: {error.strerror}. "
                    "Make it writable, or choose another."
                ) from error
            try:
                _lock(self._descriptor)
            except OSError as error:
                number = os.read(self._descriptor, 20)
                os.close(self._descriptor)
                raise CaptioningError(_held_by(number.decode("ascii", "replace").strip())) from error
            _held.add(self._path)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        with _held_lock:
            if self._path in _held:
                _held.discard(self._path)
                os.close(self._descriptor)


def _lock(descriptor: int) -> None:
    if fcntl is not None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKED_BYTE)
        return
    import msvcrt  # Windows has it, and nobody else

    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


def _held_by(process: str) -> str:
    return f"Another run (process {process or 'unknown'}) writes here. Wait for its end, or end it, and start again."
