"""Where runs are: their folders, their manifest, and media that are read in the test's own process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.decoding import child, decoders
from qwen35mm.decoding.answers import read_here
from tests.captioning.fake_model import picture
from tests.cli.conftest import qwen35mm  # noqa: F401 - a fixture


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: a run waits for its disk at every step, and a kill leaves the same in both."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures in two folders."""
    folder = tmp_path / "media"
    (folder / "more").mkdir(parents=True)
    for seed in range(6):
        picture(seed).save(folder / ("more" if seed > 3 else "") / f"{seed}.png")
    return folder


@pytest.fixture
def manifest(tmp_path: Path) -> Iterator[Manifest]:
    with closing(Manifest.open(tmp_path / ".qwen35mm" / "manifest.sqlite")) as manifest:
        yield manifest


class _NoProcess:
    """Reads media as a worker process does, in this one."""

    is_usable = True

    def call(self, work: child.Work, read: Any, *_: Any) -> Any:
        return read_here(read, child.work(work, lambda done, total: None))

    def said(self) -> list[str]:
        return []

    def kill(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.fixture
def media_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares runs the start of worker processes, of which media/test_workers.py tells."""
    monkeypatch.setattr(decoders, "Process", _NoProcess)
