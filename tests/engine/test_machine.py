"""A random walk through everything that can happen to the engine: its replies are those of one that keeps nothing.

Pools and budgets are so small that eviction, waiting and making room happen all the time; the last assertions see to it
that they did.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.machine import EngineMachine
from tests.engine.seen import seen

OFTEN = {
    "cancelled",
    "copied a shared block",
    "damaged a file",
    "dropped a state",
    "ended late",
    "evicted a segment",
    "finished after a restart",
    "finished in company",
    "hit device",
    "hit disk",
    "kept embeddings",
    "moved a segment to the host",
}
# A short run may miss one. What is seldomer still has tests in test_company.py: beginning again, a commit that ends for
# room, and a reply that is swapped out.
SELDOM = {"hit host", "waited for room"}


# An engine is made for every example, and its rules reject what makes no sense then.
SLOW_ON_PURPOSE = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)


# Without a seed, any edit of the class would draw other examples, among which some of this might not happen.
@seed(11)
class SeededMachine(EngineMachine):
    pass


def run_machine(machine: type[EngineMachine], num_steps: int, must_happen: Collection[str], **options: Any) -> None:
    seen.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            stateful_step_count=num_steps, suppress_health_check=SLOW_ON_PURPOSE, deadline=None, **options
        ),
    )
    missing = [what for what in sorted(must_happen) if not seen[what]]
    assert not missing, f"never: {missing}; counted: {dict(seen)}"


def test_any_order_of_events_gives_the_uncached_replies() -> None:
    run_machine(SeededMachine, 20, OFTEN, max_examples=30)


@pytest.mark.slow
def test_any_long_order_of_events_gives_the_uncached_replies() -> None:
    run_machine(EngineMachine, 50, OFTEN | SELDOM, max_examples=400)
