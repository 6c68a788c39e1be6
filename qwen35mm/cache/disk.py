"""The disk tier: entries that outlive the process, in a folder that several processes may share.

Nothing that happens to the files is an error to the caller: what can't be read exactly as it was written is a miss,
what can't be written isn't kept. Both are one line in the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path

import torch

from qwen35mm.cache.disk_file import remove
from qwen35mm.cache.disk_folder import CacheFolder
from qwen35mm.cache.disk_format import (
    HEAD_BYTES,
    DiskEntry,
    Kind,
    Label,
    PackedEntry,
    UnusableFileError,
    checksum_in,
    pack,
    unpack,
)
from qwen35mm.errors import ConfigError

__all__ = ["DiskEntry", "DiskStore", "Kind"]

logger = logging.getLogger(__name__)

# How long nothing is written after a write failed: a full disk stays full for a while.
WRITE_PAUSE_S = 60.0


class DiskStore:
    """Entries of one root in `directory`; the files of other roots count towards the budget and are left alone.

    Synchronous. One thread may write while another reads, looks up and touches.

    Args:
        directory: made if it isn't there, for this user alone. Its parents too.
        root: fingerprint of everything that decides the entries' numbers, 32 bytes.
        max_bytes: the most that all files of all roots may take together.
        clock: seconds that never go back; only for the pause after a failed write.

    Raises:
        ConfigError: the directory is no folder, belongs to another user, or can't be written to.
        ValueError: a root that isn't 32 bytes.
    """

    def __init__(
        self, directory: Path, *, root: bytes, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_bytes < 0:
            raise ConfigError(f"The disk cache's size must be 0 bytes or more; got {max_bytes}.")
        # A label checks the root.
        self._root = Label("state", bytes(32), root).root
        self._max_bytes = max_bytes
        self._clock = clock
        self._folder = CacheFolder(directory, root=root, max_bytes=max_bytes)
        self._writing = threading.Lock()
        self._paused_until: float | None = None
        self._told_too_large = False

    @property
    def num_bytes(self) -> int:
        """The size of all files in the directory, of all roots; counted anew each time."""
        return sum(file.num_bytes for file in self._folder.scan())

    def contains(self, kind: Kind, address: bytes) -> bool:
        """Whether there is a file for this entry. It isn't read: `read` may still find it damaged."""
        return self.contains_under(self._root, kind, address)

    def contains_under(self, root: bytes, kind: Kind, address: bytes) -> bool:
        """`contains` for another model or other settings: tells why there is no match here."""
        return self._folder.holds_file(self._folder.path(Label(kind, address, root)))

    def other_roots(self) -> list[bytes]:
        """The roots of other models or settings that have entries in this directory."""
        return [root for root in self._folder.roots() if root != self._root]

    def read(self, kind: Kind, address: bytes) -> DiskEntry | None:
        """The entry bit for bit as it was written, or None.

        None where there is no file, and for a file that is truncated, changed, of another kind, address or root, not
        finite, not a regular file, or over the budget: such a file is removed, with one line in the log.
        """
        label = Label(kind, address, self._root)
        path = self._folder.path(label)
        try:
            with self._folder.open(path) as file:
                checksum = checksum_in(file.read(HEAD_BYTES) or b"")
                return unpack(_read_rest(file), checksum, label)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnusableFileError as error:
            outcome = "removed" if remove(path) else "it can't be removed"
            logger.warning("disk cache: %s is %s; %s", path.name, error, outcome)
        except (OSError, MemoryError) as error:
            # Too many open files, or a disk with a bad day: no proof that the file is bad.
            logger.warning("disk cache: %s can't be read (%s)", path.name, _reason(error))
        return None

    def write(
        self, kind: Kind, address: bytes, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> bool:
        """Keeps an entry; True where it is in the folder afterwards, also because it was there already.

        False where it is larger than the whole budget, and where writing fails: then nothing is written for
        `WRITE_PAUSE_S`, with one line in the log. The tensors must not change during the call.

        Raises:
            ValueError: tensors or metadata that no file can hold, or an address that isn't 32 bytes.
        """
        label = Label(kind, address, self._root)
        path = self._folder.path(label)
        with self._writing:
            if self._folder.holds_file(path):
                self._folder.touch([path])
                return True
            if self._paused_until is not None and self._clock() < self._paused_until:
                return False
            packed = pack(tensors, metadata, label)
            return self._fits(packed) and self._put(path, packed)

    def touch(self, entries: Sequence[tuple[Kind, bytes]]) -> None:
        """Marks entries as used now, in this order: the last one is removed last. Missing ones are passed over."""
        self._folder.touch(self._folder.path(Label(kind, address, self._root)) for kind, address in entries)

    def remove(self, kind: Kind, address: bytes) -> None:
        """Takes an entry out of the folder, if it is there."""
        path = self._folder.path(Label(kind, address, self._root))
        if self._folder.holds_file(path):
            remove(path)

    def _fits(self, packed: PackedEntry) -> bool:
        if packed.num_bytes <= self._max_bytes:
            return True
        if not self._told_too_large:
            self._told_too_large = True
            logger.warning(
                "disk cache: an entry of %d bytes isn't kept, all of them may take %d; this is said once",
                packed.num_bytes,
                self._max_bytes,
            )
        return False

    def _put(self, path: Path, packed: PackedEntry) -> bool:
        try:
            with self._folder.writing(path, packed.num_bytes) as file:
                packed.write_to(file)
        except OSError as error:
            self._paused_until = self._clock() + WRITE_PAUSE_S
            logger.warning(
                "disk cache: writing failed (%s); nothing is written for %.0f s", _reason(error), WRITE_PAUSE_S
            )
            return False
        self._paused_until = None
        return True


def _read_rest(file: FileIO) -> torch.Tensor:
    """What is left of a file as uint8, read straight into the tensor's memory."""
    total = file.seek(0, 2) - HEAD_BYTES
    file.seek(HEAD_BYTES)
    try:
        image = torch.empty(total, dtype=torch.uint8)
    except RuntimeError as error:
        raise MemoryError(f"no memory for {total} bytes") from error
    view = image.numpy().data
    done = 0
    while done < total:
        count = file.readinto(view[done:])
        if not count:
            raise UnusableFileError("truncated")
        done += count
    return image


def _reason(error: OSError | MemoryError) -> str:
    """The system's own words, without the path."""
    return getattr(error, "strerror", None) or type(error).__name__
