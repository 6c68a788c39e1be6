"""How the tuner chooses, and what it refuses, with times that are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from benchmarks.kernel_cases import Cases, Shapes
from benchmarks.tuning import Checked, Configs, Refused, Wrong, choose, tune
from qwen35mm_kernels import gpu, reference
from qwen35mm_kernels.gpu.tables import Config

A, B, C, DEFAULT = (Config({"BLOCK": size}) for size in (16, 32, 64, 128))
KEY = ("kernel", "D64")


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([], None),
        ([(A, [1.0, 2.0])], None),
        ([(A, [0.99, 1.97])], None),  # better by 1.3%
        ([(A, [0.98, 1.96])], A),
        ([(A, [0.97, 1.94]), (B, [0.96, 1.92])], B),
        ([(A, [0.9, 1.8]), (B, [0.9, 1.8])], A),
        ([(A, [0.5, 2.12])], None),  # slower by 6% at one size
        ([(A, [0.5, 2.12]), (B, [0.97, 1.9])], B),
        ([(A, [1.04, 1.0])], A),  # a loss of 4% at one size for half of the time at the other
    ],
)
def test_choice(candidates: list[tuple[Config, list[float]]], expected: Config | None) -> None:
    chosen, ratio = choose([1.0, 2.0], candidates)
    assert chosen is expected
    assert (ratio < 1) == (expected is not None)


def test_the_ratio_is_a_geometric_mean() -> None:
    assert choose([1.0, 100.0], [(A, [0.5, 98.0])])[1] == pytest.approx((0.5 * 0.98) ** 0.5)


def measure(times_ms: dict[int, float | Refused | Sequence[float]]) -> Callable[[Configs], float]:
    """A card on which a block size takes so long; several times for one measurement after the other."""
    turns = {block: iter(times) for block, times in times_ms.items() if isinstance(times, Sequence)}

    def run(configs: Configs) -> float:
        block = configs[KEY].blocks["BLOCK"]
        time = next(turns[block]) if block in turns else times_ms[block]
        if isinstance(time, Refused):
            raise time
        assert isinstance(time, float)
        return time

    return run


def test_the_fastest_that_works_is_chosen() -> None:
    sizes = [
        measure({16: 0.1, 32: Wrong("wrong"), 64: 0.8, 128: 1.0}),
        measure({16: Refused("too large"), 32: 0.1, 64: 0.8, 128: 1.0}),
    ]
    outcome = tune(KEY, DEFAULT, [A, B, C], {}, sizes)
    assert (outcome.chosen, outcome.ratio) == (C, pytest.approx(0.8))
    assert [(config, str(reason)) for config, reason in outcome.refused] == [(A, "too large"), (B, "wrong")]


def test_what_wins_once_must_win_again() -> None:
    outcome = tune(KEY, DEFAULT, [A], {}, [measure({16: [0.5, 1.0], 128: 1.0})])
    assert (outcome.chosen, outcome.ratio) == (None, 1.0)
    outcome = tune(KEY, DEFAULT, [A], {}, [measure({16: [0.5, 0.9], 128: 1.0})])
    assert (outcome.chosen, outcome.ratio) == (A, pytest.approx(0.9))


def test_a_loss_at_one_size_ends_the_measurements_of_a_candidate() -> None:
    outcome = tune(KEY, DEFAULT, [A], {}, [measure({16: 1.1, 128: 1.0}), measure({128: 1.0})])
    assert outcome.chosen is None
    assert [str(reason) for _, reason in outcome.refused] == ["slower by 10% at one size"]


def test_a_default_that_does_not_work_is_no_choice() -> None:
    with pytest.raises(Refused, match="broken"):
        tune(KEY, DEFAULT, [A], {}, [measure({16: 0.5, 128: Wrong("broken")})])


def test_other_kernels_keep_their_configurations() -> None:
    seen: list[Configs] = []

    def run(configs: Configs) -> float:
        seen.append(configs)
        return 1.0

    tune(KEY, DEFAULT, [A], {("other", "D64"): B}, [run])
    assert seen == [{("other", "D64"): B, KEY: config} for config in (DEFAULT, A)]


class Card:
    """Adds and normalises with errors, in the result and in what is changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = self.state_error = 0.0
        monkeypatch.setattr(gpu, "add_rms_norm", self.add_rms_norm)
        self.case = Cases(Shapes("small", 64, 2, 1, 2), "cpu").add_rms_norm(4)

    def add_rms_norm(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        out = reference.add_rms_norm(x, *arguments)
        x *= 1 + self.state_error
        return out * (1 + self.error)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_a_result_that_is_off_is_wrong(card: Card) -> None:
    checked = Checked(card.case, {})
    for _ in range(3):
        checked.check({})  # from the same state each time
    card.error = 1e-3
    checked.check({})
    for error in (1.0, torch.nan):
        card.error = error
        with pytest.raises(Wrong, match="add_rms_norm, small T=4 is off by a relative"):
            checked.check({})


def test_a_changed_tensor_must_be_as_the_default_leaves_it(card: Card) -> None:
    checked = Checked(card.case, {})
    card.state_error = 0.5
    with pytest.raises(Wrong, match=r"is off by a relative 5\.0e-01"):
        checked.check({})


def test_a_wrong_default_is_found_at_once(card: Card) -> None:
    card.error = 1.0
    with pytest.raises(Wrong):
        Checked(card.case, {})


def test_token_ids_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "sample", reference.sample)
    checked = Checked(Cases(Shapes("small", 64, 2, 1, 2, vocab=50), "cpu").sample(2), {})
    monkeypatch.setattr(gpu, "sample", lambda *arguments: reference.sample(*arguments) + 1)
    with pytest.raises(Wrong, match="differs from the reference"):
        checked.check({})
