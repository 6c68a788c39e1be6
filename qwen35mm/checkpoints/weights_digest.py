"""A digest of a checkpoint's weights, computed once and remembered as long as the files look the same."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qwen35mm.checkpoints.safetensors_files import find_shards
from qwen35mm.errors import CheckpointError

logger = logging.getLogger(__name__)

# A file is hashed in slices, so that one large file takes all cores too; the length is part of the digest's meaning.
SLICE_BYTES = 64 << 20
_MAX_THREADS = 8
_MAX_MEMO_FILES = 1_000
# A file changed again within its timestamp's resolution would look unchanged: what is this young isn't remembered.
_SETTLED_S = 2.0


def weights_digest(folder: Path, memo: Path | None) -> str:
    """Hex SHA-256 over a checkpoint's safetensors files (their names, order and bytes) and its config.json.

    Args:
        folder: the checkpoint.
        memo: a JSON file that remembers the files' digests by path, size, time of change and inode. It is made where
            it is missing (mode 0600); a damaged one counts as empty, and one that can't be written is only logged.

    Raises:
        CheckpointError: the folder has no weights or no config.json, or a file can't be read.
    """
    known = {} if memo is None else _read_memo(memo)
    fresh: dict[str, str] = {}
    total = hashlib.sha256()
    try:
        for path in (*find_shards(folder), folder / "config.json"):
            look = _look(path)
            digest = known.get(look)
            if digest is None:
                digest = _hash_file(path)
                if look == _look(path) and time.time() - path.stat().st_mtime > _SETTLED_S:
                    fresh[look] = digest
            total.update(json.dumps([path.name, digest]).encode() + b"\n")
    except OSError as error:
        name = Path(error.filename).name if error.filename else folder.name
        raise CheckpointError(f"{name} can't be read ({type(error).__name__}): check the checkpoint's files.") from None
    if memo is not None and fresh:
        _write_memo(memo, known | fresh)
    return total.hexdigest()


def _look(path: Path) -> str:
    info = path.stat()
    return f"{path.absolute()} {info.st_size} {info.st_mtime_ns} {info.st_ino} {SLICE_BYTES}"


def _hash_file(path: Path) -> str:
    started_s, num_bytes = time.monotonic(), path.stat().st_size
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        slices = threads.map(lambda start: _hash_slice(path, start), range(0, max(num_bytes, 1), SLICE_BYTES))
        digest = hashlib.sha256(b"%d\n" % num_bytes + b"".join(slices)).hexdigest()
    logger.info("Hashed %.2f GB of weights in %.1f s.", num_bytes / 1e9, time.monotonic() - started_s)
    return digest


def _hash_slice(path: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = SLICE_BYTES
        while left and (part := file.read(min(left, 1 << 20))):
            digest.update(part)
            left -= len(part)
    return digest.digest()


def _read_memo(memo: Path) -> dict[str, str]:
    """The remembered digests; none where the memo is missing, damaged or another user's."""
    try:
        if hasattr(os, "getuid") and memo.stat().st_uid != os.getuid():
            raise PermissionError("it belongs to another user")
        digests = json.loads(memo.read_bytes())
        if all(len(bytes.fromhex(digest)) == 32 for digest in digests.values()):
            return digests
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    logger.warning("%s can't be used: the weights are hashed again.", memo.name)
    return {}


def _write_memo(memo: Path, digests: dict[str, str]) -> None:
    try:
        memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=memo.parent) as folder:  # mode 0700
            new = Path(folder, memo.name)
            new.write_text(json.dumps(dict(list(digests.items())[-_MAX_MEMO_FILES:]), indent=1), encoding="utf-8")
            new.chmod(0o600)
            new.replace(memo)
    except OSError as error:
        logger.warning("%s can't be written (%s): the next start hashes the weights again.", memo.name, error.strerror)
