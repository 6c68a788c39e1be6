"""Finds the compiled library for this processor and calls it.

setup.py builds one shared library for each instruction set. The best one for the processor is loaded, once. Its name
and digest are part of the cache's fingerprint, since results depend on them bit by bit.
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
# The processor flags that each library needs (Linux's names), the best library first.
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
# Overrides the choice, for tests and comparisons: a name of NEEDS, a file's path, or "none" for torch.
ENVIRONMENT = "QWEN35MM_NATIVE"
_TYPES = {bool: ctypes.c_long, int: ctypes.c_long, float: ctypes.c_float}
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class _ThreadsRecording(threading.local):
    calls: list[Call] | None = None


# This thread's calls, for `recording`.
noted = _ThreadsRecording()


# Functions that a library of older sources lacks.
_NEWEST = ("qwen_kv_rows", "qwen_sample_reads", "qwen_gdn_rows")


class Library:
    """A loaded shared library.

    Attributes:
        name: its instruction set, as in NEEDS.
        digest: SHA-256 of the file, hex.

    Raises:
        OSError: the file can't be loaded, or the system denies its instructions to this process.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self._library = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}
        if missing := [name for name in _NEWEST if not hasattr(self._library, name)]:
            raise OSError(f"{path.name} is older than this program: it lacks {missing[0]}. Install qwen35mm again")
        if not self("qwen_prepare", _team_runner()):
            raise OSError(f"{path.name}: the system keeps these instructions from this process")

    def __call__(self, name: str, *args: Any) -> Any:
        """Calls a function with tensors (passed as their first element's address), structures, ints, floats and None.

        Each argument must have the same kind in all calls; None may replace tensors and structures. Releases the
        interpreter's lock during the call.
        """
        function = self._functions.get(name) or self._find(name, args)
        values = tuple([value.data_ptr() if isinstance(value, torch.Tensor) else value for value in args])
        if noted.calls is not None:
            noted.calls.append((function, values))
        return function(*values)

    def _find(self, name: str, args: tuple[Any, ...]) -> Any:
        # Declaring types once takes a fifth of the time of wrapping values at each call.
        function = self._functions[name] = self._library[name]
        function.argtypes = [_TYPES.get(type(value), ctypes.c_void_p) for value in args]
        return function


@functools.cache
def find_library() -> Library | None:
    """The best library for this processor; None if there is none, with one warning in the log."""
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
    """The library of `find_library`, which must exist. For this package's operations."""
    library = find_library()
    assert library is not None
    return library


def usable_libraries() -> list[str]:
    """Names of the built libraries that this processor can run, the best one first."""
    return [name for name in NEEDS if _load(name)]


@functools.cache
def _load(name: str) -> Library | None:
    """A library of NEEDS; None if it is missing or can't run here."""
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
    """This processor's flags, by Linux's names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        if platform.machine() == "arm64":
            return frozenset(NEEDS["neon_dotprod"])  # macOS: all Apple processors have it
        # macOS on Intel: torch reports the relevant instruction sets.
        capability = torch.backends.cpu.get_cpu_capability()
        return frozenset(_AVX512 if capability == "AVX512" else _AVX2 if capability == "AVX2" else ())
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return frozenset(flags)


@functools.cache
def _team_runner() -> ctypes.c_void_p | None:
    """GOMP_parallel of the OpenMP runtime that torch has loaded, or None.

    LLVM's and Intel's runtimes have it, too. A separate thread pool would compete with torch's for the cores.
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
