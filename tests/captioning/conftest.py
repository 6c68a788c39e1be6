"""The folders that runs are over."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.captioning.media import workers
from tests.captioning.fake_model import picture


@pytest.fixture
def folder(in_memory: Path) -> Path:
    """Six pictures in two folders."""
    folder = in_memory / "media"
    (folder / "more").mkdir(parents=True)
    for seed in range(6):
        picture(seed).save(folder / ("more" if seed > 3 else "") / f"{seed}.png")
    return folder


class _NoProcess:
    """Reads media as a worker process does, in this one."""

    def call(self, message: tuple[Any, ...], timeout_s: float) -> Any:
        return workers.work(*message)

    def kill(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.fixture
def media_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares runs the start of worker processes, of which media/test_workers.py tells."""
    monkeypatch.setattr(workers, "_Process", _NoProcess)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder for tests of kills, which leave in memory what they leave on a disk, without the wait for one."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)
