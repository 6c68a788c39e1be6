"""The bundled model's skills: questions with one right answer, on pictures and clips that `training/` draws."""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.engine import EngineSettings, Finished
from qwen35mm.errors import ConfigError
from qwen35mm.evaluation.passages import Passage
from qwen35mm.model import LoadedModel
from qwen35mm.prompt import Image, Message, Part, PromptBuilder, Text, Video, iter_media

if TYPE_CHECKING:
    from training.cases import Case

_CHECKOUT = Path(__file__).resolve().parents[2]
_MAX_TOKENS = 64
_SLOTS = 4


@dataclass(frozen=True)
class Accuracy:
    """Of answers to the questions of a skill, or of all.

    Attributes:
        percent, error: right answers, and the standard error in points.
        change, change_error: points more than the reference has on the same questions, and the standard error of that.
            It is smaller than the accuracies' own: only questions that one of both answers count.
    """

    num_questions: int
    percent: float
    error: float
    change: float
    change_error: float

    @classmethod
    def of(cls, right: Sequence[bool], reference: Sequence[bool]) -> Accuracy:
        answers = np.array(right, dtype=float)
        steps = answers - np.array(reference, dtype=float)
        root = math.sqrt(len(right))
        figures = (
            100 * float(each) for each in (answers.mean(), answers.std() / root, steps.mean(), steps.std() / root)
        )
        return cls(len(right), *figures)


class SkillTest:
    """The same questions to every model, greedily and without thinking.

    Args:
        num_questions: of each skill; half of them on combinations of colour, shape and place that training never
            showed.

    Attributes:
        skills: of each question.

    Raises:
        ConfigError: this installation has no `training/`.
    """

    def __init__(self, num_questions: int) -> None:
        make_cases, skills = _training()
        cases: list[Case] = []
        for skill in skills:
            for split, count in (("seen", -(-num_questions // 2)), ("combos", num_questions // 2)):
                cases += make_cases(skill, count, split)
        self.skills = [case.skill for case in cases]
        self._questions = [to_messages(case.messages) for case in cases]
        self._answers = [case.expected for case in cases]

    def passages(self, loaded: LoadedModel) -> list[Passage]:
        """The right answers, to be foretold after their questions."""
        builder = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config)
        backend = _backend(loaded)
        passages = []
        for question, answer in zip(self._questions, self._answers, strict=True):
            media = tuple(backend.media_of(part) for part in iter_media(question))
            plans = [medium.plan for medium in media]
            prompt, start = builder.reply(question, plans, answer, enable_thinking=False)
            passages.append(Passage(prompt, start, media))
        backend.close()
        return passages

    def run(self, loaded: LoadedModel, kv_dtype: str = "auto") -> list[bool]:
        """Whether each question's whole answer is right, with keys and values kept as this type."""
        backend = _backend(loaded, kv_dtype)
        try:
            found = asyncio.run(answers(backend, self._questions))
        finally:
            backend.close()
        return [text.strip() == answer for text, answer in zip(found, self._answers, strict=True)]


async def answers(backend: LocalBackend, questions: Sequence[list[Message]]) -> list[str]:
    """The greedy answer to each question, without thinking."""
    params = backend.loaded.generation.with_overrides(max_tokens=_MAX_TOKENS, temperature=0.0)
    slots = asyncio.Semaphore(_SLOTS)

    async def ask(question: list[Message]) -> str:
        async with slots:
            async for event in backend.stream(question, params, enable_thinking=False, retain="nothing"):
                if isinstance(event, Finished):
                    return event.result.text
        raise AssertionError("a stream ends with Finished or an error")

    return await asyncio.gather(*map(ask, questions))


def to_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A case's messages, which are as chat templates take them."""
    return [Message(message["role"], tuple(_parts(message["content"]))) for message in messages]


def _parts(content: str | list[dict[str, Any]]) -> Iterator[Part]:
    for part in [{"text": content}] if isinstance(content, str) else content:
        yield (
            Text(part["text"]) if "text" in part else Image(part["image"]) if "image" in part else Video(part["video"])
        )


def _training() -> tuple[Any, Sequence[str]]:
    """`make_cases` and the skills' names, which are no part of the package."""
    if not (_CHECKOUT / "training" / "cases.py").is_file():
        raise ConfigError(
            "The questions about the bundled model's skills are made by training/, which only a checkout of the "
            "repository has. Take --questions 0, with a text of yours as --text."
        )
    sys.path.insert(0, str(_CHECKOUT))
    try:
        cases = importlib.import_module("training.cases")
    finally:
        sys.path.remove(str(_CHECKOUT))
    return cases.make_cases, cases.SKILLS


def _backend(loaded: LoadedModel, kv_dtype: str = "auto") -> LocalBackend:
    # Every model computes all of every prompt.
    return LocalBackend(
        loaded, settings=EngineSettings(slots=_SLOTS), cache=CacheSettings(reuse=False, kv_dtype=kv_dtype)
    )
