"""The demo model's skills: questions with one right answer about drawn pictures and clips."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import Finished, GenerationRequest, Message, Result, iter_media
from qwen35mm.engine import EngineSettings
from qwen35mm.evaluation.cases import NAMES, Case, make_cases
from qwen35mm.evaluation.passages import Passage
from qwen35mm.model import LoadedModel
from qwen35mm.prompt import PromptBuilder

# The longest right answers are three boxes (about 150 tokens) and thirty words of thinking.
MAX_TOKENS = 256
_SLOTS = 4


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on the questions of one skill, or of all.

    Attributes:
        percent, error: right answers, and their standard error in points.
        change, change_error: points above the reference on the same questions, and their standard error. Questions
            that both answer right or both wrong change nothing.
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
    """Asks every model the same questions, with greedy decoding.

    Args:
        num_questions: for each skill. Half of them are "combos" (see `cases`).

    Attributes:
        skills: the skill of each question.

    Raises:
        ConfigError: the packages with fonts and photographs aren't installed.
    """

    def __init__(self, num_questions: int) -> None:
        cases: list[Case] = []
        for skill in NAMES:
            cases += make_cases(skill, -(-num_questions // 2), "seen")
            cases += make_cases(skill, num_questions // 2, "combos")
        self.cases = cases
        self.skills = [case.skill for case in cases]

    def passages(self, loaded: LoadedModel) -> list[Passage]:
        """The questions with their right answers for the model to predict.

        Leaves out answers that are spelled letter by letter, tool calls, answers after thinking, and questions with
        several right answers.
        """
        builder = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config)
        passages = []
        with closing(_backend(loaded)) as backend:
            for case in self.cases:
                if not case.plain_answer:
                    continue
                question = _messages(case)
                media = tuple(backend.media_of(part) for part in iter_media(question))
                plans = [medium.plan for medium in media]
                prompt, start = builder.reply(question, plans, case.expected, tools=case.tools, enable_thinking=False)
                passages.append(Passage(prompt, start, media))
        return passages

    def run(
        self, loaded: LoadedModel, kv_dtype: str = "auto", kv_keep: str = "1", kv_gates: str = "auto"
    ) -> list[bool]:
        """Grades the answer to each question. For options of KV see CacheSettings."""
        answers = answer_cases(loaded, self.cases, kv_dtype, kv_keep, kv_gates)
        return [case.is_right(answer) for case, answer in zip(self.cases, answers, strict=True)]


def answer_cases(
    model: LoadedModel, cases: Sequence[Case], kv_dtype: str = "auto", kv_keep: str = "1", kv_gates: str = "auto"
) -> list[str]:
    """The greedy answer to each case, several at a time. Each case sets its own thinking and tools.

    The text has tool calls as the model wrote them, and no thinking.
    """
    with closing(_backend(model, kv_dtype, kv_keep, kv_gates)) as backend:
        return asyncio.run(_answers(backend, cases))


async def _answers(backend: LocalBackend, cases: Sequence[Case]) -> list[str]:
    params = backend.loaded.generation.with_overrides(max_tokens=MAX_TOKENS, temperature=0.0)
    slots = asyncio.Semaphore(_SLOTS)

    async def ask(case: Case) -> str:
        request = GenerationRequest(
            _messages(case),
            params,
            enable_thinking=case.enable_thinking,
            tools=case.tools or (),
            retain="nothing",
        )
        async with slots:
            async for event in backend.stream(request):
                if isinstance(event, Finished):
                    return _written(backend.loaded, event.result)
        raise AssertionError("a stream ends with Finished or an error")

    return await asyncio.gather(*map(ask, cases))


def _written(loaded: LoadedModel, result: Result) -> str:
    """The answer with its tool calls, which `result.text` omits."""
    if not result.tool_calls:
        return result.text
    return loaded.tokenizer.decode(result.token_ids).rpartition("</think>")[2].strip()


def _messages(case: Case) -> list[Message]:
    return [Message.from_dict(message) for message in case.messages]


def _backend(loaded: LoadedModel, kv_dtype: str = "auto", kv_keep: str = "1", kv_gates: str = "auto") -> LocalBackend:
    # No cache hits: every model computes all of every prompt.
    cache = CacheSettings(reuse=False, kv_dtype=kv_dtype, kv_keep=kv_keep, kv_gates=kv_gates)
    return LocalBackend(loaded, settings=EngineSettings(slots=_SLOTS), cache=cache)
