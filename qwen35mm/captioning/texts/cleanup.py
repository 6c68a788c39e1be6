"""From a model's reply to a caption: what is around it, what is said again and again and what was cut off goes.

Only what clearly isn't the caption is taken away. Lead-ins are known in English and Chinese.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qwen35mm.captioning.texts.loops import without_loop
from qwen35mm.captioning.texts.sentences import cut_back
from qwen35mm.captioning.texts.words import contains

TRUNCATED = "truncated"
REPETITION_REMOVED = "repetition removed"


@dataclass(frozen=True)
class Cleaned:
    """A caption and what a person should know of it.

    Attributes:
        text: may be empty: a reply that is nothing but thinking or a lead-in has no caption.
        flags: `TRUNCATED` where the reply met its limit, `REPETITION_REMOVED` where it said the same again and again.
    """

    text: str
    flags: tuple[str, ...] = ()


def clean(text: str, *, finished: bool, keep_unfinished: bool = False, one_line: bool = False) -> Cleaned:
    """A reply without what a model writes around a caption.

    That is thinking, a code fence or quotation marks around the whole, a lead-in such as `Here is a caption:`, and a
    loop at the end, of which one round stays. A clean caption stays as it is: `clean` of its own result, as a finished
    reply, changes nothing. Its time grows linearly with the text.

    Args:
        finished: the model ended the reply itself; otherwise it met its limit.
        keep_unfinished: keep the last sentence of a reply that met its limit. Without it the text is cut back to its
            last whole sentence or line, in a list of tags to the last comma; where there is none, it stays.
        one_line: make each run of white space a single space.
    """
    text = _unwrapped(text, finished=finished)
    looped = without_loop(text) is not None
    # Before the loop is cut: its last whole round then ends where a sentence, a line or a tag does.
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


def wrap(text: str, *, prefix: str = "", suffix: str = "", trigger: str = "") -> str:
    """A caption with what a training set wants around it.

    Prefix and suffix are joined as they are, with the spaces that they bring. The trigger word comes before all else,
    with a comma, unless it is among the words already.
    """
    wrapped = f"{prefix}{text}{suffix}"
    return f"{trigger}, {wrapped}" if trigger and not contains(wrapped, trigger) else wrapped


def _unwrapped(text: str, *, finished: bool) -> str:
    """Take away what is around the caption until nothing more comes off."""
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
    # A closing tag by itself ends thinking that the prompt has opened.
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
    """Without quotation marks around the whole; a reply that met its limit may lack the closing one."""
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
