"""Translates captions with a model. Pictures and videos aren't looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qwen35mm.captioning.texts.cleanup import clean
from qwen35mm.captioning.texts.refusals import is_refusal
from qwen35mm.captioning.texts.words import contains
from qwen35mm.contract import Finished, GenerationRequest, Message, Result, SamplingParams, Text
from qwen35mm.errors import RequestError
from qwen35mm.review.collection import Planned

if TYPE_CHECKING:
    from qwen35mm.captioning.captioner import Captioner

_QUESTION = (
    "Translate this caption of an image into {language}. Answer with the translation alone, in the same form: "
    "tags between commas stay tags between commas.{kept}\n\n{text}"
)
_KEPT = " Leave these words as they are: {words}."


@dataclass(frozen=True)
class Translated:
    """A caption with its translation, or why there is none."""

    caption: Planned
    problem: str | None = None


async def translations(
    captions: Sequence[Planned],
    language: str,
    captioner: Captioner,
    *,
    slots: int,
    max_tokens: int,
    kept: Sequence[str] = (),
) -> AsyncGenerator[Translated, None]:
    """The captions with the translations of their `before` as `after`, as they come; `slots` are made at a time.

    Args:
        kept: words that stay, such as trigger words. A translation that lost one is a problem.

    Raises:
        Qwen35mmError: the model can't be asked.
    """
    free = asyncio.Semaphore(slots)

    async def translate(caption: Planned) -> Translated:
        before = caption.before
        async with free:
            try:
                result = await _asked(before, language, captioner, max_tokens, kept)
            except RequestError as error:
                return Translated(caption, str(error))
        text = clean(result.text, finished=True, one_line="\n" not in before).text
        if result.finish_reason != "stop":
            return Translated(caption, "The translation is longer than --max-tokens.")
        if not text or is_refusal(text):
            return Translated(caption, "The model gave no translation.")
        for word in kept:
            if contains(before, word) and not contains(text, word):
                return Translated(caption, f"The translation lost {word!r}.")
        return Translated(replace(caption, after=text))

    tasks = [asyncio.ensure_future(translate(each)) for each in captions]
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _asked(text: str, language: str, captioner: Captioner, max_tokens: int, kept: Sequence[str]) -> Result:
    words = _KEPT.format(words=", ".join(kept)) if kept else ""
    question = _QUESTION.format(language=language, kept=words, text=text)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    asked = GenerationRequest([Message("user", (Text(question),))], params, enable_thinking=False, retain="shared")
    async with aclosing(captioner.backend.stream(asked)) as events:
        async for event in events:
            if isinstance(event, Finished):
                return event.result
    raise AssertionError("a stream ends with Finished or an error")
