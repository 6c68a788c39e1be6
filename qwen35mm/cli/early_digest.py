"""The checkpoint's digest, made while PyTorch is being imported, which leaves the other cores with nothing to do."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from qwen35mm.checkpoints.shards import find_shards
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.errors import CheckpointError

# About what is hashed meanwhile. An error's end must not wait for much more.
_MAX_BYTES = 4 << 30
_THREAD = "qwen35mm-digest"


def begin_digest(source: str | Path, cache_folder: Path | None) -> None:
    """Begins to make a checkpoint's digest in a thread; whoever asks for it later waits for that.

    Args:
        source: does nothing for a Hub id, nor for a large checkpoint.
        cache_folder: remembers it, in `weights`; None does nothing.
    """
    folder = Path(source).expanduser()
    if cache_folder is not None and folder.is_dir():
        # What is wrong is told where it is asked for.
        with contextlib.suppress(CheckpointError, OSError):
            cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if sum(path.stat().st_size for path in find_shards(folder)) <= _MAX_BYTES:
                where = folder.resolve(), cache_folder / "weights"
                threading.Thread(target=_make, args=where, name=_THREAD).start()


def _make(folder: Path, memo: Path) -> None:
    with contextlib.suppress(CheckpointError):
        weights_digest(folder, memo)
