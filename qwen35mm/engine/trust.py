"""How often drafts were right, by their origin and by the depth of a token in its draft."""

from __future__ import annotations

from collections.abc import Sequence

from qwen35mm.engine.speculation import MAX_DRAFTS, Draft, Origin

# What the first chances weigh, in drafts.
_START = 4.0
# Old drafts count less: in a reply one of twenty drafts ago a third, in the experience of all replies one of a hundred.
_KEPT, _KEPT_BY_ALL = 0.95, 0.99
# Steps without the layer's drafts after which it is tried again, and the most of them.
_LEAST_REST, _MOST_REST = 64, 1024


class Rates:
    """How often drafts were right by depth: for each token of a draft, its chance if those before it are right.

    Args:
        chances: the first ones.
        kept: what a draft weighs in comparison with the next one.
    """

    def __init__(self, chances: Sequence[float], kept: float) -> None:
        self._kept = kept
        self._right = [_START * chance for chance in chances]
        self._tried = [_START for _ in chances]

    @property
    def chances(self) -> tuple[float, ...]:
        """By depth."""
        return tuple(right / tried for right, tried in zip(self._right, self._tried, strict=True))

    def count(self, num_right: int, *, ends_wrong: bool) -> None:
        """Counts a draft: its first tokens that were right, and whether a wrong one followed."""
        for depth in range(num_right + ends_wrong):
            self._right[depth] = self._kept * self._right[depth] + (depth < num_right)
            self._tried[depth] = self._kept * self._tried[depth] + 1

    def suppose(self, depth: int, chance: float) -> None:
        """Makes a depth's chance at least a guess, which the next draft decides about."""
        if self._right[depth] < chance * self._tried[depth]:
            self._right[depth], self._tried[depth] = chance, 1.0


class Experience:
    """What the drafts of all replies so far say about a new reply's."""

    def __init__(self) -> None:
        self.of = {origin: Rates([origin.value] * MAX_DRAFTS, _KEPT_BY_ALL) for origin in Origin}


class Trust:
    """How often a reply's drafts were right. Also learns from drafts that no step ran.

    The MTP layer only drafts what a step runs. So if that no longer pays, it is tried again from time to time, ever
    more rarely while it fails.
    """

    def __init__(self, experience: Experience) -> None:
        self._experience = experience
        self._of = {origin: Rates(rates.chances, _KEPT) for origin, rates in experience.of.items()}
        self._rested = [0] * MAX_DRAFTS
        self._rests = [_LEAST_REST] * MAX_DRAFTS
        self._last: Draft | None = None

    def chances(self, origin: Origin) -> tuple[float, ...]:
        """For each token of a draft, that it is right if those before it are."""
        return self._of[origin].chances

    def rest(self, length: int, most: int) -> bool:
        """Counts a step that took the layer's first `length` drafts, and could have taken `most`.

        Returns:
            Whether the layer should be tried again.
        """
        ends, self._rested[:length] = False, [0] * length
        for depth in range(length, most):
            self._rested[depth] += 1
            if self._rested[depth] >= self._rests[depth]:
                self._rested[depth], self._rests[depth] = 0, min(2 * self._rests[depth], _MOST_REST)
                self._of[Origin.MTP].suppose(depth, Origin.MTP.value)
                ends = True
        return ends

    def remember(self, draft: Draft | None) -> None:
        """Remembers a draft until its reply has gone on."""
        self._last = draft

    def compare(self, token_ids: Sequence[int]) -> None:
        """Compares the remembered draft with the reply's tokens."""
        draft, self._last = self._last, None
        if draft is None:
            return
        said = token_ids[draft.place : draft.place + len(draft.token_ids)]
        matches = [drafted == token_id for drafted, token_id in zip(draft.token_ids, said, strict=False)]
        num_right = matches.index(False) if False in matches else len(matches)
        for rates in (self._of[draft.origin], self._experience.of[draft.origin]):
            rates.count(num_right, ends_wrong=num_right < len(matches))
        if draft.origin is Origin.MTP:
            self._rests[:num_right] = [_LEAST_REST] * num_right
