"""A few random media of a scan, in bounded memory."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.where import Where, item_facts
from qwen35mm_preprocess import MediaKind

# Media that are held for a condition that only their size or pixels can tell, and most of their bytes that lie in a
# container.
_MOST_HELD = 20_000
_MOST_BYTES = 256 << 20
_MOST_NAMED = 20


@dataclass
class Sample:
    """Random media.

    Attributes:
        items: in random order, as many as were held; the first ones are as random as all of them.
        num: media of the whole scan by their kind, without those that `where` is known to leave out.
        num_unreadable: entries of the scan that can't be read.
        unreadable: the first of them.
    """

    items: list[Item] = field(default_factory=list)
    num: Counter[MediaKind] = field(default_factory=Counter)
    num_unreadable: int = 0
    unreadable: list[Unreadable] = field(default_factory=list)


def draw(
    entries: Iterable[Item | Unreadable], num: int, *, seed: int, where: Where | None, most_bytes: int = _MOST_BYTES
) -> Sample:
    """Draws from a scan, each medium with the same chance.

    A medium's place depends on the seed and its name alone, so other media don't change the order of those that stay.

    Args:
        num: the fewest media to hold, if there are so many. More are held if `where` can't be decided here.
        most_bytes: of media that lie in a container; beyond it, only `num` are held.
    """
    found = Sample()
    # The media with the lowest draws, as a heap with the highest in front.
    held: list[tuple[int, str, Item]] = []
    num_bytes = 0
    most = num if where is None or not (where.needs_size or where.needs_pixels) else max(num, _MOST_HELD)
    for entry in entries:
        if isinstance(entry, Unreadable):
            found.num_unreadable += 1
            found.unreadable += [entry] if len(found.unreadable) < _MOST_NAMED else []
            continue
        if where is not None and _holds(where, entry) is False:
            continue
        found.num[entry.kind] += 1
        heapq.heappush(held, (-drawn(seed, entry.name), entry.name, entry))
        num_bytes += _bytes_of(entry)
        while len(held) > most or (len(held) > num and num_bytes > most_bytes):
            num_bytes -= _bytes_of(heapq.heappop(held)[2])
    found.items = [item for _, _, item in sorted(held, key=lambda each: each[:2], reverse=True)]
    return found


def drawn(seed: int, name: str) -> int:
    """A random number from 0 below 2**64."""
    return int.from_bytes(hashlib.sha256(f"{seed} {printable(name)}".encode()).digest()[:8], "big")


def _holds(where: Where, item: Item) -> bool | None:
    try:
        return where.holds(item_facts(item))
    except OSError:
        return None  # reading it says why


def _bytes_of(item: Item) -> int:
    return len(item.source) if isinstance(item.source, bytes) else 0
