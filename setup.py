"""Builds the compiled part of the CPU's kernels: one shared library for each instruction set, from the same sources.

They are plain C functions on pointers, so that pip's isolated build needs a C++ compiler and nothing of PyTorch. Where
there is no compiler, or it doesn't know an instruction set, that library is left out and torch does its work.
Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import copy
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("kernels/qwen35mm_kernels/cpu/native")
_AVX2 = ["-mavx2", "-mfma"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
_AVX512_BF16 = [*_AVX512, "-mavx512vnni", "-mavx512bf16"]
# By the name that qwen35mm_kernels.cpu.native.library looks for, which also knows what each needs.
INSTRUCTION_SETS = {
    "x86_64": {
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512_bf16": _AVX512_BF16,
        "amx": [*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    },
    "aarch64": {"neon": [], "neon_dotprod": ["-march=armv8.2-a+dotprod"]},
}
INSTRUCTION_SETS |= {"AMD64": INSTRUCTION_SETS["x86_64"], "arm64": INSTRUCTION_SETS["aarch64"]}


class BuildLibraries(build_ext):
    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # These are loaded with ctypes: there is no PyInit to export.

    def get_ext_filename(self, fullname: str) -> str:
        # Their functions know nothing of Python, so one file does for every version of it.
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        # The same sources, several libraries: each has object files of its own.
        one = copy.copy(self)
        one.build_temp = str(Path(self.build_temp) / ext.name.rpartition(".")[2])
        super(BuildLibraries, one).build_extension(ext)

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # One wheel for every version of Python, as the libraries in it.
        return "py3", "none", super().get_tag()[2]


def libraries() -> list[Extension]:
    sources = sorted(path.as_posix() for path in (NATIVE / "src").glob("*.cpp"))
    headers = sorted(path.as_posix() for path in (NATIVE / "src").glob("*.h"))
    return [
        Extension(
            f"qwen35mm_kernels.cpu.native.{name}",
            sources,
            depends=headers,
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-g0", *flags],
            optional=True,
        )
        for name, flags in INSTRUCTION_SETS.get(platform.machine(), {}).items()
    ]


setup(ext_modules=libraries(), cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel})
