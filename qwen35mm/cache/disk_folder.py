"""The disk tier's folder: where files lie, who may see them, and how many bytes they may take.

    <directory>/v1/<root>/<first two digits of the address>/<address>.<kind>

Any number of processes share a folder without talking to each other. A file appears whole, by a rename; a file may
vanish at any time. What is being written lies beside its place under a temporary name and is locked, so that a store
that opens can tell a living writer from what a killed one left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase, FileIO
from pathlib import Path

from qwen35mm.cache.disk_file import (
    OPEN_FLAGS,
    TEMPORARY_MARK,
    check_folders,
    is_plain,
    make_folder,
    make_folders,
    remove,
    remove_leftover,
    reserve,
)
from qwen35mm.cache.disk_format import Label, UnusableFileError
from qwen35mm.errors import ConfigError

_LAYOUT = "v1"
_ROOT_NAME = re.compile(r"[0-9a-f]{64}")
_SHARD_NAME = re.compile(r"[0-9a-f]{2}")
_ENTRY_NAME = re.compile(r"[0-9a-f]{64}\.[a-z]+")
_TEMPORARY_NAME = re.compile(_ENTRY_NAME.pattern + re.escape(TEMPORARY_MARK) + "[0-9a-f]{16}")

_CAN_RENAME_OPEN_FILES = os.name != "nt"
# How often a folder is listed again because a file was renamed under the listing.
_LISTINGS = 4


@dataclass(frozen=True)
class StoredFile:
    path: Path
    num_bytes: int
    used_ns: int
    is_temporary: bool


class CacheFolder:
    """Files of all roots under `directory`, kept within `max_bytes`.

    Not for several threads that write; reading and `touch` never wait for a writer.

    Raises:
        ConfigError: `directory` is no folder, belongs to another user, or can't be written to.
    """

    def __init__(self, directory: Path, *, root: bytes, max_bytes: int) -> None:
        self._base = directory.absolute() / _LAYOUT
        self._max_bytes = max_bytes
        self._unseen_bytes = 0
        self._last_tick_ns = 0
        self._tick = threading.Lock()
        try:
            _prepare(self._base / root.hex())
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(
                f"The cache folder {directory.name!r} can't be used: {reason}. Name another with --cache-dir."
            ) from error
        for file in self.scan():
            if file.is_temporary:
                remove_leftover(file.path)
        self._evict(0)
        self._remove_empty_folders()

    def path(self, label: Label) -> Path:
        address = label.address.hex()
        return self._base / label.root.hex() / address[:2] / f"{address}.{label.kind}"

    def holds_file(self, path: Path) -> bool:
        """Whether a regular file is at `path`, reached through no link."""
        try:
            check_folders(path)
        except (NotADirectoryError, FileNotFoundError):
            return False
        return is_plain(path)

    def open(self, path: Path) -> FileIO:
        """Opens a file of at most `max_bytes` for reading, unbuffered; never waits for a pipe, never follows a link.

        Raises:
            UnusableFileError: something else is there.
            OSError: nothing is there, it is reached through a link, or it can't be opened.
        """
        check_folders(path)
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise UnusableFileError("not a regular file")
        file = FileIO(os.open(path, os.O_RDONLY | OPEN_FLAGS), "rb")
        info = os.fstat(file.fileno())
        if stat.S_ISREG(info.st_mode) and info.st_size <= self._max_bytes:
            return file
        file.close()
        raise UnusableFileError("not a regular file of a size within the budget")

    @contextlib.contextmanager
    def writing(self, path: Path, num_bytes: int) -> Iterator[BufferedIOBase]:
        """A file to write `num_bytes` into; it takes its place at `path` at the end, or is gone after an exception.

        Room is made before the first byte: the file gets its full size first (a hole), and only then is the folder
        counted. Of two processes the later one sees the other's reservation in its count, so together they stay
        within the budget without a lock between them.

        There is no fsync. A process that is killed leaves whole files, since the kernel has what was written; a
        machine that loses power may leave any bytes under the final name, and the checksum refuses those. What is
        lost then can be computed again; waiting for the disk after every entry would buy nothing.
        """
        descriptor, temporary = reserve(path, num_bytes)
        try:
            with os.fdopen(descriptor, "wb") as file:
                self._make_room(num_bytes)
                yield file
                file.flush()
                if _CAN_RENAME_OPEN_FILES:  # while it is locked, or a store that opens takes it for a leftover
                    self._put(temporary, path)
            if not _CAN_RENAME_OPEN_FILES:
                self._put(temporary, path)
        except BaseException:
            remove(temporary)
            raise

    def touch(self, paths: Iterable[Path]) -> None:
        """Marks files as used now, the last one last."""
        for path in paths:
            if self.holds_file(path):
                with contextlib.suppress(OSError):
                    self._mark_used(path)

    def scan(self) -> list[StoredFile]:
        """Every file of all roots, temporary ones too; what isn't named like one of ours isn't counted."""
        return [file for shard in self._shards() for file in _files(shard)]

    def roots(self) -> list[bytes]:
        """The roots that have at least one entry."""
        return [
            bytes.fromhex(root.name)
            for root in _folders(self._base, _ROOT_NAME)
            if any(_ENTRY_NAME.fullmatch(item.name) for shard in _folders(root, _SHARD_NAME) for item in _items(shard))
        ]

    def _put(self, temporary: Path, path: Path) -> None:
        self._mark_used(temporary)
        temporary.replace(path)

    def _mark_used(self, path: Path) -> None:
        # A clock that stands still or goes back must not turn the order of two marks around; some file systems count
        # in steps of 100 ns.
        with self._tick:
            self._last_tick_ns = tick = max(time.time_ns(), self._last_tick_ns + 1000)
        os.utime(path, ns=(tick, tick))

    def _make_room(self, num_bytes: int) -> None:
        """Removes what was used least recently until a file of `num_bytes` that is reserved already fits.

        Counting costs time, so it is done only after a 64th of the budget was written, and files are kept under
        15/16 of it: so up to four processes that know nothing of each other's last writes stay within it.
        """
        self._unseen_bytes += num_bytes
        if self._unseen_bytes > self._max_bytes // 64 and self._evict(num_bytes) > self._max_bytes:
            raise OSError(errno.ENOSPC, "the folder's budget is taken by files that can't be removed")

    def _evict(self, reserved_bytes: int) -> int:
        """Removes entries until everything, `reserved_bytes` of it ours, is within the limit; what is left in bytes."""
        files = self.scan()
        self._unseen_bytes = 0
        total = sum(file.num_bytes for file in files)
        limit = max(self._max_bytes - self._max_bytes // 16, reserved_bytes)
        # A file that this budget could never hold goes before all that it would push out.
        entries = sorted(
            (file for file in files if not file.is_temporary),
            key=lambda file: (file.num_bytes <= self._max_bytes, file.used_ns),
        )
        for file in entries:
            if total <= limit:
                break
            if remove(file.path):
                total -= file.num_bytes
        return total

    def _shards(self) -> list[Path]:
        return [shard for root in _folders(self._base, _ROOT_NAME) for shard in _folders(root, _SHARD_NAME)]

    def _remove_empty_folders(self) -> None:
        for folder in (*self._shards(), *_folders(self._base, _ROOT_NAME)):
            with contextlib.suppress(OSError):  # rmdir refuses a folder with anything in it
                folder.rmdir()


def _prepare(own: Path) -> None:
    """Makes a root's folder and those above it, private to this user, and proves that a file can be made in it."""
    base = own.parent
    directory = base.parent
    make_folders(directory)
    for folder in (directory, base, own):
        if folder != directory:
            make_folder(folder)
        info = folder.stat()
        if not stat.S_ISDIR(info.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
        if hasattr(os, "geteuid") and info.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "it belongs to another user")
        # The folder that was named may be shared on purpose; what is ours in it is not.
        if folder != directory and stat.S_IMODE(info.st_mode) & 0o077:
            folder.chmod(0o700)
    try:
        with tempfile.TemporaryFile(dir=own):
            pass
    except OSError as error:
        # What is kept can be read from a full disk too.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _items(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return list(items)
    except OSError:
        return []


def _files(shard: Path) -> list[StoredFile]:
    found: list[StoredFile] = []
    for _ in range(_LISTINGS):
        found, renamed = [], False
        for item in _items(shard):
            temporary = _TEMPORARY_NAME.fullmatch(item.name) is not None
            if not temporary and not _ENTRY_NAME.fullmatch(item.name):
                continue
            try:
                info = item.stat(follow_symlinks=False)
            except OSError:
                # A temporary file that is gone is now an entry that this listing doesn't have.
                renamed |= temporary
                continue
            if stat.S_ISREG(info.st_mode):
                found.append(StoredFile(Path(item.path), info.st_size, info.st_mtime_ns, temporary))
        if not renamed:
            break
    return found


def _folders(parent: Path, name: re.Pattern[str]) -> list[Path]:
    return [
        Path(item.path) for item in _items(parent) if name.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
    ]
