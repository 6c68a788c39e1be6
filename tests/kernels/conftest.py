"""Each kernel test runs by every backend: torch, each compiled library that this processor runs, Triton's interpreter,
and compiled on a card with `make test-gpu`. `make test-emulated` adds the libraries of other processors, emulated, and
all cases of Triton's interpreter.

Buffers are poisoned: what a kernel doesn't write is NaN, never a lucky zero.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen35mm_kernels import cpu
from qwen35mm_kernels.backend import multiplies_fp8
from qwen35mm_kernels.cpu import native
from qwen35mm_kernels.cpu.native import library
from tests.kernels.compare import LENGTHS, Backend
from tests.kernels.native import emulated

NATIVE = tuple(library.usable_libraries())
EMULATED = tuple(pytest.param(name, marks=pytest.mark.emulated) for name in emulated.FLAGS)
TRITON = ("interpreted", pytest.param("cuda", marks=pytest.mark.gpu))
# Backends of which `make test` runs one case of so many.
SPARSE = {"interpreted": 7} | dict.fromkeys(NATIVE[1:], 5)


@pytest.fixture
def make_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Backend]]:
    """A backend by its name; a compiled library is the chosen one until the test ends."""

    def make(name: str) -> Backend:
        if name == "cpu":
            return Backend(name, cpu, torch.device("cpu"))
        if name in NATIVE or name in emulated.FLAGS:
            monkeypatch.setenv(library.ENVIRONMENT, name if name in NATIVE else str(emulated.build(name)))
            library.find_library.cache_clear()
            return Backend(name, native, torch.device("cpu"))
        return _triton_backend(name)

    yield make
    library.find_library.cache_clear()


def _triton_backend(name: str) -> Backend:
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    from tests.interpreter import prepare_interpreter

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted and name == "cuda":
        pytest.skip("kernels are interpreted here; on a card: make test-gpu")
    assert interpreted == (name == "interpreted"), "TRITON_INTERPRET must be 1 for the interpreter"
    prepare_interpreter()
    from qwen35mm_kernels import gpu

    return Backend(name, gpu, torch.device("cpu" if interpreted else "cuda"))


@pytest.fixture
def _fp8_card(request: pytest.FixtureRequest) -> None:
    """For tests of what only cards from compute capability 8.9 on can do."""
    if "cuda" in request.node.name and not multiplies_fp8(torch.device("cuda")):
        pytest.skip("this card has no products of eight-bit floats")


@pytest.fixture(params=["cpu", *NATIVE, *EMULATED, *TRITON])
def backend(request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]) -> Backend:
    """Every one, in turn."""
    return make_backend(request.param)


@pytest.fixture(params=["cpu", *TRITON])
def uncompiled_backend(request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]) -> Backend:
    """For `UNCOMPILED`, which are torch's in every compiled library."""
    return make_backend(request.param)


@pytest.fixture(params=[*NATIVE, *EMULATED, *TRITON])
def kernel_backend(request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]) -> Backend:
    """All but torch: those whose rows have the same bits in any company."""
    return make_backend(request.param)


@pytest.fixture(params=[*NATIVE, *EMULATED])
def compiled_backend(request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]) -> Backend:
    """Every compiled library."""
    return make_backend(request.param)


@pytest.fixture
def native_library(compiled_backend: Backend) -> library.Library:
    """Every compiled library, as it is called."""
    return library.loaded_library()


@pytest.fixture(params=TRITON)
def triton_backend(request: pytest.FixtureRequest) -> Backend:
    """For what only Triton's kernels know, such as how they are cut."""
    return _triton_backend(request.param)


@pytest.fixture(params=[16, 64])
def block_m(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of a tile of experts: fewer tokens go without grouping, more are grouped."""
    from qwen35mm_kernels.gpu import moe

    monkeypatch.setattr(moe, "rows_of_a_tile", lambda num_pairs, num_experts: request.param)
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test's cases, `make test` takes a part where a backend is slow or not the one that is used here.

    Interpreted is every seventh, and compiled for lesser processors than this one every fifth: dtypes and lengths take
    turns. The longest length is interpreted in none: it is for what torch does in blocks, and no kernel has a branch
    for it. `make test-emulated` runs the others, and a card what is interpreted here, which takes a thousand times what
    torch does.
    """
    counts = Counter[tuple[str, str]]()
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent):
            continue
        test, _, case = item.nodeid.partition("[")
        parts = case.rstrip("]").split("-")
        for name in SPARSE.keys() & parts:
            is_long = name == "interpreted" and str(LENGTHS[-1]) in parts
            if is_long or counts[test, name] % SPARSE[name]:
                item.add_marker(pytest.mark.emulated)
            counts[test, name] += not is_long


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(make: Any) -> Any:
        def make_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return make_poisoned

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
