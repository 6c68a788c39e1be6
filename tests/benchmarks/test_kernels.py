"""How the kernels' benchmark measures and reports, on a card that is imagined."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import kernel_cases, kernels
from benchmarks.kernel_cases import Case
from benchmarks.kernels import Ceilings, report, time_ms
from benchmarks.report import Spread

LAUNCH_MS, KERNEL_MS = 3.0, 0.25


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
    one, other = torch.ones(3), torch.full((3,), 1.5)

    def explode() -> torch.Tensor:
        raise RuntimeError("out of resources")

    def cases() -> Iterator[Case]:
        yield Case("wrong", "T=1", ours=lambda: other, expected=lambda: one, num_bytes=1)
        yield Case("broken", "T=1", ours=explode, expected=lambda: one, num_bytes=1)
        yield Case("right", "T=1", ours=lambda: one, expected=lambda: one, num_bytes=10, peer=lambda: one)

    results, failed = report(cases(), Ceilings(bytes_per_s=1e4, flops_per_s=1.0), repeats=1)
    assert [result["kernel"] for result in results] == ["right"]
    assert results[0]["limit_ms"] == 1.0
    assert failed == [
        "wrong, T=1: ArithmeticError: ours is off by a relative 5.0e-01",
        "broken, T=1: RuntimeError: out of resources",
    ]


def test_a_peer_that_lacks_something_is_not_taken_for_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> Any:
        def fail(module: str) -> None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

        return fail

    kernel_cases.fla.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel_cases.fla("ops.gated_delta_rule") is None
    kernel_cases.fla.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kernel_cases.importlib, "import_module", lacks("fla.modules.elsewhere"))
    assert kernel_cases.fla("modules.elsewhere") is None
    kernel_cases.fla.cache_clear()
    monkeypatch.setattr(kernel_cases.importlib, "import_module", lacks("einops"))
    with pytest.raises(ModuleNotFoundError, match="einops"):
        kernel_cases.fla("ops.gated_delta_rule")
