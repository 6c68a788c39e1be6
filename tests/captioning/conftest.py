"""The folder that most runs are over."""

from __future__ import annotations

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
