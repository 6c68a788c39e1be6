"""A digest of a checkpoint's weights, computed once and remembered as long as the files look the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qwen35mm.checkpoints.safetensors_files import find_shards
from qwen35mm.errors import CheckpointError

logger = logging.getLogger(__name__)

# A file is hashed in slices, so that one large file takes all cores too; the length is part of the digest's meaning.
SLICE_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_MAX_THREADS = 8
_MAX_MEMO_BYTES = 1 << 20
_MAX_MEMO_FILES = 1_000
# A file changed again within its timestamp's resolution would look unchanged: what is this young isn't remembered.
_SETTLED_S = 2.0
_HEX_DIGEST = re.compile("[0-9a-f]{64}")


def weights_digest(folder: Path, memo: Path | None) -> str:
    """Hex SHA-256 over a checkpoint's safetensors files (their names, order and bytes) and its config.json.

    Args:
        folder: the checkpoint.
        memo: a JSON file that remembers the files' digests by path, size, time of change and inode. It is made where
            it is missing (mode 0600); a damaged one counts as empty, and one that can't be written is only logged.

    Raises:
        CheckpointError: the folder has no weights or no config.json, or a file can't be read.
    """
    files = [*find_shards(folder), folder / "config.json"]
    try:
        digests = _file_digests([path.absolute() for path in files], memo)
    except OSError as error:
        name = Path(error.filename).name if error.filename else folder.name
        raise CheckpointError(f"{name} can't be read ({type(error).__name__}): check the checkpoint's files.") from None
    total = hashlib.sha256()
    for path, digest in zip(files, digests, strict=True):
        total.update(json.dumps([path.name, digest]).encode() + b"\n")
    return total.hexdigest()


def _file_digests(paths: list[Path], memo: Path | None) -> list[str]:
    known = {} if memo is None else _read_memo(memo)
    found: dict[Path, str] = {}
    for path in paths:
        entry = known.get(str(path))
        if entry is not None and entry == {**_look(path.stat()), "digest": entry["digest"]}:
            found[path] = entry["digest"]
    missing = [path for path in paths if path not in found]
    if missing:
        fresh, settled = _hash_files(missing)
        found |= fresh
        if memo is not None and settled:
            known |= settled
            _write_memo(memo, dict(list(known.items())[-_MAX_MEMO_FILES:]))
    return [found[path] for path in paths]


def _hash_files(paths: list[Path]) -> tuple[dict[Path, str], dict[str, dict[str, Any]]]:
    """The files' digests, and the memo's entries of those that didn't change lately."""
    started_s = time.monotonic()
    before = {path: path.stat() for path in paths}
    num_bytes = sum(look.st_size for look in before.values())
    slices = [(path, at) for path in paths for at in range(0, max(before[path].st_size, 1), SLICE_BYTES)]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1, len(slices))) as threads:
        parts = list(threads.map(_hash_slice, slices))
    digests: dict[Path, str] = {}
    settled: dict[str, dict[str, Any]] = {}
    for path in paths:
        own = b"".join(part for part, (owner, _) in zip(parts, slices, strict=True) if owner == path)
        digests[path] = hashlib.sha256(b"%d\n" % before[path].st_size + own).hexdigest()
        after = path.stat()
        if _look(after) == _look(before[path]) and time.time() - after.st_mtime > _SETTLED_S:
            settled[str(path)] = {**_look(after), "digest": digests[path]}
    seconds = time.monotonic() - started_s
    logger.info("Hashed %.2f GB of weights in %.1f s.", num_bytes / 1e9, seconds)
    return digests, settled


def _hash_slice(place: tuple[Path, int]) -> bytes:
    path, start = place
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    left = SLICE_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def _look(found: os.stat_result) -> dict[str, int]:
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}


def _read_memo(memo: Path) -> dict[str, dict[str, Any]]:
    """The remembered files; none where the memo is missing, damaged or another user's."""
    try:
        look = memo.stat()
        foreign = hasattr(os, "getuid") and look.st_uid != os.getuid()
        if foreign or not stat.S_ISREG(look.st_mode) or look.st_size > _MAX_MEMO_BYTES:
            logger.warning("%s isn't ours to read: the weights are hashed again.", memo.name)
            return {}
        data = json.loads(memo.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        logger.warning("%s is damaged: the weights are hashed again.", memo.name)
        return {}
    files = data.get("files") if isinstance(data, dict) and data.get("slice_bytes") == SLICE_BYTES else None
    if not isinstance(files, dict):
        return {}
    return {path: entry for path, entry in files.items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"size", "mtime_ns", "inode", "digest"}:
        return False
    digest = entry["digest"]
    return isinstance(digest, str) and _HEX_DIGEST.fullmatch(digest) is not None


def _write_memo(memo: Path, files: dict[str, dict[str, Any]]) -> None:
    text = json.dumps({"slice_bytes": SLICE_BYTES, "files": files}, indent=1)
    temporary = None
    try:
        memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{memo.name}.", dir=memo.parent)  # mode 0600
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(memo)
    except OSError as error:
        logger.warning("%s can't be written (%s): the next start hashes the weights again.", memo.name, error.strerror)
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink(missing_ok=True)
