"""Drafts: tokens that a reply will probably say next, so that one pass can compute several of its tokens.

A draft decides nothing. The sampler draws from the logits of each drafted row as it would without drafts, and a reply
keeps what it draws. So a wrong draft costs time, never a letter.
"""

from __future__ import annotations

import itertools
import operator
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from qwen35mm_kernels.cpu.native.library import find_library

SPECULATE = ("auto", "off", "mtp", "ngram")

# Drafted rows of a step, of all replies together. Each needs a place for its states.
MAX_DRAFTS = 4
# Tokens that must repeat before what followed them is a draft; the longer match is tried first.
_SHORT, _LONG = 3, 6
# The last tokens of a prompt that are searched: an entry takes 300 bytes.
_MOST_SEARCHED = 1 << 15
# Bits of a token's id in a key: three ids fill 63 bits.
_ID_BITS = 21
_KEY_MASK = (1 << 3 * _ID_BITS) - 1
_MIX = 0x1E3779B97F4A7C15
# What one more row costs until it was measured, as a share of a step.
_ROW_SHARE = 0.2
# A step with drafts must promise this much more. The times of steps of several replies vary more: they are bound by
# arithmetic, and other programs take cores.
_LEAST_GAIN, _LEAST_GAIN_TOGETHER = 1.03, 1.1
# Seconds of a drafted token before any was measured.
_TINY = 1e-9
_DRAFT_TIMES = 5
# Steps after which a measured time says nothing about now: the context has grown.
_STALE_STEPS = 512


def num_drafts(speculate: str, device: torch.device) -> int:
    """Most drafted rows of a step; 0 without speculation.

    `auto` speculates where a row has the same bits in any company: on a CPU with the compiled operations.
    """
    if speculate == "off" or (speculate == "auto" and (device.type != "cpu" or find_library() is None)):
        return 0
    return MAX_DRAFTS


Keys = TypeVar("Keys", int, npt.NDArray[np.int64])


class Origin(Enum):
    """Where a draft comes from, with the chance of its tokens before any was compared: each if those before it are
    right."""

    GRAMMAR = 0.9
    LONG_MATCH = 0.75
    MTP = 0.7
    SHORT_MATCH = 0.5


@dataclass(frozen=True)
class Draft:
    """The tokens that may come next.

    Attributes:
        place: the number of the first one in its reply.
    """

    token_ids: tuple[int, ...]
    origin: Origin
    place: int


class Repeats:
    """Finds what followed the last occurrence of a text's end. Takes constant time a token."""

    def __init__(self, token_ids: np.ndarray) -> None:
        """token_ids: [T] int64, the prompt's, of which the last ones are searched."""
        token_ids = token_ids[-_MOST_SEARCHED:]
        self._token_ids: list[int] = token_ids.tolist()
        short = _keys(token_ids)
        long = _joined(short[:-_SHORT], short[_SHORT:])
        # The text's end itself isn't found: nothing follows it yet.
        self._short = dict(zip(short[:-1].tolist(), range(_SHORT, len(token_ids)), strict=True))
        self._long = dict(zip(long[:-1].tolist(), range(_LONG, len(token_ids)), strict=True))
        # Keys of the last three tokens, and of three before each.
        self._ends: list[int] = short[-_SHORT - 1 :].tolist()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        for token_id in token_ids:
            short, long = self._last_keys()
            place = len(self._token_ids)
            if short is not None:
                self._short[short] = place
            if long is not None:
                self._long[long] = place
            self._token_ids.append(token_id)
            # Not by `_keys`: for one token numpy takes ten times as long.
            if short is not None:
                self._ends.append(short << _ID_BITS & _KEY_MASK | token_id)
                del self._ends[: -_SHORT - 1]
            elif len(self._token_ids) == _SHORT:
                self._ends = _keys(np.array(self._token_ids, dtype=np.int64)).tolist()

    def following(self, most: int) -> tuple[list[int], Origin] | None:
        """Up to `most` tokens that followed the same end before, and the kind of match."""
        short, long = self._last_keys()
        for keys, key, origin in ((self._long, long, Origin.LONG_MATCH), (self._short, short, Origin.SHORT_MATCH)):
            place = None if key is None else keys.get(key)
            if place is not None:
                found = self._token_ids[place : place + most]
                # A text that repeats itself goes on with what it has just said.
                while len(found) < most:
                    found += found[: most - len(found)]
                return found, origin
        return None

    def _last_keys(self) -> tuple[int | None, int | None]:
        """Of the last three tokens and of the last six."""
        if not self._ends:
            return None, None
        return self._ends[-1], _joined(self._ends[0], self._ends[-1]) if len(self._ends) > _SHORT else None


def _keys(token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[T - 2] int64, one for each three tokens in a row."""
    if len(token_ids) < _SHORT:
        return np.zeros(0, dtype=np.int64)
    one, two, three = token_ids[:-2], token_ids[1:-1], token_ids[2:]
    return (one << 2 * _ID_BITS) | (two << _ID_BITS) | three


def _joined(before: Keys, after: Keys) -> Keys:
    """The key of six tokens in a row, by those of three each. Two texts may share one: a wrong draft does no harm."""
    return (before * _MIX + after) & _KEY_MASK


class DraftTime:
    """Seconds that the MTP layer takes for one token: the median of the last times, as some were interrupted."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_DRAFT_TIMES)

    @property
    def seconds(self) -> float:
        return statistics.median(self._last) if self._last else _TINY

    def add(self, seconds: float) -> None:
        """Counts a measurement."""
        self._last.append(seconds)

    def forget(self) -> None:
        """Drops the oldest one, where the layer is about to be tried again."""
        if self._last:
            self._last.popleft()


class StepTimes:
    """Seconds of a decode step by its rows.

    Args:
        sizes: the numbers of rows that steps have, ascending: a step of fewer rows is padded. Empty for any number.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self._sizes = sizes
        self._seconds: dict[int, tuple[float, int]] = {}
        self._num_steps = 0

    def add(self, num_rows: int, seconds: float) -> None:
        """Counts a step."""
        num_rows = self._padded(num_rows)
        self._num_steps += 1
        known = self._of(num_rows)
        # A step that was interrupted says little about the next one.
        value = seconds if known is None else known + 0.2 * (min(seconds, 2 * known) - known)
        self._seconds[num_rows] = value, self._num_steps

    def knows(self, num_rows: int) -> bool:
        """Whether such a step was measured lately."""
        return self._of(self._padded(num_rows)) is not None

    def expected(self, num_rows: int) -> float:
        """Of a step of `num_rows`; any number if none was measured, in proportion to the others' numbers."""
        num_rows = self._padded(num_rows)
        known = self._of(num_rows)
        if known is not None:
            return known
        measured = [rows for rows in self._seconds if self._of(rows) is not None]
        if not measured:
            return 1 + _ROW_SHARE * (num_rows - 1)
        nearest = min(measured, key=lambda rows: abs(rows - num_rows))
        return self._seconds[nearest][0] * (1 + _ROW_SHARE * (num_rows - 1)) / (1 + _ROW_SHARE * (nearest - 1))

    def _padded(self, num_rows: int) -> int:
        return next((size for size in self._sizes if size >= num_rows), num_rows)

    def _of(self, num_rows: int) -> float | None:
        seconds, at = self._seconds.get(num_rows, (0.0, -_STALE_STEPS - 1))
        return seconds if self._num_steps - at <= _STALE_STEPS else None


@dataclass(frozen=True)
class Offer:
    """What may be drafted for a reply.

    Attributes:
        chances: for each token that may be drafted, that it is right if those before it are.
        token_s: seconds that drafting one takes.
    """

    chances: tuple[float, ...] = ()
    token_s: float = 0.0

    def worth(self, row_s: float) -> float:
        """Right tokens a second of its first one, if a row more takes `row_s`."""
        return self.chances[0] / max(row_s + self.token_s, _TINY) if self.chances else 0.0


def chosen_lengths(offers: Sequence[Offer], times: StepTimes, most: int) -> list[int]:
    """How many drafted tokens of each reply one step should verify: those that give the most tokens a second.

    Args:
        offers: of each reply.
        most: drafted tokens of all replies together.
    """
    if not any(offer.chances for offer in offers) or not times.knows(len(offers)):
        # Without the time of a plain step, nobody knows what pays.
        return [0] * len(offers)
    # The chance of each token that all up to it are right.
    reached = [list(itertools.accumulate(offer.chances, operator.mul)) for offer in offers]
    least_gain = _LEAST_GAIN if len(offers) == 1 else _LEAST_GAIN_TOGETHER
    best, lengths = len(offers) / times.expected(len(offers)) * least_gain, [0] * len(offers)
    chosen, tokens, drafting_s = [0] * len(offers), float(len(offers)), 0.0
    for _ in range(most):
        left = [index for index, chances in enumerate(reached) if chosen[index] < len(chances)]
        if not left:
            break
        likeliest = max(left, key=lambda index: reached[index][chosen[index]])
        tokens += reached[likeliest][chosen[likeliest]]
        chosen[likeliest] += 1
        drafting_s += offers[likeliest].token_s
        speed = tokens / (times.expected(len(offers) + sum(chosen)) + drafting_s)
        if speed > best:
            best, lengths = speed, [*chosen]
    return lengths
