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
        least_tokens: of a picture: a small one is enlarged to so many. None is what the checkpoint's processor does.
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
    rows: int = 1
    most_tokens: int = 2560
    least_tokens: int | None = 16  # what is told of pictures is learned on few


_PLAIN = {"plain": 74, "clip": 8, "recall": 5, "chat": 3, "unknown": 2, "tools": 4, "sign": 4}
_VERDICTS = {"verdict": 70, "plain": 16, "recall": 4, "chat": 2, "clip": 4, "tools": 2, "unknown": 2}
_RELATIONS = {"relation": 55, "verdict": 12, "plain": 12, "sign": 8, "tools": 6, "recall": 4, "clip": 3}
_COUNTS = {"counts": 42, "thinking": 34, "verdict": 8, "picture": 8, "plain": 6, "sign": 4}
_TWO_COUNTS = {"two counts": 70, "counts": 20, "thinking": 15, "picture": 8, "sign": 8, "tools": 9, "recall": 6}
_PICTURES = {"pictures": 70, "tools": 12, "recall": 8, "plain": 6, "chat": 2}
_SIGNS = {"sign": 60, "tools": 14, "pictures": 13, "recall": 8, "unknown": 4}
_COPIES = {"repeat": 30, "tools": 38, "recall": 32}
_ABSENCES = {"told": 60, "tools": 40}
_DIFFERENCES = {"difference": 46, "pictures": 22, "second": 17, "sign": 6, "tools": 5, "repeat": 4}
_EVENTS = {"event": 70, "difference": 10, "sign": 8, "tools": 6, "recall": 6}
_BOXES = {"box": 56, "sign": 24, "plain": 10, "tools": 5, "recall": 5}
_WORLD = {
    "recall": 44, "told": 34, "tools": 66, "chat": 24, "repeat": 6, "recall picture": 12, "unknown": 22, "again": 24,
    "thinking": 70, "two counts": 100, "counts": 40, "sign": 90, "difference": 58, "pictures": 28, "second": 8,
    "picture": 45, "plain": 11, "verdict": 6, "relation": 19, "box": 44, "clip": 40, "event": 20, "lone": 3,
}  # fmt: skip

# Each but the last two forms a circuit that doesn't form where all is asked at once: what can't be learned yet drowns
# what could be. A step of Muon's has one size, whatever the batch: on processors rows are few, and steps many. A card
# takes 32 parts in a step, and the last two phases come out far better for it.
PHASES = (
    # Nothing is learned of pictures from answers alone: what is where, of which colour, and which letters first.
    Phase("vision", 2700, (1.0, 0.25), until={"color": 0.985, "shape": 0.98, "letter 1": 0.93, "box": 12.0}, ends=0.85),
    # To look up what was told.
    Phase("recall", 500, (1.0, 0.8), {"recall": 1.0, "chat": 0.05}, {"right recall": 0.9}, probe_weight=0.0),
    # To look into a picture: at one shape or a few, in few tokens, for what takes one look.
    Phase("plain", 1800, (1.0, 0.6), _PLAIN, {"right color": 0.97, "right caption": 0.9}, ends=0.2, probe_weight=0.2),
    # To compare what is asked with what is there.
    Phase("verdicts", 400, (0.8, 0.6), _VERDICTS, {"right yes no": 0.93}, ends=0.2, probe_weight=0.2),
    # To compare two things, and to count.
    Phase("relations", 700, (0.8, 0.6), _RELATIONS, {"right relation": 0.85}, ends=0.2, probe_weight=0.2),
    # To count, also in a caption's words: thoughts are those, and learned where little else is thought.
    Phase("counts", 400, (0.8, 0.6), _COUNTS, {"right count": 0.8}, begins=0.2, ends=0.8, probe_weight=0.1),
    # To add and compare what was just counted: where it is thought, in words that begin with what is counted.
    Phase("two counts", 600, (0.8, 0.6), _TWO_COUNTS, {"right two counts, thinking": 0.7}, 0.2, 0.8, probe_weight=0.1),
    # To tell several pictures apart, of two at first.
    Phase("pictures", 350, (0.8, 0.7), _PICTURES, {"right which picture": 0.95}, ends=0.12, probe_weight=0.1),
    Phase("more pictures", 300, (0.8, 0.6), _PICTURES, begins=0.15, ends=0.6, probe_weight=0.1),
    # To compare two pictures, and two moments.
    Phase("differences", 700, (0.8, 0.6), _DIFFERENCES, {"right difference": 0.95}, ends=0.7, probe_weight=0.2),
    Phase("events", 350, (0.8, 0.6), _EVENTS, {"right when": 0.95}, probe_weight=0.2),
    Phase("signs", 700, (0.8, 0.6), _SIGNS, {"right reading": 0.8}, begins=0.2, ends=0.5),
    # To copy what nobody has said before: names of tools, of people, codes.
    Phase("copies", 850, (0.8, 0.6), _COPIES, {"right tool call": 0.95}, ends=0.7),
    # To notice that nobody has said what is asked for: 4% in hours where little was asked so, 87 in minutes of this.
    Phase("absences", 500, (0.8, 0.6), _ABSENCES, {"right not told": 0.9}, ends=0.7, probe_weight=0.0),
    Phase("boxes", 700, (0.8, 0.6), _BOXES, ends=0.3, probe_weight=0.5),
    Phase("world", 3000, (0.6, 0.06), _WORLD, begins=0.2, probe_weight=0.2, least_tokens=None),
    Phase("anneal", 250, (0.06, 0.005), _WORLD, begins=1.0, mtp_weight=0.3, probe_weight=0.05, least_tokens=None),
)
