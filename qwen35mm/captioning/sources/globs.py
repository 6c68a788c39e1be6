"""Which names are taken: globs over the part of a name that lies below its source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate


class NameFilter:
    """Names that match one of `include` (all, where there is none) and none of `exclude`.

    A name is a path with forward slashes. `*`, `?` and `[...]` stay within one part of it, and `**` stands for any
    number of parts, also none. A pattern without a slash is looked for at any depth; one with a slash, also in front,
    begins at the source. Upper and lower case are alike. What is excluded takes along all that lies in it.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self._include = [_compiled(pattern) for pattern in include]
        self._exclude = [_compiled(pattern) for pattern in exclude]

    def takes(self, name: str) -> bool:
        """Whether an item of this name is wanted."""
        parts = name.split("/")
        if self._include and not any(_matches(parts, pattern) for pattern in self._include):
            return False
        return not any(self._excludes(parts[:length]) for length in range(1, len(parts) + 1))

    def enters(self, name: str) -> bool:
        """Whether a folder of this name, whose own parents are entered, can hold something that is wanted."""
        return not self._excludes(name.split("/"))

    def _excludes(self, parts: list[str]) -> bool:
        return any(_matches(parts, pattern) for pattern in self._exclude)


# One regular expression for each part of a name; None stands for `**`.
_Pattern = list["re.Pattern[str] | None"]


def _compiled(pattern: str) -> _Pattern:
    trimmed = pattern.rstrip("/")
    parts = trimmed.lstrip("/").split("/") if "/" in trimmed else ["**", trimmed]
    return [None if part == "**" else re.compile(translate(part), re.IGNORECASE) for part in parts if part != "."]


def _matches(parts: Sequence[str], pattern: _Pattern) -> bool:
    # How many parts of the name can have been used up; a search that goes back would be slow with many `**`.
    used = {0}
    for expression in pattern:
        if expression is None:
            used = set(range(min(used), len(parts) + 1))
        else:
            used = {count + 1 for count in used if count < len(parts) and expression.match(parts[count])}
        if not used:
            return False
    return len(parts) in used
