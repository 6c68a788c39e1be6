"""What torch allocates on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of tensors that live at one time during the second run of `work`, beyond those before."""
    return max(_held(work))


def held_bytes(work: Callable[[], object]) -> int:
    """The bytes of tensors that the result of the second run of `work` holds."""
    return _held(work)[-1]


def _held(work: Callable[[], object]) -> list[int]:
    """The bytes after each allocation and release."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = work()
    results: Any = found.profiler and found.profiler.kineto_results
    events = [each for each in results.events() if each.name() == "[memory]"]
    del result
    return list(accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))
