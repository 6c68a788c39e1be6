"""The folders that runs are over."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.captioning.fake_model import picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures in two folders."""
    folder = tmp_path / "media"
    (folder / "more").mkdir(parents=True)
    for seed in range(6):
        picture(seed).save(folder / ("more" if seed > 3 else "") / f"{seed}.png")
    return folder


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder for tests of kills, which leave in memory what they leave on a disk, without the wait for one."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)
