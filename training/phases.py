"""The curriculum as data: what each phase draws, for how many steps, and the figures at which it may end earlier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Phase:
    """One phase of training.

    Attributes:
        steps: at most; learning rates go from `rates[0]` to `rates[1]` of the full ones over them.
        parts: what examples are drawn from (`mixture.PARTS`), with their weights; empty where the vision tower is
            trained alone, with its probes.
        until: figures of the metrics that end the phase earlier, each a mean over the last of it (`train.Averages`).
        begins, ends: how far the curriculum is then, 0 to 1.
        mtp_weight: of the MTP layer's loss; probe_weight: of the vision heads'.
        most_tokens: of a row, and so of an example.
    """

    name: str
    steps: int
    rates: tuple[float, float]
    parts: Mapping[str, float] = field(default_factory=dict)
    until: Mapping[str, float] = field(default_factory=dict)
    begins: float = 0.0
    ends: float = 1.0
    mtp_weight: float = 0.0
    probe_weight: float = 1.0
    rows: int = 3
    most_tokens: int = 1024


_WORLD = {
    "picture": 30, "thinking": 4, "sign": 16, "clip": 12, "pictures": 6, "difference": 3, "second": 3, "unknown": 3,
    "chat": 3, "recall": 9, "recall picture": 2, "tools": 6,
}  # fmt: skip

_SMALL = {"picture": 60, "sign": 15, "clip": 10, "recall": 6, "chat": 3, "unknown": 2, "tools": 4}

PHASES = (
    # Nothing is learned of pictures from answers alone: what is where, of which colour, and which letters first.
    Phase("vision", 1200, (1.0, 0.6), until={"color": 0.985, "shape": 0.98, "letter 1": 0.93, "box": 12.0}, ends=0.8),
    # To look up what was told needs a circuit that forms late, and not among pictures.
    Phase("recall", 500, (1.0, 0.8), {"recall": 1.0, "chat": 0.05}, {"right recall": 0.9}, probe_weight=0.0),
    # To look into a picture, too: of one shape at first, in few tokens. A step of Muon's has one size, whatever the
    # batch: many steps of one row go further in the same time.
    Phase("small", 700, (1.0, 0.8), _SMALL, ends=0.4, probe_weight=0.2, rows=1),
    Phase("world", 1500, (0.8, 0.12), _WORLD, begins=0.25, probe_weight=0.2, rows=1),
    Phase("anneal", 200, (0.12, 0.01), _WORLD, begins=1.0, mtp_weight=0.3, probe_weight=0.05, rows=1),
)
