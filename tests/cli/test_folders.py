from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qwen35mm.cli.folders import user_cache_folder


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {}, "home/.cache/qwen35mm"),
        ("linux", {"XDG_CACHE_HOME": ""}, "home/.cache/qwen35mm"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "home/.cache/qwen35mm"),
        ("linux", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/qwen35mm"),
        ("freebsd14", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/qwen35mm"),
        ("darwin", {"XDG_CACHE_HOME": "/elsewhere"}, "home/Library/Caches/qwen35mm"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/qwen35mm"),
        ("win32", {}, "home/AppData/Local/qwen35mm"),
    ],
)
def test_each_platform_has_its_place(
    platform: str, variables: dict[str, str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert user_cache_folder() == tmp_path / folder


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", no_home)
    assert user_cache_folder() is None
