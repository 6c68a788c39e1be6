"""Builds the compiled part of the CPU's kernels: one shared library for each instruction set, from the same sources.

They are plain C functions on pointers, so pip's isolated build needs a C++ compiler but not PyTorch. A library that the
compiler can't build, for want of an instruction set or of a compiler, is left out, and torch does its work. A wheel has
the libraries of all instruction sets. A build inside the source folder (`pip install -e .` or `build_ext --inplace`)
makes the best one that this processor can run and the compiler can build; QWEN35MM_INSTRUCTION_SETS=all makes them all.
Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import os
import platform
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("kernels/qwen35mm_kernels/cpu/native")
_AVX2 = ["-mavx2", "-mfma"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
_AVX512_BF16 = [*_AVX512, "-mavx512vnni", "-mavx512bf16"]
# By the name that qwen35mm_kernels.cpu.native.library looks for; it also knows each one's requirements.
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


def sets_of_this_processor() -> list[str] | None:
    """The instruction sets that this processor runs, the best first; None if the system doesn't list them."""
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        return None
    # Linux writes avx512_vnni; the compiler's option is -mavx512vnni.
    words = set(Path("/proc/cpuinfo").read_text().replace("_", "").split())
    if not _may_use_amx():
        words.discard("amxtile")
    return [
        name
        for name, flags in reversed(INSTRUCTION_SETS["x86_64"].items())
        if words.issuperset(flag[2:].replace("-", "") for flag in flags)
    ]


def _may_use_amx() -> bool:
    """Whether Linux lets a process use AMX tiles: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def compile_in_threads(compiler: Any, sources: list[str], **options: Any) -> list[str]:
    """`compiler.compile` with one thread for each source."""
    with ThreadPool() as pool:
        made = pool.map(lambda source: compiler.compile([source], **options), sources, chunksize=1)
    return [path for paths in made for path in paths]


def set_of(ext: Extension) -> str:
    """The name of a library's instruction set."""
    return ext.name.rpartition(".")[2]


class BuildLibraries(build_ext):
    built: list[str]
    one_is_enough: bool

    def run(self) -> None:
        is_inplace, self.built = self.inplace, []
        wanted = None
        if is_inplace and os.environ.get("QWEN35MM_INSTRUCTION_SETS") != "all":
            wanted = sets_of_this_processor()
        self.one_is_enough = wanted is not None
        if wanted is not None:
            by_name = {set_of(ext): ext for ext in self.extensions}
            self.extensions = [by_name[name] for name in wanted]
        super().run()
        if is_inplace:
            # What was not built now may exist, made of older sources.
            for name in INSTRUCTION_SETS.get(platform.machine(), {}).keys() - set(self.built):
                (NATIVE / f"{name}.so").unlink(missing_ok=True)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # loaded with ctypes: there is no PyInit to export

    def get_ext_filename(self, fullname: str) -> str:
        # The functions don't use Python's API, so one file serves all versions.
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        if self.one_is_enough and self.built:
            return
        # The libraries share their sources, so each needs its own object files.
        one = copy.copy(self)
        one.build_temp = str(Path(self.build_temp) / set_of(ext))
        one.compiler = copy.copy(self.compiler)
        one.compiler.compile = functools.partial(compile_in_threads, self.compiler)
        super(BuildLibraries, one).build_extension(ext)
        self.built.append(set_of(ext))


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # One wheel for all versions of Python, because the libraries fit all.
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
