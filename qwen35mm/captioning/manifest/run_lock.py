"""The locks that a run holds on its manifest and its outputs: they die with its process, however that ends."""

from __future__ import annotations

import contextlib
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
    """A lock on the file at `path`, which is there as long as the lock is held.

    Args:
        what: what it keeps other runs from, for messages.

    Raises:
        CaptioningError: another run holds it, or the file can't be made.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path.resolve()
        with _held_lock:
            if self._path in _held:
                raise CaptioningError(_held_by(str(os.getpid()), what))
            try:
                self._descriptor = self._opened(what)
            except OSError as error:
                raise CaptioningError(
                    f"The run's folder {path.parent.name!r} can't be written to: {error.strerror}. "
                    "Make it writable, or choose another."
                ) from error
            _held.add(self._path)
        # For others' messages only: where the disk is full, the first thing that has to be kept says so.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        with _held_lock:
            if self._path not in _held:
                return
            _held.discard(self._path)
            # Windows removes no file that is open; elsewhere, nobody may lock it between the two.
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            if os.name == "nt":
                with contextlib.suppress(OSError):
                    self._path.unlink()

    def _opened(self, what: str) -> int:
        """The file's descriptor, locked. Raises OSError."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
            try:
                _lock(descriptor)
            except OSError as error:
                number = os.read(descriptor, 20)
                os.close(descriptor)
                raise CaptioningError(_held_by(number.decode("ascii", "replace").strip(), what)) from error
            # Who held it until now may have removed the file that was opened here: then others lock another.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                    return descriptor
            os.close(descriptor)


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


def _held_by(process: str, what: str) -> str:
    return (
        f"Another run (process {process or 'unknown'}) writes {what}. Wait for its end, or end it, and start again; "
        "runs at the same time need places of their own."
    )
