"""A skill draws questions with one right answer each from a random generator."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen35mm.evaluation import scenes
from qwen35mm.evaluation.scenes import Clip, Item, Picture, Split, Unknown


@dataclass(frozen=True)
class Turn:
    """One question and its right answer.

    Attributes:
        about: the item that "it" means in the next turn.
        grade: the name of the answer's grader, in `graders.GRADERS`.
        thought: the expected thinking before the answer; None turns thinking off.
    """

    question: str
    answer: str
    about: Item | None = None
    grade: str = "exact"
    thought: str | None = None


@dataclass(frozen=True)
class Shown:
    """A clip as a file: its frames a second, and the times of the frames that the model sees, in seconds."""

    clip: Clip
    times_s: list[float]
    fps: float


@dataclass(frozen=True)
class Sample:
    """A conversation whose last message is the right answer.

    Attributes:
        messages: for chat templates. Parts have {"type": "image", "image": Picture or Unknown} and {"type": "video",
            "video": Shown}. Assistant messages may have "tool_calls".
        grade, thought: of the last answer.
    """

    messages: list[dict[str, Any]]
    grade: str = "exact"
    thought: str | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Skill:
    """`sample` draws a conversation that ends with a question of this skill; `aim` is the target percentage."""

    name: str
    sample: Callable[[random.Random, Split], Sample]
    aim: float = 97.0


PictureTurn = Callable[[random.Random, Picture], Turn | None]


def image(picture: Picture | Unknown) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def video(shown: Shown) -> dict[str, Any]:
    return {"type": "video", "video": shown}


def conversation(rng: random.Random, turns: Sequence[Turn], media: Sequence[dict[str, Any]] = ()) -> Sample:
    """A conversation of these turns. The media are in the first one, before or after its question."""
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        text = {"type": "text", "text": turn.question}
        content: Any = turn.question
        if index == 0 and media:
            content = [*media, text] if rng.random() < 0.7 else [text, *media]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
    return Sample(messages, turns[-1].grade, turns[-1].thought)


def about_a_picture(
    turn: PictureTurn, most: int = 5, least: int = 1, thinking: bool = False
) -> Callable[[random.Random, Split], Sample]:
    """Draws questions about a picture of `least` to `most` shapes; draws again if `turn` returns None."""

    def sample(rng: random.Random, split: Split) -> Sample:
        while True:
            picture = picture_for(rng, split, most, least)
            found = turn(rng, picture)
            if found is not None:
                return conversation(rng, [found if thinking else replace(found, thought=None)], [image(picture)])

    return sample


def picture_for(rng: random.Random, split: Split, most: int = 5, least: int = 1) -> Picture:
    """A picture of `least` to `most` shapes, of any size."""
    number = rng.choices(range(1, 7), (5, 5, 5, 4, 3, 1))[0]
    number = min(most, max(least, number))
    return scenes.random_picture(rng, scenes.random_size(rng), number, split, unique=rng.random() < 0.3)


def alike(drawn: list[Picture]) -> Picture:
    """The picture with the most shapes of one colour or kind."""
    return max(drawn, key=lambda picture: max(Counter(k for i in picture.items for k in (i.color, i.shape)).values()))
