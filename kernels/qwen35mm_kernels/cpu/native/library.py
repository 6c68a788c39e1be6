"""Finds the compiled part for this processor and calls it.

setup.py builds one shared library for each instruction set; the best one that the processor has is loaded, once. Its
name and digest are part of the cache's fingerprint, since they decide bits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
# Which flags of the processor each library needs (Linux's names), the best one first.
_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
NEEDS = {
    "amx": (*_AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon_dotprod": ("asimd", "asimddp"),
    "neon": ("asimd",),
}
# Chooses another one than the best, for tests and comparisons: a name of NEEDS, a file's path, or "none" for torch.
ENVIRONMENT = "QWEN35MM_NATIVE"
_TYPES = {bool: ctypes.c_long, int: ctypes.c_long, float: ctypes.c_float}
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class _ThreadsRecording(threading.local):
    calls: list[Call] | None = None


# Where this thread's calls are noted: `recording`.
noted = _ThreadsRecording()


class Library:
    """A loaded shared library.

    Attributes:
        name: its instruction set, as in NEEDS.
        digest: SHA-256 of the file, hex.

    Raises:
        OSError: the file can't be loaded, or the system keeps its instructions from this process.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self._library = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}
        if not self("qwen_prepare", _team_runner()):
            raise OSError(f"{path.name}: the system keeps these instructions from this process")

    def __call__(self, name: str, *args: Any) -> Any:
        """Calls a function with tensors (their first element's address), structures, ints, floats and None.

        An argument is of one of these kinds in all calls, None beside tensors and structures. The interpreter's lock
        is released while it runs.
        """
        function = self._functions.get(name) or self._find(name, args)
        values = tuple([value.data_ptr() if isinstance(value, torch.Tensor) else value for value in args])
        if noted.calls is not None:
            noted.calls.append((function, values))
        return function(*values)

    def _find(self, name: str, args: tuple[Any, ...]) -> Any:
        # Types that are told once take a fifth of the time of values that are wrapped at each call.
        function = self._functions[name] = self._library[name]
        function.argtypes = [_TYPES.get(type(value), ctypes.c_void_p) for value in args]
        return function


@functools.cache
def find_library() -> Library | None:
    """The best library for this processor, or None where there is none: the log says so, once."""
    wanted = os.environ.get(ENVIRONMENT)
    if wanted == "none":
        return None
    if wanted and Path(wanted).is_file():
        return Library(Path(wanted).resolve())
    for name in NEEDS:
        if wanted in (None, "", name) and (library := _load(name)):
            return library
    if wanted:
        raise RuntimeError(f"{ENVIRONMENT} asks for '{wanted}', and here are {usable_libraries() or 'none'}.")
    logger.warning(
        "There are no compiled operations for this CPU (%s): torch computes, at half the speed or less, and int8 and "
        "int4 weights are slower than bfloat16. Install a C++ compiler (g++ or clang++) and then qwen35mm again. A "
        "checkout from another machine needs the same: it has the operations for that machine's CPU.",
        platform.machine(),
    )
    return None


def loaded_library() -> Library:
    """The same for the operations of this package, which run only where there is one."""
    library = find_library()
    assert library is not None
    return library


def usable_libraries() -> list[str]:
    """The names of all that are built and that this processor runs, the best one first."""
    return [name for name in NEEDS if _load(name)]


@functools.cache
def _load(name: str) -> Library | None:
    """A library of NEEDS, or None where it isn't there, or the processor or the system doesn't run it."""
    path = _FOLDER / f"{name}.so"
    if _team_runner() is None or not processor_flags().issuperset(NEEDS[name]) or not path.is_file():
        return None
    try:
        return Library(path)
    except OSError as error:
        logger.warning("Left out of the compiled operations for the CPU: %s.", error)
        return None


@functools.cache
def processor_flags() -> frozenset[str]:
    """What this processor has, by Linux's names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        if platform.machine() == "arm64":
            return frozenset(NEEDS["neon_dotprod"])  # macOS: all of Apple's have it
        # macOS on Intel: torch tells of the sets that decide.
        capability = torch.backends.cpu.get_cpu_capability()
        return frozenset(_AVX512 if capability == "AVX512" else _AVX2 if capability == "AVX2" else ())
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return frozenset(flags)


@functools.cache
def _team_runner() -> ctypes.c_void_p | None:
    """GOMP_parallel of the OpenMP runtime that torch has loaded, or None.

    LLVM's and Intel's have it too. A pool of threads of our own would fight with torch's for the same cores.
    """
    folder = Path(torch.__file__).parent / "lib"
    names = [None, *map(str, sorted([*folder.glob("libgomp*"), *folder.glob("libomp*"), *folder.glob("libiomp*")]))]
    if sys.platform == "win32":
        return None
    for name in names:
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None
