"""The digest that is made while PyTorch is being imported."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.checkpoints import weights_digest as module
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.cli import early_digest
from qwen35mm.cli.early_digest import begin_digest


def begin(source: str | Path, cache_folder: Path | None) -> None:
    """To its end."""
    begin_digest(source, cache_folder)
    for thread in threading.enumerate():
        if thread.name == early_digest._THREAD:
            thread.join(60)


def test_whoever_asks_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(demo_model_path(), tmp_path)
    expected = weights_digest(demo_model_path(), None)
    monkeypatch.setattr(module, "hash_file", lambda path: pytest.fail(f"{path.name} is hashed again"))
    assert weights_digest(demo_model_path(), tmp_path / "weights") == expected


def test_it_does_nothing_where_nobody_would_ask_or_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hash_file", lambda path: pytest.fail(f"{path.name} is hashed"))
    begin_digest(demo_model_path(), None)
    begin_digest("Qwen/Qwen3.5-0.8B", tmp_path)
    monkeypatch.setattr(early_digest, "_MAX_BYTES", 1000)
    begin_digest(demo_model_path(), tmp_path)
    (tmp_path / "file").touch()
    begin_digest(demo_model_path(), tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_wrong_with_a_checkpoint_is_told_later(tmp_path: Path) -> None:
    begin(tmp_path, tmp_path / "cache")
    (tmp_path / "model.safetensors").touch()  # and no config.json
    begin(tmp_path, tmp_path / "cache")
