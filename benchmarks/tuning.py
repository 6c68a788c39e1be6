"""How a configuration is chosen: from times relative to the default's, over all sizes that share it, twice.

A configuration replaces the default only where it is faster by at least 2% in the geometric mean over the sizes, and
slower by more than 5% at none of them: a table has one entry for a prompt's every length and every size of a batch, and
must not trade one user for another. The fastest of many candidates is partly the luckiest, so it must win once more
against the default in a second measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernel_cases import Case, relative_error, tensors
from qwen35mm_kernels import gpu
from qwen35mm_kernels.gpu.launch import trial
from qwen35mm_kernels.gpu.tables import Config

MIN_GAIN = 0.02
MAX_LOSS = 0.05
MAX_RELATIVE_ERROR = 1e-2

Configs = Mapping[tuple[str, str], Config]


class Refused(Exception):
    """A configuration that can't be chosen, with the reason."""


class Wrong(Refused):
    """A configuration whose result isn't the reference's."""


@dataclass(frozen=True)
class Outcome:
    """What tuning one kernel for one shape has found.

    Attributes:
        chosen: None where the default stays.
        ratio: geometric mean of the chosen's time over the default's, in the second measurement; 1 for the default.
        refused: candidates that are out, with the reasons.
    """

    kernel: str
    shape: str
    default: Config
    chosen: Config | None
    ratio: float
    num_candidates: int
    refused: Sequence[tuple[Config, Refused]]


def choose(
    default_ms: Sequence[float], candidates_ms: Sequence[tuple[Config, Sequence[float]]]
) -> tuple[Config | None, float]:
    """The best candidate and its ratio to the default; None and 1 where none is enough better.

    Args:
        default_ms: the default's time at each size.
        candidates_ms: each candidate's, at the same sizes. Of equally fast ones the first is taken.
    """
    best, best_ratio = None, 1.0
    for config, times_ms in candidates_ms:
        ratios = [time / default for time, default in zip(times_ms, default_ms, strict=True)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        if mean <= 1 - MIN_GAIN and max(ratios) <= 1 + MAX_LOSS and mean < best_ratio:
            best, best_ratio = config, mean
    return best, best_ratio


def tune(
    key: tuple[str, str],
    default: Config,
    candidates: Sequence[Config],
    context: Configs,
    measures: Sequence[Callable[[Configs], float]],
) -> Outcome:
    """Chooses one kernel's configuration for one shape.

    Args:
        context: the configurations of the other kernels.
        measures: one for each size: milliseconds of an operation with these configurations. Raises Refused.

    Raises:
        Refused: by the default itself.
    """

    def times_ms(config: Config, at_most: Sequence[float] = ()) -> list[float]:
        times: list[float] = []
        for index, measure in enumerate(measures):
            times.append(measure({**context, key: config}))
            if at_most and times[-1] > at_most[index]:
                raise Refused(f"slower by {times[-1] / at_most[index] * (1 + MAX_LOSS) - 1:.0%} at one size")
        return times

    default_ms = times_ms(default)
    at_most = [time * (1 + MAX_LOSS) for time in default_ms]
    timed: list[tuple[Config, Sequence[float]]] = []
    refused: list[tuple[Config, Refused]] = []
    for config in candidates:
        try:
            timed.append((config, times_ms(config, at_most)))
        except Refused as reason:
            refused.append((config, reason))
    chosen, ratio = choose(default_ms, timed)
    if chosen is not None:
        # In turns: a card that warms up slows both.
        again = [(measure({**context, key: default}), measure({**context, key: chosen})) for measure in measures]
        chosen, ratio = choose([first for first, _ in again], [(chosen, [second for _, second in again])])
    return Outcome(*key, default, chosen, ratio, len(candidates), refused)


class Checked:
    """A case whose results are known: the reference's, and what the default leaves in the tensors it changes.

    Args:
        configs: what it runs with for the first time, the defaults.

    Raises:
        Refused: see `check`.
    """

    def __init__(self, case: Case, configs: Configs) -> None:
        self.case = case
        self._before = [tensor.clone() for tensor in case.changed]
        self._expected = tensors(case.expected())
        self._after: list[torch.Tensor] = []
        self.check(configs)
        self._after = [tensor.clone() for tensor in case.changed]

    def check(self, configs: Configs) -> None:
        """Runs once. Whole numbers, such as token ids, must be equal.

        Raises:
            Wrong: the result isn't the reference's, or what was changed isn't as the default leaves it.
            Refused: the card can't run it.
        """
        from triton.runtime.errors import OutOfResources

        for tensor, before in zip(self.case.changed, self._before, strict=True):
            tensor.copy_(before)
        try:
            with trial(configs):
                results = tensors(self.case.run(gpu))
        except OutOfResources as error:
            raise Refused(f"doesn't fit this card: {error}".splitlines()[0]) from error
        pairs = [*zip(results, self._expected, strict=True)]
        if self._after:
            pairs += zip(self.case.changed, self._after, strict=True)
        name = f"{self.case.operation}, {self.case.shape}"
        for ours, expected in pairs:
            if not expected.is_floating_point():
                if not torch.equal(ours, expected):
                    raise Wrong(f"wrong: {name} differs from the reference")
            elif not (off := relative_error(ours, expected)) <= MAX_RELATIVE_ERROR:
                raise Wrong(f"wrong: {name} is off by a relative {off:.1e}")
