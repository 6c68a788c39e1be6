"""A copy of the tree's sources in which a change is made, and programs that run there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwen35mm_kernels.cpu.native.library import usable_libraries

ROOT = Path(__file__).parents[2]
_FOLDERS = ("qwen35mm", "kernels", "preprocess")
needs_library = pytest.mark.skipif(not usable_libraries(), reason="no compiled library runs here")


class Copy:
    """The packages in a folder of their own, without the compiled libraries unless they are asked for."""

    def __init__(self, folder: Path, *, compiled: bool = False) -> None:
        self.folder = folder
        left_out = shutil.ignore_patterns("__pycache__", *(() if compiled else ("*.so",)))
        for name in _FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=left_out)

    def edit(self, path: str, old: str, new: str) -> None:
        """Puts `new` in place of `old`, which is there once."""
        text = (self.folder / path).read_text("utf-8")
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        (self.folder / path).write_text(text.replace(old, new), "utf-8")

    def run(self, program: str) -> subprocess.CompletedProcess[str]:
        """Runs a Python program with the copy's packages."""
        paths = [str(self.folder), *(str(self.folder / name) for name in ("kernels", "preprocess"))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
