"""The checkpoint's digest, computed while the import of PyTorch leaves the other cores idle."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from qwen35mm.checkpoints.shards import find_shards
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.errors import CheckpointError

# About as much as is hashed meanwhile. After an error, the program mustn't wait much longer.
_MAX_BYTES = 4 << 30
_THREAD = "qwen35mm-digest"


def begin_digest(source: str | Path, cache_folder: Path | None) -> None:
    """Starts to compute a checkpoint's digest in a thread. A later caller waits for the result.

    Args:
        source: a folder. Does nothing for a Hub id or a large checkpoint.
        cache_folder: stores the digest, in `weights`; None does nothing.
    """
    folder = Path(source).expanduser()
    if cache_folder is not None and folder.is_dir():
        # The caller that needs the digest reports the error.
        with contextlib.suppress(CheckpointError, OSError):
            cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if sum(path.stat().st_size for path in find_shards(folder)) <= _MAX_BYTES:
                where = folder.resolve(), cache_folder / "weights"
                threading.Thread(target=_make, args=where, name=_THREAD).start()


def _make(folder: Path, memo: Path) -> None:
    with contextlib.suppress(CheckpointError):
        weights_digest(folder, memo)
