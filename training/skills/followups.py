"""Up to six questions about one picture, the later ones about "it"; and a second picture in the middle of a chat."""

from __future__ import annotations

import random

from training.scenes import Split
from training.skills import asking, describing
from training.skills.base import Sample, Skill, Turn, conversation, image, picture_for

_ABOUT_IT = (describing.color_turn, describing.shape_turn, describing.place_turn, describing.size_turn,
             asking.yes_no_turn)  # fmt: skip


def _sample(rng: random.Random, split: Split) -> Sample:
    """The last question says "it", and means what the one before was about."""
    picture = picture_for(rng, split, 4, 2)
    while True:
        turns: list[Turn] = [describing.what_turn(rng, picture, split)]
        if turns[0].about is None:
            continue
        for _ in range(rng.randint(1, 5)):
            turn = rng.choice(_ABOUT_IT)(rng, picture, split, turns[-1].about)
            if turn.about is not None:
                turns.append(turn)
        if len(turns) > 1 and " it" in f" {turns[-1].question.lower()}" and turns[-1].about == turns[-2].about:
            return conversation(rng, turns, [image(picture)])


def _second_sample(rng: random.Random, split: Split) -> Sample:
    """A question about the newest picture, after an answer about another."""
    first, second = picture_for(rng, split, 3), picture_for(rng, split, 3)
    before = conversation(rng, [describing.caption_turn(rng, first, split)], [image(first)])
    turn = rng.choice((describing.caption_turn, describing.place_turn, asking.yes_no_turn))(rng, second, split)
    then = conversation(rng, [turn], [image(second)])
    return Sample(turn.skill, before.messages + then.messages, before.skills + then.skills, turn.grade)


SKILLS = (Skill("follow-up", _sample), Skill("second picture", _second_sample))
