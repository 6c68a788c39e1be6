"""A model caught in a loop: the end of its reply is the same again and again."""

from __future__ import annotations

from qwen35mm.captioning.texts.sentences import sentence_ends

_MIN_ROUNDS = 4
_MIN_CHARS = 48
# Leader dots, ruled lines and rows of zeros belong to a text that was read off a picture.
_MIN_CHARS_WITHOUT_LETTERS = 200
# What stands between two rounds is missing after the last one: `, ` or an empty line.
_SEPARATOR_CHARS = 2
_SEPARATORS = ",，、;；"


def without_loop(text: str) -> str | None:
    """The text with one round of the loop at its end, or None where it doesn't end in one.

    A loop is at least 4 rounds of the same characters, 48 characters in all; 200 where they have no letter. The last
    round may be cut off anywhere. Its time grows linearly with the text.
    """
    if len(text) < _MIN_CHARS:
        return None
    repeats = _prefix_lengths(text[::-1])
    for period in range(1, (len(text) + _SEPARATOR_CHARS) // _MIN_ROUNDS + 1):
        run = period + repeats[period]
        if run < _MIN_CHARS or run + _SEPARATOR_CHARS < _MIN_ROUNDS * period:
            continue
        if run >= _MIN_CHARS_WITHOUT_LETTERS or any(char.isalpha() for char in text[-period:]):
            return _one_round(text, len(text) - run, period)
    return None


def _one_round(text: str, start: int, period: int) -> str:
    """Cut after the first whole round.

    The run may begin in the middle of a round, where what stands before the loop happens to end like it. So the cut
    is where a line, a sentence, a tag or a word ends, within the round that follows.
    """
    first = start + period
    window = range(first, min(first + period, len(text) - 1) + 1)
    ends = {start + end for end in sentence_ends(text[start : window[-1] + 1])}
    at_line = (at for at in window if "\n" in text[at - 1 : at + 1])
    at_sentence = (at for at in window if _without_space(text, at) in ends)
    at_tag = (at for at in window if text[at] in _SEPARATORS or text[_without_space(text, at) - 1] in _SEPARATORS)
    at_word = (at for at in window if not (text[at - 1].isalnum() and text[at].isalnum()))
    for ends_here in (at_line, at_sentence, at_tag, at_word):
        for at in ends_here:
            return text[:at].rstrip().rstrip(_SEPARATORS)
    return text[:first]


def _without_space(text: str, at: int) -> int:
    while at > 0 and text[at - 1].isspace():
        at -= 1
    return at


def _prefix_lengths(text: str) -> list[int]:
    """For each offset, how many characters from there on are the same as from the beginning (the Z function)."""
    lengths = [0] * len(text)
    left = right = 0
    for at in range(1, len(text)):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < len(text) and text[length] == text[at + length]:
            length += 1
        if at + length > right:
            left, right = at, at + length
        lengths[at] = length
    return lengths
