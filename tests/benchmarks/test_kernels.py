"""The kernels' benchmark: its cases compute what the reference does. The card is a made-up one."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from benchmarks import kernels
from benchmarks.frame import Spread
from benchmarks.kernel_cases import Cases, Shapes, relative_error, tensors
from benchmarks.kernels import Ceilings, cases_of, measure_all, time_ms
from qwen35mm_kernels import cpu, gpu, reference

TINY = Shapes("tiny", 64, 4, 2, 4, k_heads=2, gdn_dim=16, head_dim=32, rotary_dim=16, experts=(8, 2, 32), vocab=2000)
LAUNCH_MS, KERNEL_MS = 3.0, 0.25


@pytest.mark.parametrize(("ops", "size"), [(cpu, 3), pytest.param(gpu, 3, marks=pytest.mark.emulated)])
@pytest.mark.parametrize("operation", sorted({*reference.__all__} - {"moe_route", "vision_attention"}))
def test_a_case_computes_what_its_reference_does(operation: str, ops: Any, size: int) -> None:
    torch.manual_seed(0)
    sizes = (size, 128 * (size // 64 + 1)) if operation.startswith("paged_attention") else (size,)
    case = getattr(Cases(TINY, "cpu"), operation)(*sizes)
    expected = tensors(case.expected())
    for ours, theirs in zip(tensors(case.run(ops)), expected, strict=True):
        assert torch.equal(ours, theirs) or relative_error(ours, theirs) < 1e-2
    assert case.operation == operation
    assert case.num_bytes > 0


def test_operations_are_picked_by_their_names() -> None:
    made = Cases(TINY, "cpu")
    picked = [(case.operation, case.shape, graph) for case, graph in cases_of(made, [64], [1], "gated_delta")]
    assert picked == [("gated_delta_prefill", "tiny T=64", False)]
    picked = [(case.operation, graph) for case, graph in cases_of(made, [64], [2, 3], "moe")]
    assert picked == [("moe_experts", False), ("moe_experts", True), ("moe_experts", True)]


class Card:
    """The clocks of a host and of a card with one queue, in milliseconds."""

    def __init__(self) -> None:
        self.host = self.card = 0.0

    def launch(self, milliseconds: float) -> None:
        self.card = max(self.card, self.host) + milliseconds

    def event(self, **options: Any) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            self.launch(0.0)
            event.at = self.card

        def synchronize() -> None:
            self.host = max(self.host, event.at)

        event.record, event.synchronize, event.query = record, synchronize, lambda: event.at <= self.host
        event.elapsed_time = lambda other: other.at - event.at
        return event


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: card.launch(cycles / 2e6))
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: SimpleNamespace(zero_=lambda: card.launch(0.1)))
    return card


def test_the_host_s_time_to_launch_is_not_the_card_s(card: Card) -> None:
    def run() -> None:
        for _ in range(4):
            card.host += LAUNCH_MS / 4
            card.launch(KERNEL_MS)

    spread = time_ms(run, graph=False, repeats=5)
    assert spread.count == 5
    assert spread.low == spread.high == pytest.approx(4 * KERNEL_MS)


def test_a_call_that_waits_for_the_card_is_not_timed(card: Card) -> None:
    def run() -> None:
        card.launch(KERNEL_MS)
        card.host = card.card

    with pytest.raises(RuntimeError, match="waits for the card"):
        time_ms(run, graph=False, repeats=5)


def test_a_case_that_fails_costs_no_other_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "time_ms", lambda run, **options: Spread.of([2.0]))
    cases = [Cases(TINY, "cpu").rms_norm(length) for length in (1, 2, 3)]

    def rms_norm(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if len(x) == 2:
            raise RuntimeError("out of resources")
        return cpu.rms_norm(x, *arguments, **options) * (1.5 if len(x) == 1 else 1)

    monkeypatch.setattr(gpu, "rms_norm", rms_norm)
    ceilings = Ceilings(bytes_per_s=cases[2].num_bytes * 1e3, flops_per_s=1.0)
    rows, failed = measure_all(((case, False) for case in cases), ceilings, repeats=1)
    assert [(row["kernel"], row["shape"]) for row in rows] == [("rms_norm", "tiny T=3")]
    assert (rows[0]["limit, ms"], rows[0]["of the limit, %"], rows[0]["peer, ms"]) == (1.0, 50, None)
    assert failed == [
        "rms_norm, tiny T=1: ArithmeticError: off by a relative 5.0e-01",
        "rms_norm, tiny T=2: RuntimeError: out of resources",
    ]


def test_a_peer_that_lacks_something_is_not_taken_for_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> Any:
        def fail(module: str) -> None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

        return fail

    def fla(module: str) -> Any:
        kernels.fla.cache_clear()
        return kernels.fla(module)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(kernels.Missing):
        fla("ops.gated_delta_rule")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels.importlib, "import_module", lacks("fla.modules.elsewhere"))
    with pytest.raises(kernels.Missing):
        fla("modules.elsewhere")
    monkeypatch.setattr(kernels.importlib, "import_module", lacks("einops"))
    with pytest.raises(ModuleNotFoundError, match="einops"):
        fla("ops.gated_delta_rule")
