"""Questions for the demo model: conversations with real files, and the right last answer.

"seen" uses combinations of colour, shape and place that training may have shown. "combos" (held out) uses combinations,
words, fonts, names, tools and photographs that it never showed. Training never used the phrasings of either.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen35mm.evaluation import drawing
from qwen35mm.evaluation.graders import GRADERS
from qwen35mm.evaluation.scenes import Split
from qwen35mm.evaluation.skills import SKILLS
from qwen35mm.evaluation.skills.base import Sample, Shown
from qwen35mm.evaluation.typed import TYPED

EVAL_SEED = 900_000_000
TYPED_SKILL = "typed questions"
NAMES = (*SKILLS, TYPED_SKILL)


@dataclass(frozen=True)
class Case:
    """A question.

    Attributes:
        messages: for chat templates, ending with the question. Media are files: {"type": "image", "image": bytes}, or
            "video".
        expected: the right answer; for a typed question, one that fulfils its rule.
        is_right: grades an answer.
        plain_answer: whether the right answer is one text, tokenized as the model writes it.
    """

    skill: str
    messages: list[dict[str, Any]]
    expected: str
    is_right: Callable[[str], bool]
    enable_thinking: bool = False
    tools: list[dict[str, Any]] | None = None
    plain_answer: bool = True


def make_cases(skill: str, count: int, split: Split, seed: int = EVAL_SEED) -> list[Case]:
    """`count` cases of a skill, always the same for the same arguments.

    Typed questions are all "combos"; at most all of `TYPED`.

    Raises:
        ConfigError: the packages with fonts and photographs aren't installed.
    """
    rng = random.Random(f"{seed} {skill} {split}")
    if skill == TYPED_SKILL:
        # Takes evenly spaced questions: equal kinds lie next to each other.
        count = min(count, len(TYPED)) if split == "combos" else 0
        chosen = [TYPED[i * len(TYPED) // count] for i in range(count)]
        return [
            Case(skill, _with_files(rng, typed.messages()), typed.good, typed.is_right, plain_answer=False)
            for typed in chosen
        ]
    return [sample_case(rng, skill, SKILLS[skill].sample(rng, split)) for _ in range(count)]


def sample_case(rng: random.Random, skill: str, sample: Sample) -> Case:
    """The case of a drawn conversation; its scenes become files."""
    last = sample.messages[-1]
    grade, expected = GRADERS[sample.grade], answer_text(last)
    return Case(
        skill,
        _with_files(rng, sample.messages[:-1]),
        expected,
        lambda answer: grade(answer, expected),
        sample.thought is not None,
        sample.tools,
        # The right answer to a point is a box, and signs are spelled letter by letter.
        plain_answer=sample.thought is None and sample.grade not in ("point", "letters") and "tool_calls" not in last,
    )


def answer_text(message: dict[str, Any]) -> str:
    """An assistant message as the model writes it: its content, then its tool calls."""
    texts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in function["arguments"].items())
        texts.append(f"<tool_call>\n<function={function['name']}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(texts)


def _with_files(rng: random.Random, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with scenes replaced by files."""
    contents = [message["content"] for message in messages]
    found = [content if isinstance(content, str) else [_part(rng, part) for part in content] for content in contents]
    return [message | {"content": content} for message, content in zip(messages, found, strict=True)]


def _part(rng: random.Random, part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "image":
        kind = rng.choice(("PNG", "JPEG"))
        return {"type": "image", "image": drawing.picture_file(part["image"], kind, rng.randint(60, 95))}
    if part["type"] == "video":
        shown: Shown = part["video"]
        return {"type": "video", "video": drawing.clip_file(shown.clip, shown.fps)}
    return part
