"""What stands where a text file should be."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from qwen35mm_preprocess.media import HEAD_BYTES, sniff


class UnusableError(Exception):
    """No text file stands there: a folder, a pipe, a link to nowhere, or a file that can't be read."""


def read_text_file(path: Path) -> bytes | None:
    """A sidecar's bytes; None where nothing is there. Never waits for a pipe."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnusableError
        return path.read_bytes()
    except FileNotFoundError:
        if os.path.lexists(path):
            raise UnusableError from None
        return None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR):
            return None  # writing says why
        raise UnusableError from error


def is_medium(path: Path) -> bool:
    """Whether a picture or a video is at `path`, whatever its name says. A text has no zero bytes."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    return b"\x00" in head and sniff(head) is not None


def target_of(path: Path) -> Path:
    """The file that is replaced: behind a link, the one that it leads to."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path
