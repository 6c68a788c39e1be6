"""Single files and folders of the disk tier: private, never through a link, and locked while they are written."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Windows has neither links to refuse nor pipes in folders; there files must be opened as binary.
OPEN_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
# Between a file's name and the random end of its temporary one's.
TEMPORARY_MARK = ".tmp-"
_ATTEMPTS = 4
# Where files can't be locked, a temporary file of this age belongs to nobody.
_LEFTOVER_AGE_S = 3600


def remove(path: Path) -> bool:
    """Removes a file or a link; False where something is still there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def make_folders(folder: Path) -> None:
    """Makes a folder and what is missing above it."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        make_folder(missing)


def make_folder(folder: Path) -> None:
    """Makes a folder for this user alone; one that is there, and no link, is fine."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        _check_folder(folder)


def check_folders(path: Path) -> None:
    """Raises NotADirectoryError where one of the two folders above `path` is a link or a file, FileNotFoundError where
    it is missing.
    """
    for folder in (path.parent.parent, path.parent):
        _check_folder(folder)


def _check_folder(folder: Path) -> None:
    if not is_plain(folder, stat.S_ISDIR):
        if not os.path.lexists(folder):
            raise FileNotFoundError(errno.ENOENT, "it is gone")
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")


def reserve(path: Path, num_bytes: int) -> tuple[int, Path]:
    """A new, locked file of full size beside `path`: its descriptor and its path.

    Raises:
        OSError: there is no room, the folder is reached through a link, or whatever else the system says.
    """
    for _ in range(_ATTEMPTS):
        temporary = path.with_name(f"{path.name}{TEMPORARY_MARK}{os.urandom(8).hex()}")
        try:
            make_folders(path.parent)
            check_folders(path)
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
        except FileNotFoundError:
            continue  # another process opened the cache just now and removed the folder, which was empty
        try:
            # Or it saw this file before the lock, and removed it.
            if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
                os.ftruncate(descriptor, num_bytes)
                return descriptor, temporary
        except BaseException:
            os.close(descriptor)
            remove(temporary)
            raise
        os.close(descriptor)
        remove(temporary)
    raise OSError(errno.EAGAIN, "temporary files vanish as soon as they are made")


def _lock(descriptor: int) -> bool | None:
    """Locks an open file until it is closed, also by the end of the process; False where somebody else has the lock.

    None where files can't be locked here.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_leftover(temporary: Path) -> None:
    """Removes a temporary file whose writer is gone; one that is being written stays."""
    try:
        descriptor = os.open(temporary, os.O_RDWR | OPEN_FLAGS)
    except OSError:
        return
    try:
        locked = _lock(descriptor)
        old = time.time() - os.fstat(descriptor).st_mtime > _LEFTOVER_AGE_S
        if locked:
            # Under the lock: a writer that made the file just now, and locks it next, then sees that it is gone.
            remove(temporary)
    finally:
        os.close(descriptor)
    if locked is None and old:
        remove(temporary)


def is_plain(path: Path, is_type: Callable[[int], bool] = stat.S_ISREG) -> bool:
    """Whether a regular file, or what else `is_type` accepts, is at `path`; a link is neither."""
    try:
        return is_type(os.lstat(path).st_mode)
    except OSError:
        return False
