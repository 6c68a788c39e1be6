"""Where the earlier contents of people's files go."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path

import pytest

from qwen35mm.captioning.manifest.manifest import Manifest


def test_each_file_keeps_its_place(tmp_path: Path, manifest: Manifest) -> None:
    text, outside = tmp_path / "cats" / "a.txt", tmp_path.parent / f"{tmp_path.name}.jsonl"
    text.parent.mkdir()
    for number in range(2):
        text.write_text(f"mine {number}")
        assert manifest.backups.copy(text).read_text() == f"mine {number}"
    assert len(list(tmp_path.glob(".qwen35mm/backups/*/cats/a.txt"))) == 2, "the same file twice in one run"
    outside.write_text("{}")
    try:
        moved = manifest.backups.move(outside)
        assert moved.is_relative_to(tmp_path / ".qwen35mm" / "backups")
        assert (moved.read_text(), outside.exists(), manifest.backups.num_files) == ("{}", False, 3)
    finally:
        outside.unlink(missing_ok=True)


@pytest.mark.parametrize("link", [False, True])
def test_a_copy_of_a_killed_run_is_used(tmp_path: Path, *, link: bool) -> None:
    text = tmp_path / "a.txt"
    text.write_text("mine")
    found = []
    for _ in range(2):
        with closing(Manifest.open(tmp_path / ".qwen35mm" / "manifest.sqlite")) as manifest:
            found.append(manifest.backups.copy(text, link=link))
            assert manifest.backups.folder is not None
            assert found[-1].is_relative_to(manifest.backups.folder)
    assert found[0] == found[1]


def test_another_disk_gets_a_copy(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    records = tmp_path / "a.jsonl"
    records.write_text("{}")
    replace = Path.replace

    def refuse(path: Path, target: Path) -> Path:
        if path == records:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse)
    assert manifest.backups.move(records).read_text() == "{}"
    assert not records.exists()
