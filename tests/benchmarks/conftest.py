"""What the tests of the tuner share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qwen35mm_kernels import dispatch


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreted kernels take the benchmarks' cases, whose tensors are on the CPU."""
    from benchmarks import kernel_cases
    from benchmarks.tuning_compile import trace_on_meta

    dispatch.choices("cuda")  # the kernels enter dispatch
    for module, name in ((kernel_cases, "DEVICE"), (dispatch, "_BACKENDS")):
        monkeypatch.setattr(module, name, getattr(module, name))
    trace_on_meta()
    monkeypatch.setattr(kernel_cases, "DEVICE", "cpu")
    yield
    monkeypatch.undo()
    dispatch.choices.cache_clear()
