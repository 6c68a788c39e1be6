"""A backend for each type of device, chosen once, with its reason in the log; each has all operations."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Iterator

import pytest
import torch

from qwen35mm_kernels import backend as choice
from qwen35mm_kernels import cpu, reference, select_backend
from qwen35mm_kernels.cpu import native
from qwen35mm_kernels.cpu.native import library
from tests.kernels.compare import UNCOMPILED


@pytest.fixture(autouse=True)
def _choose_again() -> Iterator[None]:
    for cached in (choice._backend, library.find_library):
        cached.cache_clear()
    yield
    for cached in (choice._backend, library.find_library):
        cached.cache_clear()


@pytest.mark.parametrize("name", ["cpu", "native", "gpu"])
def test_a_backend_has_every_operation_with_the_references_signature_and_nothing_else(name: str) -> None:
    if name == "gpu":
        pytest.importorskip("triton", reason="Triton has no package for this platform")
    ops = importlib.import_module({"native": "qwen35mm_kernels.cpu.native"}.get(name, f"qwen35mm_kernels.{name}"))
    assert ops.__all__ == reference.__all__
    for op in reference.__all__:
        assert inspect.signature(getattr(ops, op)) == inspect.signature(getattr(reference, op))


def test_the_operations_that_tests_run_for_torch_alone_are_compiled_nowhere() -> None:
    assert {op for op in reference.__all__ if getattr(native, op) is getattr(cpu, op)} == set(UNCOMPILED)


@pytest.mark.parametrize("device", ["mps", torch.device("meta")])
def test_torch_runs_where_nothing_else_does(device: torch.device | str) -> None:
    assert select_backend(device) is cpu


@pytest.mark.parametrize("name", library.usable_libraries())
def test_a_cpu_runs_the_compiled_library_that_there_is(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(library.ENVIRONMENT, name)
    caplog.set_level(logging.INFO, "qwen35mm_kernels")
    assert select_backend("cpu") is native
    assert library.loaded_library().name == name
    (logged,) = (record.getMessage() for record in caplog.records)
    assert f"compiled for {name}" in logged


def test_a_cpu_without_a_compiled_library_runs_torch_and_the_log_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    monkeypatch.setattr(library, "_load", lambda name: None)
    assert select_backend("cpu") is cpu
    assert "Install a C++ compiler" in caplog.text


def test_compiled_operations_can_be_turned_off_but_not_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ENVIRONMENT, "none")
    assert select_backend("cpu") is cpu
    library.find_library.cache_clear()
    monkeypatch.setenv(library.ENVIRONMENT, "abacus")
    with pytest.raises(RuntimeError, match="'abacus'"):
        library.find_library()


@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        ("3.4.1", (9, 0), "Triton 3.4.1 is installed, and the kernels need 3.5 or newer, before 4.0"),
        ("4.0.0", (9, 0), "Triton 4.0.0 is installed, and the kernels need 3.5 or newer, before 4.0"),
        (None, (9, 0), "Triton isn't installed: `pip install triton`"),
        ("3.9.0", (7, 5), "Old Card has compute capability 7.5, and the kernels need 8.0"),
        ("3.5.0+git1", (8, 0), None),
    ],
)
def test_where_triton_cannot_run_torch_does_and_the_reason_is_told(
    version: str | None,
    capability: tuple[int, int],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old Card" if index else "New Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability if index else (9, 0))
    caplog.set_level(logging.INFO, "qwen35mm_kernels.backend")
    for device in ("cuda", "cuda:1"):
        assert select_backend(device).__name__ == f"qwen35mm_kernels.{'cpu' if reason else 'gpu'}"
    (logged,) = (record.getMessage() for record in caplog.records)
    assert (reason or "On cuda the operations run as Triton's kernels") in logged


def test_a_library_that_the_system_does_not_run_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where Linux keeps AMX's tiles from a process: the next best is taken."""
    if not library.usable_libraries():
        pytest.skip("no compiled library")
    library._load.cache_clear()
    monkeypatch.setattr(library.Library, "__call__", lambda self, name, *args: 0)
    try:
        assert library.usable_libraries() == []
        assert "keeps these instructions from this process" in caplog.text
    finally:
        library._load.cache_clear()
