"""`qwen35mm chat`, started and ended as a person or a service manager does."""

from __future__ import annotations

import signal
import stat
import sys
from pathlib import Path

import pytest

from tests.web.process import PageProcess

CHAT = [sys.executable, "-m", "qwen35mm", "chat", "--port", "0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_way_of_ending_it_is_a_clean_one(tmp_path: Path, number: signal.Signals) -> None:
    chat = PageProcess(CHAT, tmp_path)
    chat.wait_for_url()
    assert chat.end(number) == (0, "")
    folder = tmp_path / "caches" / "qwen35mm"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_no_disk_cache_leaves_the_disk_alone(tmp_path: Path) -> None:
    chat = PageProcess([*CHAT, "--no-disk-cache"], tmp_path)
    chat.wait_for_url()
    assert chat.end() == (0, "")
    assert not (tmp_path / "caches").exists()


def test_without_a_usable_cache_folder_it_starts_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("not a folder")
    chat = PageProcess(CHAT, tmp_path)
    chat.wait_for_url()
    code, errors = chat.end()
    assert code == 0
    assert "There is no disk cache, so a restart forgets everything" in errors
    assert errors.count("\n") == 1


def test_a_folder_that_was_asked_for_must_be_usable(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("not a folder")
    code, errors = PageProcess([*CHAT, "--cache-dir", "taken"], tmp_path).wait()
    assert code == 1
    assert errors.startswith("qwen35mm: ")
    assert errors.count("\n") == 1
