"""Writes files atomically, even through a kill or a power failure, and locks them."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import json
import logging
import math
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from qwen35mm.errors import CaptioningError, OutputError

logger = logging.getLogger(__name__)

_TEMPORARY = ".qwen35mm-writing-"
_LOCK = ".qwen35mm-lock-"
PIECE_BYTES = 1 << 20
_BINARY = getattr(os, "O_BINARY", 0)
# Behind the process id in a lock file.
_PAGE = " review page"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def temporary_for(path: Path) -> Path:
    """The temporary path for the file at `path`: a hidden file beside it, always under the same short name.

    So the next write replaces the leftover of a killed one.
    """
    return path.with_name(_TEMPORARY + _short(path.name))


def lock_for(path: Path) -> Path:
    """The lock file of the run that writes the file at `path`: hidden beside it."""
    return path.with_name(_LOCK + _short(path.name))


def remove_leftovers(folder: Path) -> None:
    """Removes all temporary files from a folder that only one run writes to."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{_TEMPORARY}*"):
            path.unlink()


@contextlib.contextmanager
def replacing(path: Path, before_rename: Callable[[], None] | None = None) -> Iterator[BinaryIO]:
    """A file to write to; at the end it durably replaces the file at `path`. After an error, the old file stays.

    Args:
        before_rename: called when the new file is complete and on the disk, under its temporary name.

    Raises:
        OutputError: the disk is full, read-only or fails.
    """
    temporary = temporary_for(path)
    with disk_errors(path.name):
        try:
            with create(temporary) as file:
                with contextlib.suppress(OSError):
                    temporary.chmod(stat.S_IMODE(path.stat().st_mode))
                yield file
                sync(file)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        if before_rename is not None:
            sync_folder(path.parent)
            before_rename()
        temporary.replace(path)
        sync_folder(path.parent)


def create(path: Path) -> BinaryIO:
    """Creates a file, in place of a killed run's leftover; never follows a link. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666), "w+b")


def sync(file: BinaryIO) -> None:
    """Flushes a file to the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to the disk, if the system can open folders. Raises OSError."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks can't and needn't
            raise
    finally:
        os.close(descriptor)


def copy_file(path: Path, copy: Path) -> None:
    """Copies a file durably, with its mode and times, in place of what is at `copy`. Raises OSError, OutputError."""
    status = path.stat()
    with path.open("rb") as source, replacing(copy) as file:
        file.writelines(pieces(source))
    with contextlib.suppress(OSError):
        copy.chmod(stat.S_IMODE(status.st_mode))
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))


def move_file(path: Path, to: Path) -> None:
    """Moves a file or a link durably, never over another file. The new folder exists.

    A kill may leave the file under both names; the same call then removes the old one.

    Raises:
        OSError, OutputError: it stays where it was. FileExistsError: something else is at `to`.
    """
    if os.path.lexists(to):
        is_itself = path.parent.samefile(to.parent) and path.name.casefold() == to.name.casefold()
        if is_itself or not is_same(path, to):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(to))
    elif not _second_name(path, to):
        try:
            path.replace(to)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            if path.is_symlink():
                to.symlink_to(path.readlink())
            else:
                copy_file(path, to)
    sync_folder(to.parent)
    if os.path.lexists(path):
        try:
            path.unlink()
        except OSError:
            to.unlink()
            raise
    sync_folder(path.parent)


def is_same(path: Path, other: Path) -> bool:
    """Whether both are one file, or files with the same bytes. Raises OSError."""
    if path.is_symlink() or other.is_symlink():
        return path.is_symlink() and other.is_symlink() and path.readlink() == other.readlink()
    return path.samefile(other) or filecmp.cmp(path, other, shallow=False)


def _second_name(path: Path, to: Path) -> bool:
    """Gives a file a second name, never that of another file; False if the disk can't. Raises FileExistsError."""
    if path.is_symlink():
        return False
    try:
        os.link(path, to)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def pieces(file: BinaryIO, num_bytes: int = sys.maxsize, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The next bytes of a file in chunks; fewer if the file ends before. Raises OSError."""
    while num_bytes and (piece := file.read(min(num_bytes, piece_bytes))):
        num_bytes -= len(piece)
        yield piece


def crc_of(file: BinaryIO, num_bytes: int) -> int | None:
    """The CRC-32 of the next bytes; None if there are fewer. Raises OSError."""
    crc = 0
    for piece in pieces(file, num_bytes):
        num_bytes -= len(piece)
        crc = zlib.crc32(piece, crc)
    return crc if num_bytes == 0 else None


def is_whole(path: Path, num_bytes: int, crc: int) -> bool:
    """Whether a file of this length and CRC-32 is at `path`. Raises OSError."""
    if not path.is_file() or path.stat().st_size != num_bytes:
        return False
    with path.open("rb") as file:
        return crc_of(file, num_bytes) == crc


def is_gone(path: Path | str) -> bool:
    """Whether there certainly is nothing at `path`. False if its folder can't be entered or the disk fails."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


@contextlib.contextmanager
def disk_errors(label: str) -> Iterator[None]:
    """Turns OSError into OutputError.

    Args:
        label: what was being written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = f"The disk is full: {label} can't be written. Free some space and run the same command again."
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            message = f"{label} can't be written: {error.strerror}. Make its folder writable, or choose another."
        else:
            message = f"{label} can't be written: {error.strerror or error}. Check the disk, then run again."
        raise OutputError(message, error.errno) from error


def json_text(value: Any) -> str:
    """JSON on one line. Half surrogate pairs become escapes, and numbers that JSON lacks become null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


class RunLock:
    """A lock on the file at `path`. The file exists while the lock is held, and says which process holds it.

    The lock ends with its process, however that ends.

    Args:
        what: what it protects from other runs, for messages.
        for_page: whether the review page holds it, for others' messages.
        needed: whether to refuse a disk that can't lock files, such as some network disks; otherwise it is only logged.

    Raises:
        CaptioningError: another run holds the lock, the file can't be created, or a needed lock isn't possible.
    """

    def __init__(self, path: Path, what: str, *, for_page: bool = False, needed: bool = False) -> None:
        self._path = path.resolve()
        self._lock = FileLock(self._path, timeout=0, thread_local=False)
        holder = ""
        try:
            # On Windows, nobody can read a locked file.
            with contextlib.suppress(OSError):
                holder = self._path.read_text("ascii", "replace").strip()
            self._lock.acquire()
        except Timeout:
            raise CaptioningError(_held(what, holder)) from None
        except (OSError, NotImplementedError) as error:
            number, reason = getattr(error, "errno", errno.ENOSYS), getattr(error, "strerror", "not implemented")
            if number in _NO_LOCKS:
                message = (
                    f"The disk of {path.parent.name!r} can't lock files ({reason}), so another run could write {what} "
                    "at the same time."
                )
                if needed:
                    raise CaptioningError(
                        f"{message} Put the run's folder on a local disk, with --state-dir."
                    ) from error
                logger.warning("%s Don't start another one for it.", message)
                return
            raise CaptioningError(
                f"The run's folder {path.parent.name!r} can't be written to: {reason}. "
                "Make it writable, or choose another."
            ) from error
        # Only for other runs' messages. If the disk is full, the first real write reports it.
        with contextlib.suppress(OSError):
            self._path.write_text(f"{os.getpid()}{_PAGE if for_page else ''}\n", "ascii")

    def release(self) -> None:
        if self._lock.is_locked:
            # Removed while locked, so that no other run can have it. A run that waits for it creates another.
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._lock.release()


def _held(what: str, holder: str) -> str:
    process = holder.removesuffix(_PAGE) or "unknown"
    if holder.endswith(_PAGE):
        return (
            f"The review page (process {process}) has these captions open. Change them there, or end the page with "
            "Ctrl-C in its terminal and start again."
        )
    return (
        f"Another run (process {process}) writes {what}. Wait for its end, or end it, and start again; runs at the "
        "same time need places of their own."
    )


def _short(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
