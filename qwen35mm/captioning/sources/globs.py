"""Which names are taken: globs over the part of a name that lies below its source."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pathspec import PathSpec

from qwen35mm.errors import CaptioningError


class NameFilter:
    """Names that match one of `include` (all, where there is none) and none of `exclude`.

    A name is a path with forward slashes, and a pattern is one of `.gitignore`: `*`, `?` and `[...]` stay within one
    part of it, `**` stands for any number of parts, also none. A pattern without a slash is looked for at any depth;
    one with a slash, also in front, begins at the source. What matches takes along all that lies in it. Unlike there,
    upper and lower case are alike, and `#` and `!` are letters.

    Raises:
        CaptioningError: a pattern has no meaning.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self._include = _compiled(include) if include else None
        self._exclude = _compiled(exclude)

    def takes(self, name: str) -> bool:
        """Whether an item of this name is wanted."""
        if self._include is not None and not self._include.match_file(_folded(name)):
            return False
        parts = name.split("/")
        return all(self.enters("/".join(parts[:length])) for length in range(1, len(parts) + 1))

    def enters(self, name: str) -> bool:
        """Whether a folder of this name, whose own parents are entered, can hold something that is wanted."""
        return not self._exclude.match_file(_folded(name))


def _compiled(patterns: Sequence[str]) -> PathSpec:
    folded = [_folded(pattern) for pattern in patterns]
    try:
        return PathSpec.from_lines(
            "gitignore", [f"\\{text}" if text.startswith(("#", "!")) else text for text in folded]
        )
    except (ValueError, re.error) as error:
        raise CaptioningError(f"One of the patterns {', '.join(patterns)} can't be read: {error}.") from error


def _folded(name: str) -> str:
    # A line end within a name is none for a pattern.
    return name.casefold().replace("\n", "\0")
