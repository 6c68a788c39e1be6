"""What `pip wheel` makes of the compiled part, with a C++ compiler and without."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from qwen35mm_kernels.cpu.native import library

ROOT = Path(__file__).parents[1]
# By machine, the library that every compiler of it can build.
PLAINEST = {"x86_64": "avx2", "aarch64": "neon", "arm64": "neon"}

pytestmark = pytest.mark.slow


def make_wheel(folder: Path, **environment: str) -> list[str]:
    """The paths in the wheel of a copy of the sources, named for this platform and every version of Python."""
    pytest.importorskip("setuptools", "77")
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "*.so", "*.egg-info", "node_modules", "runs", "__pycache__"
    )
    copy = shutil.copytree(ROOT, folder / "copy", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run(command, cwd=copy, env={**os.environ, **environment}, check=True)
    (wheel,) = folder.glob("*.whl")
    assert "-py3-none-" in wheel.name
    return zipfile.ZipFile(wheel).namelist()


def test_without_a_compiler_there_is_a_wheel_for_torch_alone(tmp_path: Path) -> None:
    names = make_wheel(tmp_path, CC=shutil.which("false") or "false", CXX=shutil.which("false") or "false")
    assert "qwen35mm_kernels/cpu/native/library.py" in names
    assert not [name for name in names if name.endswith(".so")]
    assert [name for name in names if name.endswith("/data/share/qwen35mm/examples/gradio_chat.py")]


@pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="needs a C++ compiler")
def test_a_compiler_puts_libraries_into_the_wheel(tmp_path: Path) -> None:
    libraries = {Path(name).stem for name in make_wheel(tmp_path) if name.endswith(".so")}
    assert PLAINEST[platform.machine()] in libraries
    assert libraries <= library.NEEDS.keys()
