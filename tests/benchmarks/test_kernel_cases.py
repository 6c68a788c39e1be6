"""The kernels' benchmark on a CPU: every case runs, does what its reference does, and knows its bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import kernel_cases
from benchmarks.kernel_cases import Case, decode_cases, prefill_cases
from benchmarks.shapes import Shapes

TINY = Shapes("tiny", 64, 4, 2, 4, k_heads=2, gdn_dim=16, head_dim=32, experts=(8, 2, 32))


def cases() -> Iterator[Case]:
    yield from prefill_cases(TINY, [64, 128], "")
    yield from decode_cases(TINY, [1, 3], "")


@pytest.mark.slow
def test_every_case_computes_what_its_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "DEVICE", "cpu")
    torch.manual_seed(0)
    seen = set()
    for case in cases():
        expected = case.expected().float()
        error = torch.linalg.vector_norm(case.ours().float() - expected) / torch.linalg.vector_norm(expected)
        assert error < 1e-2, (case.kernel, case.shape, error)
        assert case.num_bytes > 0
        seen.add(case.kernel)
    assert len(seen) == 8


def test_an_operation_can_be_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "DEVICE", "cpu")
    assert {case.kernel for case in prefill_cases(TINY, [64], "gdn")} == {"gdn prefill"}
    assert {case.kernel for case in decode_cases(TINY, [1], "gdn")} == {"gdn decode step"}
