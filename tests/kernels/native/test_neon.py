"""ARM's instructions, by a cross compiler and qemu, where both are here (Debian: g++-aarch64-linux-gnu, qemu-user)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.native.emulated import SOURCES

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.emulated
@pytest.mark.parametrize("flags", [[], ["-march=armv8.2-a+dotprod"]], ids=["neon", "neon_dotprod"])
def test_products(flags: list[str], tmp_path: Path) -> None:
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(f"needs {COMPILER} and {EMULATOR}")
    files = [Path(__file__).with_name("products.cpp"), SOURCES / "products.cpp", SOURCES / "packing.cpp"]
    command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=fast", "-fno-math-errno", "-static", f"-I{SOURCES}"]
    subprocess.run([*command, *flags, *map(str, files), "-o", str(tmp_path / "products")], check=True)
    subprocess.run([EMULATOR, str(tmp_path / "products")], check=True)
