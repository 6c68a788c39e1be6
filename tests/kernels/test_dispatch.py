"""One choice per device type, with its reason in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

import qwen35mm_kernels
from qwen35mm_kernels import describe, dispatch


@pytest.fixture(autouse=True)
def _choose_again() -> Iterator[None]:
    dispatch.choices.cache_clear()
    yield
    dispatch.choices.cache_clear()


OPERATIONS = sorted(set(qwen35mm_kernels.__all__) - {"describe"})


def test_every_public_operation_has_a_choice() -> None:
    assert sorted(describe("cpu")) == OPERATIONS


def test_torch_runs_everything_on_devices_that_no_other_backend_knows() -> None:
    assert set(describe("mps").values()) == {"torch"}


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "mps"])
def test_choices_depend_on_the_device_type_alone(device: str) -> None:
    assert describe(device) == describe(torch.device(device).type)
    assert list(describe(device)) == OPERATIONS


def test_a_triton_kernel_is_chosen_on_cuda_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def torch_norm() -> None: ...
    def triton_norm() -> None: ...

    table: dict[str, dict[str, Callable[..., None]]] = {}
    monkeypatch.setattr(dispatch, "_implementations", table)
    dispatch.implements("norm", "torch")(torch_norm)
    dispatch.implements("norm", "triton")(triton_norm)
    assert dispatch.implementation("norm", torch.device("cuda", 3)) is triton_norm
    assert dispatch.implementation("norm", torch.device("cpu")) is torch_norm
    assert dispatch.choices("cpu")["norm"].reason == "Triton's kernels run on cuda devices, not on cpu"


def test_the_choice_is_made_once_and_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qwen35mm_kernels.dispatch")
    first = dispatch.choices("cpu")
    assert dispatch.choices("cpu") is first
    logged = [record.getMessage() for record in caplog.records]
    assert any("On cpu, torch runs" in line and "(the only implementation)" in line for line in logged)
    assert len(logged) == len({(choice.backend, choice.reason) for choice in first.values()})
    for op in OPERATIONS:
        assert sum(op in line.replace(",", "").split() for line in logged) == 1
