"""Drafts: tokens that a reply will probably say next, so that one pass can compute several of its tokens.

A draft decides nothing. The sampler draws from the logits of each drafted row as it would without drafts, and a reply
keeps what it draws. So a wrong draft costs time, never a letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
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
# Old drafts count less: one of twenty drafts ago a third.
_KEPT = 0.95
# What one more row costs until it was measured, as a share of a step.
_ROW_SHARE = 0.2
# Drafts that no step asks for are tried again after some thirty steps.
_FORGOTTEN = 0.03
# A step with drafts must promise this much more.
_LEAST_GAIN = 1.03
# Seconds of a drafted token before any was measured.
_TINY = 1e-9
# Steps after which a measured time says nothing about now: the context has grown.
_STALE_STEPS = 512


def num_drafts(speculate: str, device: torch.device) -> int:
    """Most drafted rows of a step; 0 without speculation.

    `auto` speculates where a row has the same bits in any company: on a CPU with the compiled operations.
    """
    if speculate == "off" or (speculate == "auto" and (device.type != "cpu" or find_library() is None)):
        return 0
    return MAX_DRAFTS


class Origin(Enum):
    """Where a draft comes from, with what its first token is trusted at the start: right ones of how many."""

    GRAMMAR = (9.0, 10.0)
    LONG_MATCH = (3.0, 4.0)
    MTP = (7.0, 10.0)
    SHORT_MATCH = (1.0, 2.0)


@dataclass(frozen=True)
class Draft:
    """The tokens that may come next.

    Attributes:
        place: the number of the first one in its reply.
    """

    token_ids: tuple[int, ...]
    origin: Origin
    place: int


class Trust:
    """How often a reply's drafts were right, by origin. Also learns from drafts that no step ran."""

    def __init__(self) -> None:
        self._counts = {origin: origin.value for origin in Origin}
        self._last: Draft | None = None

    def chance(self, origin: Origin) -> float:
        """That the next token of a draft is right, if those before it are."""
        right, tried = self._counts[origin]
        return right / tried

    def forget(self, origin: Origin) -> None:
        """Moves towards the trust at the start, where nothing is drafted and so nothing can be learned."""
        (right, tried), (first_right, first_tried) = self._counts[origin], origin.value
        kept = 1 - _FORGOTTEN
        self._counts[origin] = kept * right + _FORGOTTEN * first_right, kept * tried + _FORGOTTEN * first_tried

    def remember(self, draft: Draft | None) -> None:
        """Remembers a draft until its reply has gone on."""
        self._last = draft

    def compare(self, token_ids: Sequence[int]) -> None:
        """Compares the remembered draft with the reply's tokens."""
        draft, self._last = self._last, None
        if draft is None:
            return
        right, tried = self._counts[draft.origin]
        for drafted, said in zip(draft.token_ids, token_ids[draft.place :], strict=False):
            right, tried = right * _KEPT + (drafted == said), tried * _KEPT + 1
            if drafted != said:
                break
        self._counts[draft.origin] = right, tried


class Repeats:
    """Finds what followed the last occurrence of a text's end. Takes constant time a token."""

    def __init__(self, token_ids: np.ndarray) -> None:
        """token_ids: [T] int64, the prompt's, of which the last ones are searched."""
        token_ids = token_ids[-_MOST_SEARCHED:]
        self._token_ids: list[int] = token_ids.tolist()
        short = _keys(token_ids)
        # The text's end itself isn't found: nothing follows it yet.
        self._short = dict(zip(short[:-1].tolist(), range(_SHORT, len(token_ids)), strict=True))
        self._long = dict(zip(_joined(short)[:-1].tolist(), range(_LONG, len(token_ids)), strict=True))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        for token_id in token_ids:
            short, long = self._ends()
            place = len(self._token_ids)
            if short is not None:
                self._short[short] = place
            if long is not None:
                self._long[long] = place
            self._token_ids.append(token_id)

    def following(self, most: int) -> tuple[list[int], Origin] | None:
        """Up to `most` tokens that followed the same end before, and the kind of match."""
        short, long = self._ends()
        for keys, key, origin in ((self._long, long, Origin.LONG_MATCH), (self._short, short, Origin.SHORT_MATCH)):
            place = None if key is None else keys.get(key)
            if place is not None:
                found = self._token_ids[place : place + most]
                # A text that repeats itself goes on with what it has just said.
                while len(found) < most:
                    found += found[: most - len(found)]
                return found, origin
        return None

    def _ends(self) -> tuple[int | None, int | None]:
        end = self._token_ids[-_LONG:]
        if len(end) < _SHORT:
            return None, None
        short = _keys(np.array(end, dtype=np.int64))
        return int(short[-1]), int(_joined(short)[-1]) if len(end) == _LONG else None


def _keys(token_ids: np.ndarray) -> np.ndarray:
    """[T - 2] int64, one for each three tokens in a row."""
    if len(token_ids) < _SHORT:
        return np.zeros(0, dtype=np.int64)
    one, two, three = token_ids[:-2], token_ids[1:-1], token_ids[2:]
    return (one << 2 * _ID_BITS) | (two << _ID_BITS) | three


def _joined(keys: np.ndarray) -> np.ndarray:
    """One for each six tokens in a row. Two texts may share one: a wrong draft does no harm."""
    with np.errstate(over="ignore"):
        return keys[:-_SHORT] * np.int64(0x9E3779B97F4A7C15 - 2**64) + keys[_SHORT:]


class DraftTime:
    """Seconds that the MTP layer takes for one token."""

    def __init__(self) -> None:
        self.seconds = _TINY

    def add(self, seconds: float) -> None:
        """Counts a measurement; one that was interrupted says little."""
        is_first = self.seconds == _TINY
        self.seconds = seconds if is_first else 0.8 * self.seconds + 0.2 * min(seconds, 2 * self.seconds)

    def forget(self) -> None:
        """Becomes a little cheaper where nothing is drafted, so that it is measured again one day."""
        self.seconds = max(self.seconds * (1 - _FORGOTTEN), _TINY)


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
        chance: that a drafted token is right, if those before it are.
        most: drafted tokens.
        token_s: seconds that drafting one takes.
    """

    chance: float = 0.0
    most: int = 0
    token_s: float = 0.0

    def worth(self, row_s: float) -> float:
        """Right tokens a second of its first one, if a row more takes `row_s`."""
        return self.chance / max(row_s + self.token_s, _TINY)


def chosen_lengths(offers: Sequence[Offer], times: StepTimes, most: int) -> list[int]:
    """How many drafted tokens of each reply one step should verify: those that give the most tokens a second.

    Args:
        offers: of each reply.
        most: drafted tokens of all replies together.
    """
    if not times.knows(len(offers)):
        # Without the time of a plain step, nobody knows what pays.
        return [0] * len(offers)
    best, lengths = len(offers) / times.expected(len(offers)) * _LEAST_GAIN, [0] * len(offers)
    chosen, tokens, drafting_s = [0] * len(offers), float(len(offers)), 0.0
    for _ in range(most):
        left = [index for index, offer in enumerate(offers) if chosen[index] < offer.most]
        if not left:
            break
        likeliest = max(left, key=lambda index: offers[index].chance ** (chosen[index] + 1))
        chosen[likeliest] += 1
        tokens += offers[likeliest].chance ** chosen[likeliest]
        drafting_s += offers[likeliest].token_s
        speed = tokens / (times.expected(len(offers) + sum(chosen)) + drafting_s)
        if speed > best:
            best, lengths = speed, [*chosen]
    return lengths
