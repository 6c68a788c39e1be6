"""Where sentences, lines and tags end, as far as punctuation tells."""

from __future__ import annotations

import re

_CLOSERS = "\"'”’»)\\]}」』）】*_`"
_END = re.compile(rf"(?:[.!?…؟۔।]+[{_CLOSERS}]*(?=\s|\Z))|(?:[。！？｡]+[{_CLOSERS}]*)")
_SEPARATOR = re.compile("[,，、;；]")

# They end in a full stop in the middle of a sentence. A single letter does so too, as in `J. Smith`.
_ABBREVIATIONS = frozenset(
    {"mr", "mrs", "ms", "dr", "prof", "st", "mt", "ft", "vs", "fig", "vol", "approx", "cf", "e.g", "i.e", "u.s", "u.k"}
)
_LONGEST_ABBREVIATION = max(len(word) for word in _ABBREVIATIONS)

_MIN_TAGS = 4
_MAX_WORDS_OF_A_TAG = 4
_MAX_CHARS_OF_A_TAG = 30


def sentence_ends(text: str) -> list[int]:
    """Offsets after each sentence's last character, closing quotation marks and brackets included.

    A full stop after an abbreviation, an initial or a list's number is no end. Chinese and Japanese stops need no space
    behind them.
    """
    return [match.end() for match in _END.finditer(text) if not _stays_open(text, match)]


def cut_back(text: str) -> str:
    """A text that was cut off, up to the end of its last whole sentence or line; a list of tags, up to its last comma.

    A line that ends in a colon announces what is missing, and goes too. Where there is no such end the text stays.
    """
    ends = sentence_ends(text)
    if ends and ends[-1] == len(text):
        return text
    end = max(ends[-1] if ends else 0, _end_of_last_line(text))
    if end == 0 and _is_list_of_tags(text):
        end = [match.start() for match in _SEPARATOR.finditer(text)][-1]
    return text[:end].rstrip() if end else text


def _stays_open(text: str, match: re.Match[str]) -> bool:
    if match[0] != ".":
        return False
    start = max(0, match.start() - _LONGEST_ABBREVIATION - 2)
    before = text[start : match.start()]
    word = re.split(r"[\s(\"'“‘]", before)[-1]
    if len(word) == 1 and word.isalpha():
        return True
    line_start = text.rfind("\n", 0, match.start()) + 1
    return word.casefold() in _ABBREVIATIONS or text[line_start : match.start()].strip().isdigit()


def _end_of_last_line(text: str) -> int:
    """Where the last line that is whole and announces nothing ends; 0 if there is none."""
    end = text.rfind("\n")
    while end > 0:
        start = text.rfind("\n", 0, end)
        line = text[start + 1 : end].strip()
        if line and line[-1] not in ":：":
            return end
        end = start
    return 0


def _is_list_of_tags(text: str) -> bool:
    tags = _SEPARATOR.split(text)
    return len(tags) >= _MIN_TAGS and all(
        len(tag.split()) <= _MAX_WORDS_OF_A_TAG and len(tag.strip()) <= _MAX_CHARS_OF_A_TAG for tag in tags
    )
