"""The compiled part's libraries for processors that this machine isn't, made to run on AVX2.

The sources' own code for AVX-512 and AMX is compiled against `emulated.h`, which says in plain C++ what their
instructions do; the code for all other machines (NEON) is compiled as it is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from qwen35mm_kernels.cpu.native import library

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "kernels/qwen35mm_kernels/cpu/native/src"
HEADER = Path(__file__).with_name("emulated.h")
_AVX2 = ("-mavx2", "-mfma", "-Wno-psabi", "-include", str(HEADER))
FLAGS = {
    "emulated_avx512": (*_AVX2, "-DEMULATE=1"),
    "emulated_avx512_bf16": (*_AVX2, "-DEMULATE=2"),
    "emulated_amx": (*_AVX2, "-DEMULATE=3"),
    # As there, a plain char is unsigned.
    "emulated_neon": ("-mfma", "-Wno-psabi", "-funsigned-char"),
}


def compiler() -> str:
    """A C++ compiler, or the test is skipped."""
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if found is None:
        pytest.skip("needs g++ or clang++")
    return found


def build(name: str) -> Path:
    """A library of FLAGS, compiled once for each state of the sources."""
    if not library.processor_flags().issuperset(library.NEEDS["avx2"]):
        pytest.skip("emulated instructions need a machine with AVX2")
    files = sorted(SOURCES.iterdir())
    command = [compiler(), "-std=c++17", "-O1", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared"]
    command += [*FLAGS[name], *(str(file) for file in files if file.suffix == ".cpp")]
    state = hashlib.sha256(repr(command).encode())
    for file in (HEADER, *files):
        state.update(file.read_bytes())
    path = ROOT / "build/emulated" / state.hexdigest()[:16] / f"{name}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.rename(path)
    return path
