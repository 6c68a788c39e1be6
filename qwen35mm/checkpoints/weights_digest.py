"""A digest of a checkpoint's weights, computed once and remembered while the files look unchanged."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qwen35mm.checkpoints.shards import find_shards
from qwen35mm.errors import CheckpointError

logger = logging.getLogger(__name__)

# Files are hashed in slices, so that one large file uses all cores; changing the length changes the digest.
SLICE_BYTES = 8 << 20
_READ_BYTES = 1 << 20
_MAX_THREADS = 8
# A file changed twice within its timestamp's resolution would look unchanged, so we don't remember very new files.
_SETTLED_S = 2.0
# While one thread hashes, others wait, then find the digest remembered.
_remembering = threading.Lock()


def weights_digest(folder: Path, memo: Path | None) -> str:
    """Hex SHA-256 over a checkpoint's safetensors files (their names, order and bytes) and its config.json.

    Args:
        folder: the checkpoint.
        memo: a folder that remembers a file's digest by its path while size, modification time and inode stay the
            same. Created if missing (mode 0700); failing to write there is only logged.

    Raises:
        CheckpointError: the folder has no weights or no config.json, or a file can't be read.
    """
    total = hashlib.sha256()
    try:
        for path in (*find_shards(folder), folder / "config.json"):
            if memo is None:
                digest = hash_file(path)
            else:
                with _remembering:
                    digest = _remembered(path, memo)
            total.update(json.dumps([path.name, digest]).encode() + b"\n")
    except OSError as error:
        name = Path(error.filename).name if error.filename else folder.name
        raise CheckpointError(f"{name} can't be read ({type(error).__name__}): check the checkpoint's files.") from None
    return total.hexdigest()


def _remembered(path: Path, memo: Path) -> str:
    """A file's digest, from the memo if it is there. Raises OSError."""
    note = memo / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()
    seen = look(path)
    try:
        is_ours = not hasattr(os, "getuid") or note.stat().st_uid == os.getuid()
        # An incomplete note doesn't match.
        found = re.fullmatch(re.escape(seen) + r"\n([0-9a-f]{64})\n", note.read_text("ascii"))
        if is_ours and found:
            return found[1]
    except (OSError, ValueError):
        pass
    digest = hash_file(path)
    if seen == look(path) and time.time() - path.stat().st_mtime > _SETTLED_S:
        try:
            memo.mkdir(mode=0o700, parents=True, exist_ok=True)
            note.write_text(f"{seen}\n{digest}\n", "ascii")
        except OSError as error:
            reason = error.strerror
            logger.warning("%s can't be written (%s): the next start hashes %s again.", memo.name, reason, path.name)
    return digest


def look(path: Path) -> str:
    """What tells a file from another one in its place. Raises OSError."""
    info = path.stat()
    return f"{info.st_size} {info.st_mtime_ns} {info.st_ino} {SLICE_BYTES}"


def hash_file(path: Path) -> str:
    started_s, num_bytes = time.monotonic(), path.stat().st_size
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        slices = threads.map(lambda start: _hash_slice(path, start), range(0, max(num_bytes, 1), SLICE_BYTES))
        digest = hashlib.sha256(b"%d\n" % num_bytes + b"".join(slices)).hexdigest()
    logger.info("Hashed %.2f GB of weights in %.1f s.", num_bytes / 1e9, time.monotonic() - started_s)
    return digest


def _hash_slice(path: Path, start: int) -> bytes:
    digest, left = hashlib.sha256(), SLICE_BYTES
    # Read in small steps: whole slices for all threads would be a large part of a small model.
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (some := file.read(min(left, _READ_BYTES))):
            digest.update(some)
            left -= len(some)
    return digest.digest()
