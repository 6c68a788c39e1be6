"""The disk tier's files: entries that outlive the process, in a folder that processes may share.

    <directory>/v2/<address>.<kind>    a SHA-256 over the file's name and all that follows, then safetensors
    <directory>/v2/unfinished          the file being written
    <directory>/v2/lock                held while writing or evicting

File problems raise no errors: an entry that can't be read exactly as written is a miss, one that can't be written isn't
kept. Both write one line to the log.

Readers take no lock: a file appears whole, by a rename, and may vanish at any time. There is no fsync. A killed process
leaves whole files, since the kernel has the written data. A power loss may leave any bytes under a final name, which
the checksum refuses. Lost entries can be computed again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import filelock
import safetensors
import safetensors.torch
import torch

from qwen35mm.errors import ConfigError

logger = logging.getLogger(__name__)

# "root": an empty entry that records a root whose addresses are, or were, here.
Kind = Literal["kv", "state", "vision", "root"]

# Pause after a failed write: a full disk stays full for a while.
WRITE_PAUSE_S = 60.0
LOCK_TIMEOUT_S = 10.0
_FORMAT = b"qwen35mm disk 3\n"
_CHECKSUM_BYTES = 32
# A mark that is further ahead was made by a wrong clock: it says nothing.
_AHEAD_NS = 24 * 3600 * 10**9
_ENTRY_NAME = re.compile(r"[0-9a-f]{64}\.[a-z]+")


class DiskStore:
    """Entries of any model in `directory`, by kind and address (32 bytes).

    Synchronous. One thread may write, touch and remove while another reads and looks up.

    Args:
        directory: created if missing, with its parents, for this user only.
        max_bytes: most bytes of all files together.
        clock: seconds that never go back; only for the pause after a failed write.

    Raises:
        ConfigError: the directory is no folder, belongs to another user, or isn't writable.
    """

    def __init__(self, directory: Path, *, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        if max_bytes < 0:
            raise ConfigError(f"The disk cache's size must be 0 bytes or more; got {max_bytes}.")
        self._base = directory.absolute() / "v2"
        self._unfinished = self._base / "unfinished"
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = filelock.FileLock(self._base / "lock", timeout=LOCK_TIMEOUT_S, mode=0o600)
        self._paused_until: float | None = None
        self._told_too_large = False
        self._uncounted_bytes = 0
        self._last_tick_ns = 0
        try:
            with self._writing():
                self._unfinished.touch(0o600)  # proves that files can be made here
                self._evict(0)
        except filelock.Timeout:
            logger.warning("disk cache: another process has held the lock for %.0f s", LOCK_TIMEOUT_S)
        except OSError as error:
            # A full disk can still be read.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise ConfigError(
                    f"The cache folder {directory.name!r} can't be used: {_reason(error)}. "
                    "Name another with --cache-dir."
                ) from error

    def contains(self, kind: Kind, address: bytes) -> bool:
        """Whether this entry has a file; `read` may still find it damaged."""
        try:
            return stat.S_ISREG(self._path(kind, address).lstat().st_mode)
        except OSError:
            return False

    def addresses(self, kind: Kind) -> list[bytes]:
        """The addresses of all entries of a kind."""
        return [bytes.fromhex(path.stem) for path, _ in self._files() if path.suffix == f".{kind}"]

    def read(self, kind: Kind, address: bytes) -> dict[str, torch.Tensor] | None:
        """The entry's tensors in host memory, bit for bit as they were written, or None.

        None if there is no file, or if it is truncated, changed, of another kind or address, not finite, not a regular
        file, or over the budget. Such a file is removed, with one line in the log.
        """
        path = self._path(kind, address)
        try:
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_size > self._max_bytes:
                raise _UnusableFileError("not a regular file of a size within the budget")
            with path.open("rb") as file:
                checksum, image = file.read(_CHECKSUM_BYTES), file.read()
            if checksum != _checksum(kind, address, image):
                raise _UnusableFileError("damaged, or another entry's")
            return _unpack(image)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except _UnusableFileError as error:
            outcome = "removed" if _remove(path) else "it can't be removed"
            logger.warning("disk cache: %s is %s; %s", path.name, error, outcome)
        except (OSError, MemoryError) as error:
            # Too many open files or a temporary disk error: the file may be good.
            logger.warning("disk cache: %s can't be read (%s)", path.name, _reason(error))
        return None

    def write(self, kind: Kind, address: bytes, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Keeps an entry; True if it is in the folder afterwards, also if it was there before.

        False if it is larger than the whole budget, or if writing fails. After a failure nothing is written for
        `WRITE_PAUSE_S`, with one line in the log. The tensors must not change during the call.
        """
        if self.contains(kind, address):
            self.touch([(kind, address)])
            return True
        if self._paused_until is not None and self._clock() < self._paused_until:
            return False
        image = safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
        num_bytes = _CHECKSUM_BYTES + len(image)
        if num_bytes > self._max_bytes:
            if not self._told_too_large:
                text = "disk cache: an entry of %d bytes isn't kept, all of them may take %d; this is said once"
                logger.warning(text, num_bytes, self._max_bytes)
            self._told_too_large = True
            return False
        try:
            with self._writing():
                self._make_room(num_bytes)
                with open(self._unfinished, "xb", opener=_open_private) as file:
                    file.write(_checksum(kind, address, image))
                    file.write(image)
                self._mark_used(self._unfinished)
                self._unfinished.replace(self._path(kind, address))
        except OSError as error:
            self._paused_until = self._clock() + WRITE_PAUSE_S
            logger.warning(
                "disk cache: writing failed (%s); nothing is written for %.0f s", _reason(error), WRITE_PAUSE_S
            )
            return False
        self._paused_until = None
        return True

    def touch(self, entries: Sequence[tuple[Kind, bytes]]) -> None:
        """Marks entries as used now, in this order: the last one is evicted last. Ignores missing ones."""
        for kind, address in entries:
            with contextlib.suppress(OSError):
                self._mark_used(self._path(kind, address))

    def remove(self, kind: Kind, address: bytes) -> None:
        """Removes an entry, if it is there."""
        _remove(self._path(kind, address))

    def _path(self, kind: Kind, address: bytes) -> Path:
        return self._base / f"{address.hex()}.{kind}"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Creates the folder and locks it for writing. Removes an unfinished file, this writer's or a killed one's."""
        _make_private(self._base)
        with self._lock:
            _remove(self._unfinished)
            try:
                yield
            finally:
                _remove(self._unfinished)

    def _make_room(self, num_bytes: int) -> None:
        """Evicts least recently used entries until a file of `num_bytes` fits.

        Counting takes time, so it happens only after a 64th of the budget was written. It keeps files under 15/16 of
        the budget, so up to four processes that don't see each other's last writes stay within it.
        """
        self._uncounted_bytes += num_bytes
        if self._uncounted_bytes > self._max_bytes // 64 and self._evict(num_bytes) > self._max_bytes:
            raise OSError(errno.ENOSPC, "the folder's budget is taken by files that can't be removed")

    def _evict(self, coming_bytes: int) -> int:
        """Removes entries until they and `coming_bytes` are within the limit; returns the resulting bytes."""
        latest = time.time_ns() + _AHEAD_NS

        def turn(file: tuple[Path, os.stat_result]) -> tuple[bool, bool, int]:
            # A file larger than the budget goes first, before it evicts the others.
            info = file[1]
            return info.st_size <= self._max_bytes, info.st_mtime_ns <= latest, info.st_mtime_ns

        files = sorted(self._files(), key=turn)
        total = sum(info.st_size for _, info in files) + coming_bytes
        limit = max(self._max_bytes - self._max_bytes // 16, coming_bytes)
        for path, info in files:
            if total <= limit:
                break
            if _remove(path):
                total -= info.st_size
        self._uncounted_bytes = 0
        return total

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Every entry's file; ignores other names."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._base) as found:
            for each in found:
                if _ENTRY_NAME.fullmatch(each.name):
                    with contextlib.suppress(OSError):
                        yield Path(each.path), each.stat(follow_symlinks=False)

    def _mark_used(self, path: Path) -> None:
        # A clock that stands still or goes back must not reverse the order of marks; some file systems count in steps
        # of 100 ns.
        now = time.time_ns()
        tick = self._last_tick_ns + 1000
        self._last_tick_ns = tick = max(now, tick) if tick <= now + _AHEAD_NS else now
        os.utime(path, ns=(tick, tick))


class _UnusableFileError(Exception):
    """A file can't be used; the argument is the reason."""


def _checksum(kind: Kind, address: bytes, image: bytes) -> bytes:
    """Covers the file's name, too, so that a misplaced file is refused."""
    digest = hashlib.sha256(_FORMAT + address + kind.encode())
    digest.update(image)
    return digest.digest()


def _unpack(image: bytes) -> dict[str, torch.Tensor]:
    try:
        tensors = safetensors.torch.load(image)
    except safetensors.SafetensorError as error:
        raise _UnusableFileError("not a safetensors image") from error
    bad = next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)
    if bad is not None:
        raise _UnusableFileError(f"not finite in {bad!r}")
    return tensors


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity.

    Checks minimum and maximum, which NaN propagates to: some 30 times faster than `torch.isfinite` on a CPU.
    """
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _make_private(base: Path) -> None:
    """Creates a folder and its missing parents, for this user only.

    The parent folder may be shared; our folder in it isn't, so nobody else can put a link there.
    """
    directory = base.parent
    for missing in reversed([folder for folder in (directory, *directory.parents) if not folder.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    _check_owner(directory.stat())
    base.mkdir(mode=0o700, exist_ok=True)
    _check_owner(base.lstat())
    if stat.S_IMODE(base.stat().st_mode) & 0o077:
        base.chmod(0o700)


def _check_owner(info: os.stat_result) -> None:
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
    if hasattr(os, "geteuid") and info.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, "it belongs to another user")


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remove(path: Path) -> bool:
    """Removes a file or a link; False if it is still there."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _reason(error: OSError | MemoryError) -> str:
    """The system's message, without the path."""
    return getattr(error, "strerror", None) or type(error).__name__
