"""One choice per device type, with its reason in the log."""

from __future__ import annotations

import importlib.metadata
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


OPERATIONS = sorted(set(qwen35mm_kernels.__all__) - {"SamplingRows", "describe", "split_gate"})


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

    dispatch.choices("cuda")  # the real kernels enter the real table
    dispatch.choices.cache_clear()
    table: dict[str, dict[str, Callable[..., None]]] = {}
    monkeypatch.setattr(dispatch, "_implementations", table)
    dispatch.implements("norm", "torch")(torch_norm)
    dispatch.implements("norm", "triton")(triton_norm)
    assert dispatch.implementation("norm", torch.device("cuda", 3)) is triton_norm
    assert dispatch.implementation("norm", torch.device("cpu")) is torch_norm
    assert dispatch.choices("cpu")["norm"].reason == "Triton's kernels run on cuda devices, not on cpu"


ONLY_TORCH = {"attention_decode", "attention_prefill", "recurrent_gated_delta_step", "vision_attention"}


def test_on_cuda_triton_runs_what_the_engine_runs_there() -> None:
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    assert {op for op, backend in describe("cuda").items() if backend == "torch"} == ONLY_TORCH


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
    version: str | None, capability: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old Card" if index else "New Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability if index else (9, 0))
    choice = dispatch.choices("cuda")["rms_norm"]
    assert choice.backend == ("torch" if reason else "triton")
    assert choice.reason == (reason or "the fastest of triton, torch")


def test_the_choice_is_made_once_and_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qwen35mm_kernels.dispatch")
    first = dispatch.choices("cpu")
    assert dispatch.choices("cpu") is first
    logged = [record.getMessage() for record in caplog.records]
    assert any("On cpu, torch runs" in line and "(the only implementation)" in line for line in logged)
    assert len(logged) == len({(choice.backend, choice.reason) for choice in first.values()})
    for op in OPERATIONS:
        assert sum(op in line.replace(",", "").split() for line in logged) == 1
