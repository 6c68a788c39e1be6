"""What a whole run would cost, from a few media that were captioned: arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev

from qwen35mm_preprocess import MediaKind

# Student's t for an interval that a mean is in with a probability of 90%, by degrees of freedom; then the normal
# distribution's.
_T = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75)
_Z = 1.645


@dataclass(frozen=True)
class Range:
    """Where a number lies, with a probability of about 90%."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __mul__(self, other: Range) -> Range:
        return Range(self.low * other.low, self.high * other.high)


@dataclass(frozen=True)
class Trial:
    """One medium that was captioned with several prompts, one after the other.

    Attributes:
        seconds: in a slot for each prompt. From the second on, the medium's prefill is a cache hit if the model's cache
            has it.
        prefill_s: seconds to the first token for each prompt.
        read_s: seconds to read and decode it; 0 if an engine elsewhere does.
        num_parts: parts of the video, of which this is one.
    """

    kind: MediaKind
    seconds: Sequence[float]
    prefill_s: Sequence[float]
    read_s: float = 0.0
    num_parts: int = 1

    def in_slot_s(self, prompt: int | None) -> float:
        """Seconds in a slot for one prompt alone, whose medium isn't in the cache; None for all in one pass."""
        if prompt is None:
            return sum(self.seconds)
        return self.seconds[prompt] + max(0.0, self.prefill_s[0] - self.prefill_s[prompt])


@dataclass(frozen=True)
class Machine:
    """What works on a run.

    Attributes:
        slots: captions at one time, on all servers together.
        busy: slots that the trials kept busy.
        num_workers: processes that read media.
    """

    slots: int
    busy: int
    num_workers: int


def costs(
    trials: Sequence[Trial], num: Mapping[MediaKind, Range], machine: Machine, prompt: int | None
) -> dict[MediaKind, Range]:
    """Seconds of a whole run for each kind of medium that was tried.

    The lower bound takes all slots to be as quick as those that were busy, the upper one that more of them don't help.

    Args:
        num: how many media there are.
        prompt: the only prompt; None for all in one pass.
    """
    found: dict[MediaKind, Range] = {}
    for kind, there in num.items():
        tried = [trial for trial in trials if trial.kind == kind]
        if not tried:
            continue
        each = mean_of([trial.in_slot_s(prompt) * trial.num_parts for trial in tried])
        reading_s = median(trial.read_s * trial.num_parts for trial in tried) / machine.num_workers
        low, high = each.low / machine.slots, each.high / min(machine.slots, max(machine.busy, 1))
        found[kind] = there * Range(max(low, reading_s), max(high, reading_s))
    return found


def mean_of(values: Sequence[float]) -> Range:
    """Where the mean is of what these values are a random sample of, but not beyond the least and the largest."""
    if len(values) == 1:
        return Range(values[0], values[0])
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else _Z
    middle, away = mean(values), t * stdev(values) / math.sqrt(len(values))
    return Range(max(min(values), middle - away), min(max(values), middle + away))


def share_of(num: int, tried: int) -> Range:
    """Where the share is of what `num` of `tried` random draws are (Wilson's interval)."""
    if not tried:
        return Range(0.0, 1.0)
    share, z2 = num / tried, _Z**2 / tried
    middle, away = share + z2 / 2, _Z * math.sqrt(share * (1 - share) / tried + z2 / 4 / tried)
    return Range(max(0.0, (middle - away) / (1 + z2)), min(1.0, (middle + away) / (1 + z2)))
