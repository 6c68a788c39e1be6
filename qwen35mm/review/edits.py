"""Edits of a caption's text: find and replace, and what is done with tags.

Tags are the parts between commas, line by line. Two tags are the same if they differ only in case, `_` or space, or the
backslashes that some tools write before brackets. sd-scripts' `|||` separates the tags that stay in place, and what
stands in braces is one tag, however many commas are in it.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from qwen35mm.captioning.texts.cleanup import sentence_ends
from qwen35mm.captioning.texts.words import contains
from qwen35mm.errors import CaptioningError
from qwen35mm.review.replacing import Replacing
from qwen35mm_preprocess.say import say

# The separators that trainers know, and the comma of Chinese and Japanese.
_COMMA = re.compile(r"\s*[,，、]\s*")
_FIXED = re.compile(r"\s*\|\|\|\s*")
_BRACES = re.compile(r"\{[^{}]*\}")
_LONGEST_TAG = 80
_MOST_COMPARED = 4_000_000
# Words, spaces and punctuation, for a diff.
_PARTS = re.compile(r"\w+|\s+|[^\w\s]")
# The end of a sentence, after which no comma follows.
_FULL_STOPS = tuple(".!?…。！？")


@dataclass(frozen=True)
class Edit:
    """An edit of captions.

    Attributes:
        label: what it does, in a person's words.
        change: the new text of a text; None if the text isn't one that this edit is for.
    """

    label: str
    change: Callable[[str], str | None]


def replacing_text(find: str, by: str, *, regex: bool = False, ignore_case: bool = False, words: bool = False) -> Edit:
    """Replaces a text everywhere.

    Args:
        find: the text or, with `regex`, a regular expression of Python, where `^` and `$` match at each line.
        by: the new text; with `regex`, `\\1` and `\\g<name>` stand for groups.
        words: only whole words.

    Raises:
        CaptioningError: nothing to find, or the expression isn't valid. Changing a text raises it if the expression
            takes too long.
    """
    if not find:
        raise CaptioningError(say("There is no text to find."))
    pattern = find if regex else re.escape(find)
    if words:
        pattern = rf"(?<!\w)(?:{pattern})(?!\w)"
    try:
        compiled = re.compile(pattern, re.MULTILINE | (re.IGNORECASE if ignore_case else 0))
        template = by if regex else by.replace("\\", "\\\\")
        # Checks the groups that `by` names, also if nothing matches.
        compiled.sub(template, "")
    except (re.error, IndexError) as error:
        raise CaptioningError(say("This isn't a valid regular expression: {reason}.", reason=str(error))) from error
    change = Replacing(compiled, template) if regex else functools.partial(compiled.sub, template)
    return Edit(f"replace {find!r} by {by!r}", change)


def adding_tags(tags: Sequence[str], *, last: bool = False, each_line: bool = False) -> Edit:
    """Adds the tags that a caption lacks, in front or at the end.

    Args:
        each_line: each line is a caption; otherwise all lines are one.
    """
    added = _checked(tags)

    def of(text: str) -> str:
        present = {tag_key(tag) for line in text.splitlines() for tag in tags_in(line)}
        is_prose = not is_tags(text)
        missing = [tag for tag in added if not (tag_key(tag) in present or (is_prose and contains(text, tag)))]
        if not missing:
            return text
        if not text.strip():
            return ", ".join(missing)
        if not last:
            return ", ".join([*missing, text])
        body = text.rstrip()
        return f"{body}{' ' if body.endswith(_FULL_STOPS) else ', '}{', '.join(missing)}"

    def change(text: str) -> str:
        return "\n".join(map(of, text.split("\n"))) if each_line else of(text)

    return Edit(f"add {', '.join(added)}", change)


def removing_tags(tags: Sequence[str]) -> Edit:
    """Removes tags wherever they stand."""
    removed = {tag_key(tag) for tag in _checked(tags)}
    return Edit(
        f"remove {', '.join(_checked(tags))}",
        lambda text: _by_lines(text, lambda sections: [_without(section, removed) for section in sections]),
    )


def deduplicating() -> Edit:
    """Removes tags that the line has already; the first of them stays. Only in lists of tags."""

    def once(sections: list[list[str]]) -> list[list[str]]:
        seen: set[str] = set()
        return [
            [tag for tag in section if not (tag_key(tag) in seen or seen.add(tag_key(tag)))] for section in sections
        ]

    return Edit("remove duplicate tags", lambda text: _by_lines(text, once) if is_tags(text) else None)


def sorting(keep: int = 0, counts: Counter[str] | None = None) -> Edit:
    """Sorts tags. Only in lists of tags.

    Args:
        keep: how many tags in front stay where they are, as trainers' `keep_tokens`.
        counts: captions with each tag, by `count_tags`; then the most frequent tag comes first. None sorts by name.
    """

    def order(tag: str) -> tuple[int, str]:
        return (0 if counts is None else -counts[tag_key(tag)], tag_key(tag))

    def in_order(sections: list[list[str]]) -> list[list[str]]:
        # What stands before the first `|||`, and after the second, keeps its place.
        at = 1 if len(sections) > 1 else 0
        kept = keep if at == 0 else 0
        moved = [*sections[at][:kept], *sorted(sections[at][kept:], key=order)]
        return [*sections[:at], moved, *sections[at + 1 :]]

    label = "sort tags" if counts is None else "sort tags by frequency"
    return Edit(label, lambda text: _by_lines(text, in_order) if is_tags(text) else None)


def tags_in(line: str) -> list[str]:
    """The tags of one line, in order."""
    return [tag for section in _sections(line) for tag in section]


def is_tags(text: str) -> bool:
    """Whether a text consists of tags, not of sentences."""
    return not any(
        sentence_ends(line) or any(len(tag) > _LONGEST_TAG for tag in tags_in(line)) for line in text.splitlines()
    )


def count_tags(texts: Iterable[str]) -> Counter[str]:
    """In how many texts each tag occurs, for `sorting`."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update({tag_key(tag) for line in text.splitlines() for tag in tags_in(line)})
    return counts


def listed_tags(text: str) -> list[str]:
    """The tags that a person lists, between commas or lines."""
    return [tag for line in text.splitlines() for tag in tags_in(line)]


def differences(before: str, after: str) -> list[tuple[str, str, str]]:
    """Two texts as parts: what both have, then what only the first has, then what only the second has."""
    old, new = _PARTS.findall(before), _PARTS.findall(after)
    if len(old) * len(new) > _MOST_COMPARED:
        return [("", before, after)]
    found: list[tuple[str, str, str]] = []
    at = to = 0
    for same in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        removed, added = "".join(old[at : same.a]), "".join(new[to : same.b])
        kept = "".join(old[same.a : same.a + same.size])
        found += [("", removed, added), (kept, "", "")]
        at, to = same.a + same.size, same.b + same.size
    return [each for each in found if any(each)]


def tag_key(tag: str) -> str:
    """What is equal for equal tags."""
    return " ".join(tag.replace("\\(", "(").replace("\\)", ")").replace("_", " ").casefold().split())


def _checked(tags: Sequence[str]) -> list[str]:
    """Raises CaptioningError: there is none."""
    found = list(dict.fromkeys(tag for each in tags for tag in listed_tags(each)))
    if not found:
        raise CaptioningError(say("There is no tag."))
    return found


def _without(section: list[str], removed: set[str]) -> list[str]:
    return [tag for tag in section if tag_key(tag) not in removed]


def _sections(line: str) -> list[list[str]]:
    """The tags of a line, in the sections between `|||`."""
    # A comma in braces is hidden while the line is split.
    hidden = _BRACES.sub(lambda match: _COMMA.sub(lambda comma: comma[0].translate(_HIDE), match[0]), line.strip())
    sections = ([tag.translate(_SHOW) for tag in _COMMA.split(part) if tag] for part in _FIXED.split(hidden))
    return list(sections)


# Private characters of Unicode, which no caption has.
_HIDE = {ord(","): "\ue000", ord("，"): "\ue001", ord("、"): "\ue002"}
_SHOW = {ord(to): chr(char) for char, to in _HIDE.items()}


def _by_lines(text: str, change: Callable[[list[list[str]]], list[list[str]]]) -> str:
    """Changes a text's tags line by line. A line whose tags stay is left as it is; one without tags is removed."""
    lines: list[str] = []
    for line in text.split("\n"):
        before = _sections(line)
        after = change(before)
        if after == before:
            lines.append(line)
            continue
        comma = _COMMA.search(line)
        separator = ", " if comma is None else comma[0]
        joined = " ||| ".join(separator.join(section) for section in after if section)
        if joined:
            lines.append(joined)
    return "\n".join(lines)
