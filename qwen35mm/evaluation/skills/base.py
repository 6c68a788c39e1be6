"""What a skill is: questions with one right answer, drawn from a random generator."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qwen35mm.evaluation import scenes
from qwen35mm.evaluation.scenes import Clip, Item, Picture, Split, Unknown


@dataclass(frozen=True)
class Turn:
    """One question and its right answer.

    Attributes:
        answer: what is learned; what is spelled in it stands between `data.SPELL` and `data.END_SPELL`.
        about: the item that "it" means in the next turn.
        thought: what the model thinks before it answers, where thinking is on.
    """

    skill: str
    question: str
    answer: str
    about: Item | None = None
    grade: str = "exact"
    thought: str | None = None


@dataclass(frozen=True)
class Shown:
    """A clip as a file: its frames a second, and the times of those that are sampled."""

    clip: Clip
    times_s: list[float]
    fps: float


@dataclass(frozen=True)
class Sample:
    """A conversation whose last message is the right answer.

    Attributes:
        skill: the last answer's.
        messages: as chat templates take them; parts hold {"type": "image", "image": Picture or Unknown} and
            {"type": "video", "video": Shown}. Assistant messages may have "tool_calls".
        skills: of every assistant message.
        grade: the name of the last answer's grader, in `graders.GRADERS`.
    """

    skill: str
    messages: list[dict[str, Any]]
    skills: list[str] = field(default_factory=list)
    grade: str = "exact"
    thought: str | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Skill:
    """A skill for the evaluation and the mixture.

    Attributes:
        sample: draws a conversation that ends with a question of this skill.
        aim: percent of right answers that are wanted.
    """

    name: str
    sample: Callable[[random.Random, Split], Sample]
    aim: float = 97.0


def image(picture: Picture | Unknown) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def video(shown: Shown) -> dict[str, Any]:
    return {"type": "video", "video": shown}


def conversation(
    rng: random.Random,
    turns: list[Turn],
    media: list[dict[str, Any]],
    system: str | None = None,
    before: list[Turn] | None = None,
) -> Sample:
    """A conversation of these turns; the media come with the first one, before or after its question.

    `before`: turns that come before the media. Thinking is on where the last turn has a thought.
    """
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": system})
    for turn in before or ():
        messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    for index, turn in enumerate(turns):
        text = {"type": "text", "text": turn.question}
        content: Any = turn.question
        if index == 0 and media:
            content = [*media, text] if rng.random() < 0.7 else [text, *media]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
    last = turns[-1]
    skills = [turn.skill for turn in [*(before or ()), *turns]]
    return Sample(last.skill, messages, skills, last.grade, last.thought)


def picture_for(rng: random.Random, split: Split, most: int = 5, least: int = 1) -> Picture:
    """A picture of `least` to `most` shapes, of any size."""
    number = rng.choices(range(1, 7), (5, 5, 5, 4, 3, 1))[0]
    number = min(most, max(least, number))
    return scenes.random_picture(rng, scenes.random_size(rng), number, split, unique=rng.random() < 0.3)


def alike(drawn: list[Picture]) -> Picture:
    """The one with the most shapes of one colour or kind: of three to six shapes by chance one in four has three."""
    return max(drawn, key=lambda picture: max(Counter(k for i in picture.items for k in (i.color, i.shape)).values()))
