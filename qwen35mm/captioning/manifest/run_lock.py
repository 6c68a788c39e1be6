"""The locks that a run holds on its manifest and its outputs: they die with its process, however that ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from filelock import FileLock, Timeout

from qwen35mm.errors import CaptioningError


class RunLock:
    """A lock on the file at `path`, which is there as long as the lock is held, with the process's number in it.

    Args:
        what: what it keeps other runs from, for messages.

    Raises:
        CaptioningError: another run holds it, or the file can't be made.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path.resolve()
        self._lock = FileLock(self._path, timeout=0, thread_local=False)
        holder = ""
        try:
            # Windows lets nobody read a file that is locked.
            with contextlib.suppress(OSError):
                holder = self._path.read_text("ascii", "replace").strip()
            self._lock.acquire()
        except Timeout:
            raise CaptioningError(
                f"Another run (process {holder or 'unknown'}) writes {what}. Wait for its end, or end it, and start "
                "again; runs at the same time need places of their own."
            ) from None
        except OSError as error:
            raise CaptioningError(
                f"The run's folder {path.parent.name!r} can't be written to: {error.strerror}. "
                "Make it writable, or choose another."
            ) from error
        # For others' messages only: where the disk is full, the first thing that has to be kept says so.
        with contextlib.suppress(OSError):
            self._path.write_text(f"{os.getpid()}\n", "ascii")

    def release(self) -> None:
        if self._lock.is_locked:
            # While it is held, so that nobody else can have it; whoever waits for a file that is gone makes another.
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._lock.release()
