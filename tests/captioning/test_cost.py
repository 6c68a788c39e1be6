"""What a run would cost, by arithmetic."""

from __future__ import annotations

import random

import pytest

from qwen35mm.captioning.cost import Machine, Range, Trial, costs, mean_of, share_of

ONE = Machine(slots=1, busy=1, num_workers=1)


def trials(num: int, *seconds: float, **more: object) -> list[Trial]:
    """Trials that all took as long; the first prompt's prefill took 3 s, the others' 1 s."""
    prefill_s = [3.0, *[1.0] * (len(seconds) - 1)]
    return [Trial(kind="image", seconds=seconds, prefill_s=prefill_s, **more) for _ in range(num)]  # pyright: ignore[reportArgumentType]


def test_a_prompt_alone_pays_for_the_medium_and_all_together_pay_once() -> None:
    num = {"image": Range(100, 100)}
    each = [costs(trials(5, 5.0, 4.0, 2.0), num, ONE, prompt) for prompt in (0, 1, 2, None)]  # pyright: ignore[reportArgumentType]
    assert each == [{"image": Range(s, s)} for s in (500.0, 600.0, 400.0, 1100.0)]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (ONE, Range(1000, 1000)),
        (Machine(slots=4, busy=4, num_workers=1), Range(250, 250)),
        # Nobody knows whether the slots that weren't busy help.
        (Machine(slots=16, busy=4, num_workers=1), Range(62.5, 250)),
    ],
)
def test_slots_share_the_work(machine: Machine, expected: Range) -> None:
    assert costs(trials(4, 10.0), {"image": Range(100, 100)}, machine, None) == {"image": expected}


def test_reading_media_can_be_what_takes_the_time() -> None:
    slow = trials(3, 1.0, read_s=30.0)
    num = {"image": Range(10, 10)}
    assert costs(slow, num, Machine(4, 4, 2), 0) == {"image": Range(150, 150)}  # pyright: ignore[reportArgumentType]


def test_kinds_count_apart_and_one_that_was_not_tried_costs_nothing_known() -> None:
    clip = Trial("video", (10.0,), (1.0,), num_parts=6)
    num = {"image": Range(2, 4), "video": Range(3, 3)}
    assert costs([clip], num, ONE, 0) == {"video": Range(180, 180)}  # pyright: ignore[reportArgumentType]
    assert costs([*trials(2, 1.0), clip], num, ONE, 0)["image"] == Range(2, 4)  # pyright: ignore[reportArgumentType]


def test_means_and_shares_lie_where_they_say() -> None:
    drawn = random.Random(0)
    means = [mean_of([drawn.expovariate(1 / 5) + 5 for _ in range(12)]) for _ in range(400)]
    assert sum(each.low <= 10 <= each.high for each in means) / 400 > 0.8
    # Not so wide that anything would lie there.
    assert sum(each.high - each.low for each in means) / 400 < 6
    shares = [share_of(sum(drawn.random() < 0.25 for _ in range(40)), 40) for _ in range(400)]
    assert sum(each.low <= 0.25 <= each.high for each in shares) / 400 > 0.85
    assert mean_of([2.0]) == Range(2, 2)
    assert mean_of([1.0, 3.0]) == Range(1, 3)
    assert share_of(0, 0) == Range(0, 1)
