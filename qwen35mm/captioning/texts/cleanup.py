"""Cleans a model's reply into a caption: removes text around it, loops, and a cut-off end.

Removes only text that clearly isn't the caption. Knows lead-ins in English and Chinese.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qwen35mm.captioning.texts.words import contains

TAG_DIVIDER = "|||"
"""What sd-scripts' documents take for `keep_tokens_separator`."""

_BETWEEN_TAGS = re.compile(rf",|{re.escape(TAG_DIVIDER)}")

TRUNCATED = "truncated"
REPETITION_REMOVED = "repetition removed"


@dataclass(frozen=True)
class Cleaned:
    """A caption and its flags.

    Attributes:
        text: empty if the reply contains only thinking or a lead-in.
        flags: `TRUNCATED` if the reply reached its token limit, `REPETITION_REMOVED` if it looped.
    """

    text: str
    flags: tuple[str, ...] = ()


def clean(text: str, *, finished: bool, keep_unfinished: bool = False, one_line: bool = False) -> Cleaned:
    """A reply without the text that a model writes around a caption.

    Removes thinking, a code fence or quotation marks around the whole, a lead-in such as `Here is a caption:`, and all
    but one round of a loop at the end. `clean` of its own result, as a finished reply, changes nothing. Takes time
    linear in the text's length.

    Args:
        finished: whether the model ended the reply itself; otherwise it reached its token limit.
        keep_unfinished: whether to keep the last sentence of an unfinished reply. Otherwise the text is cut back to its
            last complete sentence or line, or in a list of tags to the last comma. Without such an end, it stays.
        one_line: whether to replace each run of white space with a single space.
    """
    text = _unwrapped(text, finished=finished)
    looped = without_loop(text) is not None
    # Before the loop is cut: then its last complete round ends with a sentence, a line or a tag.
    if not finished and not keep_unfinished:
        text = cut_back(text)
    if one_line:
        text = " ".join(text.split())
    while True:
        text = _unwrapped(text, finished=finished)
        shorter = without_loop(text)
        if shorter is None:
            break
        text, looped = shorter, True
    flags = [] if finished else [TRUNCATED]
    if looped:
        flags.append(REPETITION_REMOVED)
    return Cleaned(text, tuple(flags))


class Around(NamedTuple):
    """What `wrap` puts around a caption."""

    prefix: str = ""
    suffix: str = ""
    trigger: str = ""


NOTHING_AROUND = Around()


def wrap(text: str, *, prefix: str = "", suffix: str = "", trigger: str = "") -> str:
    """A caption with prefix, suffix and trigger word for a training set.

    Prefix and suffix are joined without further spaces. The trigger word comes first, with a comma, unless the text
    contains it already. In a list of tags that contains it, it moves to the front.
    """
    wrapped = f"{prefix}{text}{suffix}"
    if not trigger:
        return wrapped
    if contains(wrapped, trigger):
        return _with_tag_first(wrapped, trigger)
    return f"{trigger}, {wrapped}"


def unwrap(text: str, *, prefix: str = "", suffix: str = "", trigger: str = "") -> str:
    """A caption without the additions of `wrap`."""
    text = text.removeprefix(f"{trigger}, ") if trigger else text
    return text.removeprefix(prefix).removesuffix(suffix)


def add_to(theirs: str, own: str, *, separator: str, trigger: str = "", first: bool = False, keep: int = 0) -> str:
    """A person's text with our caption. Their words and their order stay.

    The trigger word comes first, unless their text contains it. Where `TAG_DIVIDER` divides their text, as trainers
    with a `keep_tokens_separator` read it, ours comes into the part that may be shuffled.

    Args:
        own: our caption, which may begin with the trigger word and a comma.
        first: whether ours comes before theirs.
        keep: how many of their tags stay in front of ours; their trigger word always does.
    """
    head, kept_sep, body, divided, tail = "", "", theirs, "", ""
    lead = f"{trigger}, "
    if trigger:
        own = own.removeprefix(lead)
    if TAG_DIVIDER in theirs:
        head, kept_sep, body = theirs.partition(TAG_DIVIDER)
        body, divided, tail = body.partition(TAG_DIVIDER)
    elif first:
        keep = max(keep, trigger.count(",") + 1 if trigger and theirs.startswith(lead) else 0)
        ends = [match.start() for match in _SEPARATOR.finditer(theirs)]
        if keep and len(ends) < keep:
            head, body = theirs, ""
        elif keep:
            head, body = theirs[: ends[keep - 1]], theirs[ends[keep - 1] + 1 :].lstrip()
        kept_sep = separator if head else ""
    parts = [part for part in ((own, body) if first else (body, own)) if part.strip()]
    added = head + kept_sep + joined(parts, separator) + divided + tail
    return f"{trigger}, {added}" if trigger and not contains(theirs, trigger) else added


def replaced_in(
    text: str, old: str, own: str, *, original: str = "", trigger: str = "", first: bool = False
) -> str | None:
    """A text in which our caption takes the place of an earlier one of ours; None if that isn't there as it was.

    Args:
        old: the earlier caption, whose trigger word may stand apart from it.
        own: our caption, which may begin with the trigger word and a comma.
        original: the person's text before the earlier caption came, whose words stay.
        first: whether the earlier caption was put before the person's text.
    """
    own = own.removeprefix(f"{trigger}, ") if trigger else own
    for end in (0, *(match.end() for match in re.finditer(", ", old))):
        lead, body = old[:end], old[end:]
        is_theirs = contains(original, lead.removesuffix(", ")) if lead else False
        found = re.compile(rf"(?<!\w){re.escape(body)}(?!\w)")
        places = [match.span() for match in found.finditer(text)]
        if not body or len(places) <= len(found.findall(original)) or not (is_theirs or text.startswith(lead)):
            continue
        start, end = places[0 if first else -1]
        replaced = text[:start] + own + text[end:]
        replaced = replaced if is_theirs else replaced.removeprefix(lead)
        if holds(replaced, original):
            return with_trigger(replaced, trigger)
    return None


def with_trigger(text: str, trigger: str) -> str:
    """A text with a trigger word first, unless it has that already or the word is empty."""
    return f"{trigger}, {text}" if trigger and not contains(text, trigger) else text


def holds(text: str, original: str) -> bool:
    """Whether a text has a person's, as a whole or with our caption between two of its tags."""
    ends = [match.end() for match in _BETWEEN_TAGS.finditer(original)]
    halves = ((original[:end].rstrip(", |"), original[end:].lstrip()) for end in ends)
    return original in text or any(first in text and second in text for first, second in halves if first and second)


def joined(parts: Sequence[str], separator: str) -> str:
    """Texts with a separator between them. A comma doesn't follow the end of a sentence: there a space does."""
    text = ""
    for part in parts:
        ends = sentence_ends(text)
        plain = separator.strip() == "," and bool(ends) and ends[-1] == len(text.rstrip())
        text = f"{text}{' ' if plain else separator}{part}" if text else part
    return text


def _with_tag_first(text: str, tag: str) -> str:
    """A list of tags with one of its tags at the front; any other text as it is."""
    if not is_list_of_tags(text):
        return text
    tags = [each.strip() for each in _SEPARATOR.split(text)]
    at = next((at for at, each in enumerate(tags) if each.casefold() == tag.casefold()), 0)
    return ", ".join((tag, *tags[:at], *tags[at + 1 :])) if at else text


def _unwrapped(text: str, *, finished: bool) -> str:
    """Removes the text around a caption, layer by layer."""
    while True:
        before = text
        text = _without_thinking(text.replace("\r\n", "\n")).strip()
        text = _without_fence(text)
        text = _without_lead_in(text)
        text = _without_quotes(text, finished=finished)
        if text == before:
            return text


_THINKING = re.compile(r"<(think|thinking)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_END_OF_THINKING = re.compile(r"</think(?:ing)?>", re.IGNORECASE)


def _without_thinking(text: str) -> str:
    # A closing tag alone ends thinking that the prompt opened.
    return _END_OF_THINKING.split(_THINKING.sub("", text))[-1]


_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)


def _without_fence(text: str) -> str:
    match = _FENCE.fullmatch(text)
    return match[1].strip() if match and "```" not in match[1] else text


_CAPTION = r"(?:captions?|descriptions?|alt[- ]?texts?|alternative\ texts?|tags|transcriptions?|transcripts?|summary)"
_MEDIUM = r"(?:image|video|picture|photo)"
_LABELS = rf"(?:(?:{_MEDIUM}\ )?(?:caption|alt[- ]text|tags)|{_MEDIUM}\ description)"
_CHINESE_CAPTION = "(?:描述|说明|标题|标签|字幕)"
_LEAD_IN = re.compile(
    rf"""
    (?:
        (?:
            (?:(?:sure|certainly|of\ course|absolutely|okay|ok)[!,.]\s+)?
            here(?:['’]s|\ is|\ are)\ (?:an?|the|your|some|my|\d+)\ [^.!?:\n]{{0,60}}\b{_CAPTION}\b
            [^.!?:\n]{{0,80}}:(?:\*\*)?
          | (?:\*\*)?{_LABELS}(?:\*\*:|:\*\*|:)
        )
        (?:\s+|\Z)
      | (?:好的[，,。！!]\s*)?(?:以下|这|下面)是[^。！？：:\n]{{0,30}}{_CHINESE_CAPTION}[^。！？：:\n]{{0,10}}[：:]\s*
    )+
    """,
    re.VERBOSE | re.IGNORECASE,
)


def _without_lead_in(text: str) -> str:
    match = _LEAD_IN.match(text)
    return text[match.end() :].strip() if match else text


_QUOTES = {'"': '"', "'": "'", "`": "`", "“": "”", "‘": "’", "„": "“", "«": "»", "「": "」", "『": "』"}
_APOSTROPHE = re.compile(r"(?<=\w)['’](?=\w)")


def _without_quotes(text: str, *, finished: bool) -> str:
    """Removes quotation marks around the whole text; an unfinished reply may lack the closing one."""
    opening = text[:1]
    closing = _QUOTES.get(opening)
    if closing is None or len(text) < 2:
        return text
    is_closed = text.endswith(closing)
    inner = text[1:-1] if is_closed else text[1:]
    bare = _APOSTROPHE.sub("", inner)
    if opening in bare or closing in bare or not (is_closed or (not finished and opening not in "'`‘")):
        return text
    return inner.strip()


# Loops: the end of the reply repeats.
_MIN_ROUNDS = 4
_MIN_CHARS = 48
# Dot leaders, ruled lines and rows of zeros may belong to text that was read from a picture.
_MIN_CHARS_WITHOUT_LETTERS = 200
# The last round lacks the separator between two rounds: `, ` or an empty line.
_SEPARATOR_CHARS = 2
_SEPARATORS = ",，、;；"


def without_loop(text: str) -> str | None:
    """The text with only one round of the loop at its end, or None if there is no loop.

    A loop has at least 4 rounds of the same characters, and at least 48 characters, or 200 without letters. The last
    round may be cut off anywhere. Takes time linear in the text's length.
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
    """Cuts after the first complete round.

    The text before the loop may happen to end like a round, so the run may begin in the middle of one. So the cut is at
    the end of a line, a sentence, a tag or a word within the next round.
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
    """For each offset, how many characters from there equal those from the beginning (the Z function)."""
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


# The ends of sentences, lines and tags, judged by punctuation.
_CLOSERS = "\"'”’“‘»)\\]}」』）】*_`"
_END = re.compile(rf"(?:[.!?…؟۔।]+[{_CLOSERS}]*(?=\s|\Z))|(?:[。！？｡]+[{_CLOSERS}]*)")
_SEPARATOR = re.compile(f"[{_SEPARATORS}]")

# Their full stop doesn't end a sentence. Single letters are the same, as in `J. Smith`, `e.g.` and `z. B.`
_ABBREVIATIONS = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "st", "mt", "ft", "vs", "fig", "vol", "approx", "cf"),
        *("bzw", "ca", "evtl", "ggf", "hl", "inkl", "nr", "str", "vgl"),
    )
)
_LETTERS = re.compile(r"[^\W\d_](?:\.[^\W\d_])*")
_BEFORE_NUMBERS = frozenset({"no", "nos", "pp"})
# German writes `am 3. Mai` and `im 19. Jahrhundert`.
_ORDINAL = re.compile(r"\b(?:am|ab|im|vom|zum|zur|der|die|das|den|dem|des|bis|seit)\s+\d{1,2}\Z", re.IGNORECASE)
_LONGEST_ABBREVIATION = max(len(word) for word in _ABBREVIATIONS)

_MIN_TAGS = 4
_MAX_WORDS_OF_A_TAG = 4
_MAX_CHARS_OF_A_TAG = 30


def sentence_ends(text: str) -> list[int]:
    """Offsets after each sentence's last character, including closing quotation marks and brackets.

    A full stop after an abbreviation, an initial or a list number is not an end. Chinese and Japanese stops need no
    space after them.
    """
    return [match.end() for match in _END.finditer(text) if not _stays_open(text, match)]


def cut_back(text: str) -> str:
    """A cut-off text up to the end of its last complete sentence or line, or a list of tags up to its last comma.

    A line that ends in a colon announces the missing part, and is removed too. Without such an end, the text stays.
    """
    ends = sentence_ends(text)
    if ends and ends[-1] == len(text):
        return text
    end = max(ends[-1] if ends else 0, _end_of_last_line(text))
    if end == 0 and is_list_of_tags(text):
        end = [match.start() for match in _SEPARATOR.finditer(text)][-1]
    return text[:end].rstrip() if end else text


def _stays_open(text: str, match: re.Match[str]) -> bool:
    if match[0] != ".":
        return False
    start = max(0, match.start() - _LONGEST_ABBREVIATION - 2)
    before = text[start : match.start()]
    word = re.split(r"[\s(\"'“‘„]", before)[-1].casefold()
    if word in _ABBREVIATIONS or _LETTERS.fullmatch(word):
        return True
    if word in _BEFORE_NUMBERS:
        return text[match.end() :].lstrip()[:1].isdigit()
    line_start = text.rfind("\n", 0, match.start()) + 1
    return text[line_start : match.start()].strip().isdigit() or _ORDINAL.search(before) is not None


def _end_of_last_line(text: str) -> int:
    """The end of the last complete line without a colon at its end; 0 if there is none."""
    end = text.rfind("\n")
    while end > 0:
        start = text.rfind("\n", 0, end)
        line = text[start + 1 : end].strip()
        if line and line[-1] not in ":：":
            return end
        end = start
    return 0


def is_list_of_tags(text: str) -> bool:
    """Whether a text looks like four or more short tags with commas between them."""
    tags = _SEPARATOR.split(text)
    return len(tags) >= _MIN_TAGS and all(
        len(tag.split()) <= _MAX_WORDS_OF_A_TAG and len(tag.strip()) <= _MAX_CHARS_OF_A_TAG for tag in tags
    )


def tags_of(text: str) -> list[str]:
    """The tags of a list in order, without duplicates."""
    tags = (tag.strip().rstrip(".。") for tag in re.split(rf"[{_SEPARATORS}\n]", text))
    return list(dict.fromkeys(tag for tag in tags if tag))
