"""Statistics of captions: their lengths, and in how many of them each tag or word occurs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import median

from qwen35mm.captioning.texts.words import contains
from qwen35mm.review.edits import is_tags, listed_tags, tag_key

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
# Words that say nothing about a caption, in English.
_COMMON = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "from", "has", "have", "he", "her", "his"),
        *("in", "into", "is", "it", "its", "of", "on", "or", "she", "some", "that", "the", "their", "them", "there"),
        *("these", "they", "this", "to", "was", "were", "which", "while", "who", "with"),
    )
)
_MAX_BARS = 12
_STEPS = (1, 2, 5)
_BAR_PX, _ROW_PX, _LABEL_PX, _COUNT_PX = 360, 22, 90, 70


@dataclass(frozen=True)
class Bar:
    """A part of a histogram: how many lengths are at least `low` and at most `high`; `over` the trainer's limit."""

    low: int
    high: int
    num: int
    over: bool = False

    @property
    def label(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"


@dataclass
class Statistics:
    """What captions have in common.

    Attributes:
        num_media: media, with or without a caption.
        lengths: of the captions, in the unit of `measure`'s `length`.
        num_tags: captions that are lists of tags.
        tags, words: in how many captions each occurs; tags only of lists of tags, in their most frequent spelling.
        lacking: the names of the captions without each wanted word.
    """

    num_media: int = 0
    lengths: list[int] = field(default_factory=list)
    num_tags: int = 0
    tags: Counter[str] = field(default_factory=Counter)
    words: Counter[str] = field(default_factory=Counter)
    lacking: dict[str, list[str]] = field(default_factory=dict)

    @property
    def num_captions(self) -> int:
        return len(self.lengths)

    @property
    def median(self) -> float:
        return median(self.lengths) if self.lengths else 0

    @property
    def is_about_tags(self) -> bool:
        """Whether most captions are lists of tags."""
        return 2 * self.num_tags > self.num_captions

    @property
    def counts(self) -> Counter[str]:
        """The tags or, if most captions are sentences, the words."""
        return self.tags if self.is_about_tags else self.words

    @property
    def num_counted(self) -> int:
        """How many captions `counts` is about."""
        return self.num_tags if self.is_about_tags else self.num_captions

    def over(self, share: float) -> list[str]:
        """Tags or words in more than this share of the captions, the most frequent first."""
        return [name for name, num in self.counts.most_common() if num > share * self.num_counted]

    def under(self, share: float) -> list[str]:
        """Tags or words in less than this share of the captions, the rarest first."""
        rare = [(num, name) for name, num in self.counts.items() if num < share * self.num_counted]
        return [name for _, name in sorted(rare)]

    def bars(self, limit: int | None = None) -> list[Bar]:
        """A histogram of the lengths with at most a dozen bars, and one more for what is over the limit.

        Args:
            limit: the most tokens that the trainer reads.
        """
        if not self.lengths:
            return []
        most = max(self.lengths)
        step = next(
            factor * 10**power for power in range(20) for factor in _STEPS if most // (factor * 10**power) < _MAX_BARS
        )
        ends = {*range(step - 1, most + step, step)}
        if limit is not None and most > limit:
            ends = {end for end in ends if end < limit} | {limit, max(ends)}
        found: list[Bar] = []
        low = min(self.lengths) // step * step
        for high in sorted(end for end in ends if end >= low):
            num = sum(low <= length <= high for length in self.lengths)
            found.append(Bar(low, high, num, limit is not None and low > limit))
            low = high + 1
        return found


def measure(
    captions: Iterable[tuple[str, str]], length: Callable[[str], int], lacking: Sequence[str] = ()
) -> Statistics:
    """The statistics of captions with their names. A medium without a caption has an empty one.

    Raises:
        CaptioningError: a `re:PATTERN` in `lacking` isn't valid.
    """
    found = Statistics(lacking={word: [] for word in lacking})
    spelled: dict[str, Counter[str]] = {}
    for name, text in captions:
        found.num_media += 1
        if not text.strip():
            continue
        found.lengths.append(length(text))
        if is_tags(text):
            found.num_tags += 1
            for key, tag in {tag_key(tag): tag for tag in listed_tags(text)}.items():
                spelled.setdefault(key, Counter())[tag] += 1
        found.words.update({word.casefold() for word in _WORD.findall(text)} - _COMMON)
        for word, names in found.lacking.items():
            if not contains(text, word):
                names.append(name)
    for spellings in spelled.values():
        found.tags[spellings.most_common(1)[0][0]] = spellings.total()
    return found


def num_words(text: str) -> int:
    """The words of a text."""
    return len(_WORD.findall(text))


def drawing(bars: Sequence[Bar], title: str) -> str:
    """A histogram as an SVG picture, readable on a light and a dark ground."""
    most = max((bar.num for bar in bars), default=0) or 1
    width, height = _LABEL_PX + _BAR_PX + _COUNT_PX, (len(bars) + 2) * _ROW_PX
    rows = [f'<text x="0" y="{_ROW_PX - 6}" font-weight="bold">{escape(title)}</text>']
    for at, bar in enumerate(bars, start=1):
        top, px = at * _ROW_PX + 4, round(bar.num / most * _BAR_PX, 1)
        color = "#d02c32" if bar.over else "#625af0"
        rows += [
            f'<text x="{_LABEL_PX - 8}" y="{top + 12}" text-anchor="end">{bar.label}</text>',
            f'<rect x="{_LABEL_PX}" y="{top}" width="{px}" height="{_ROW_PX - 6}" fill="{color}"/>',
            f'<text x="{_LABEL_PX + px + 6}" y="{top + 12}">{bar.num:,}</text>',
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="13" fill="#80808c">\n' + "\n".join(rows) + "\n</svg>\n"
    )
