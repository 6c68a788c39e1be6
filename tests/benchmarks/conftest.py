"""What the tests of the tuner share."""

from __future__ import annotations

import pytest


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreted kernels take the benchmarks' cases, whose tensors are on the CPU."""
    from benchmarks import kernel_cases

    monkeypatch.setattr(kernel_cases, "DEVICE", "cpu")
