"""Judges a caption: asks the model for each sentence whether it is true of the medium.

The medium comes first in each prompt, as in the caption's own. So each question hits the cache and prefills only text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

from qwen35mm.captioning.records import Caption, Judged
from qwen35mm.captioning.requests import CaptionRequest
from qwen35mm.captioning.texts.cleanup import Around, is_list_of_tags, sentence_ends, tags_of, unwrap
from qwen35mm.captioning.texts.presets import PRESETS
from qwen35mm.contract import Result, SamplingParams
from qwen35mm.contract.sampling import MAX_TOP_LOGPROBS

DOUBTED = "doubted"
NOT_JUDGED = "not judged"

# How to ask for the answer: by its first token's probabilities, or sampled if a server doesn't return them.
BY_CHANCE = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_TOP_LOGPROBS)
BY_ANSWER = SamplingParams(temperature=0.0, max_tokens=4)

_STATEMENT = (
    "Is the following statement about this {kind} true? It is false if anything in it can't be seen or is wrong."
    "\n\n{text}\n\nAnswer with one word, yes or no."
)
_TAG = "Does the tag '{text}' fit this {kind}? Answer with one word, yes or no."
_WORDS = {
    **dict.fromkeys(("yes", "是", "是的", "对"), True),
    **dict.fromkeys(("no", "否", "不", "不是", "不对"), False),
}
_FIRST_WORD = re.compile(r"\W*(\w+)")
# The least probability of yes and no together. Below it, the model doesn't answer the question.
_LEAST_ANSWERED = 0.01
# The mark of a list item.
_MARK = re.compile(r"(?:[-*•·]|#+|\d{1,3}[.)])\s+")


async def judge(
    caption: Caption, request: CaptionRequest, ask: Callable[[str], Awaitable[Result]]
) -> tuple[Judged, ...]:
    """A caption's sentences or tags, each with how likely the model finds it true.

    Text that was read from a medium has none.

    Args:
        ask: a question about the medium, with `BY_CHANCE` or `BY_ANSWER`.

    Raises:
        Qwen35mmError: the model can't be asked.
    """
    form, parts = _parts(caption, request.around)
    questions = [(text, form.format(kind=caption.kind, text=text)) for text in parts]
    return tuple([Judged(sentence=text, score=score_of(await ask(question))) for text, question in questions])


def flagged(caption: Caption, below: float) -> Caption:
    """The caption with the flags of its scores: `DOUBTED` if any is below `below`, `NOT_JUDGED` if any is missing."""
    scores = None if caption.judged is None else [each["score"] for each in caption.judged]
    flags = [flag for flag in caption.flags if flag not in (DOUBTED, NOT_JUDGED)]
    if any(score is not None and score < below for score in scores or ()):
        flags.append(DOUBTED)
    if scores is None or None in scores:
        flags.append(NOT_JUDGED)
    return replace(caption, flags=tuple(flags))


def not_judged(caption: Caption) -> Caption:
    """A caption that can't be judged, marked so that it isn't tried again."""
    return replace(caption, judged=(Judged(sentence=caption.text, score=None),))


def score_of(result: Result) -> float | None:
    """The probability of "yes" among yes and no; None if the model says neither.

    From the top first tokens; without their probabilities, 1.0 or 0.0 by the answer.
    """
    if not result.logprobs:
        answer = _answer(result.text)
        return None if answer is None else float(answer)
    first = result.logprobs[0]
    chances = {True: 0.0, False: 0.0}
    for token in first.top or (first,):
        if (answer := _answer(token.text)) is not None:
            chances[answer] += math.exp(token.logprob)
    total = sum(chances.values())
    return round(chances[True] / total, 4) if total >= _LEAST_ANSWERED else None


def _answer(text: str) -> bool | None:
    found = _FIRST_WORD.match(text.casefold())
    return None if found is None else _WORDS.get(found[1])


def _parts(caption: Caption, around: Around) -> tuple[str, list[str]]:
    """The question about each part of a caption, and the parts."""
    if _is_of(caption, "ocr"):
        return _STATEMENT, []
    text = unwrap(caption.text, **around._asdict())
    if _is_of(caption, "tags") or (is_list_of_tags(text) and not sentence_ends(text)):
        return _TAG, tags_of(text)
    return _STATEMENT, sentences_of(text)


def _is_of(caption: Caption, preset: str) -> bool:
    return caption.prompt in (PRESETS[preset].text, PRESETS[preset].video_text)


def sentences_of(text: str) -> list[str]:
    """A text's sentences in order. Every line end ends a sentence. List marks and parts without words are left out."""
    found: list[str] = []
    for line in text.splitlines():
        line = _MARK.sub("", line.strip(), count=1) if _MARK.match(line.strip()) else line.strip()
        # A sentence continues right after a quotation: 「止まれ。」と書いてある。
        ends = [end for end in sentence_ends(line) if not (line[end - 1] in "」』”" and line[end : end + 1].isalnum())]
        bounds = zip([0, *ends], [*ends, len(line)], strict=True)
        found += [line[start:stop].strip() for start, stop in bounds]
    return [sentence for sentence in found if any(char.isalnum() for char in sentence)]
