"""Test cases: conversations with real files in them, and the one right last answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen35mm.evaluation import files
from qwen35mm.evaluation.scenes import Split
from qwen35mm.evaluation.skills import SKILLS
from qwen35mm.evaluation.skills.base import Sample, Shown
from qwen35mm.evaluation.skills.graders import GRADERS
from qwen35mm.evaluation.typed import TYPED
from training.data import answer_text, plain

EVAL_SEED = 900_000_000  # far from the seeds that training draws from
TYPED_SKILL = "typed questions"
NAMES = (*SKILLS, TYPED_SKILL)


@dataclass(frozen=True)
class Case:
    """A question.

    Attributes:
        messages: as chat templates take them, ending with the question; media are files: {"type": "image",
            "image": bytes}, or "video".
        expected: the right answer; of a typed question, an answer that would do.
        is_right: whether an answer does.
        plain_answer: whether the model writes the right answer with the tokens that its text has, and nothing before.
    """

    skill: str
    messages: list[dict[str, Any]]
    expected: str
    is_right: Callable[[str], bool]
    enable_thinking: bool = False
    tools: list[dict[str, Any]] | None = None
    plain_answer: bool = True


def make_cases(skill: str, count: int, split: Split, seed: int = EVAL_SEED) -> list[Case]:
    """`count` cases of a skill; the same for the same arguments. `split`: "seen" or "combos" (held out).

    The typed questions are all held out, and so many as there are at most.
    """
    rng = random.Random(f"{seed} {skill} {split}")
    if skill == TYPED_SKILL:
        # Spread over all kinds, which stand one behind the other.
        count = min(count, len(TYPED)) if split == "combos" else 0
        chosen = [TYPED[i * len(TYPED) // count] for i in range(count)]
        return [
            Case(skill, _with_files(rng, typed.messages()), typed.good, typed.is_right, plain_answer=False)
            for typed in chosen
        ]
    return [_case(rng, skill, SKILLS[skill].sample(rng, split)) for _ in range(count)]


def _case(rng: random.Random, skill: str, sample: Sample) -> Case:
    last = sample.messages[-1]
    grade, expected = GRADERS[sample.grade], plain(answer_text(last))
    return Case(
        skill,
        _with_files(rng, sample.messages[:-1]),
        expected,
        lambda answer: grade(answer, expected),
        sample.thought is not None,
        sample.tools,
        plain_answer=sample.thought is None
        and sample.grade != "point"  # whose right answer is the box around it
        and answer_text(last) == expected
        and not last.get("tool_calls"),
    )


def _with_files(rng: random.Random, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their scenes as files, and nothing marked in what was answered."""
    found = []
    for message in messages:
        content = message["content"]
        content = plain(content) if isinstance(content, str) else [_part(rng, part) for part in content]
        found.append(message | {"content": content})
    return found


def _part(rng: random.Random, part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "image":
        kind = rng.choice(("PNG", "JPEG"))
        return {"type": "image", "image": files.picture_file(part["image"], kind, rng.randint(60, 95))}
    if part["type"] == "video":
        shown: Shown = part["video"]
        return {"type": "video", "video": files.clip_file(shown.clip, "mp4", shown.fps)}
    return part
