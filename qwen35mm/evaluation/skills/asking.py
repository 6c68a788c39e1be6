"""Yes and no, counts of one and of two kinds, and follow-up questions about one picture."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from qwen35mm.evaluation.language import NUMBERS, a, ask, at, plural, there_are
from qwen35mm.evaluation.scenes import ALL_PLACES, BACKGROUNDS, COLORS, SHAPES, Item, Picture, Split
from qwen35mm.evaluation.skills import describing
from qwen35mm.evaluation.skills.base import (
    Sample,
    Skill,
    Turn,
    about_a_picture,
    alike,
    conversation,
    image,
    picture_for,
)
from qwen35mm.evaluation.skills.describing import SIZE_WORDS, any_name, caption

THERE = (
    "Are any {nouns} [there|in the picture|to be seen]?", "Do you [find|see] {noun} anywhere?",
    "Does the picture [show|contain] any {nouns}?", "And is there {noun}?", "Is there {noun} in there?",
    "See {noun} anywhere?",
)  # fmt: skip
IS = (
    "I would say that the {name} is {value}. Right?", "Is the {name} {value}, would you say?",
    "Is that {name} {value}, yes or no?", "So is the {name} {value}?",
)  # fmt: skip
IS_IT = (
    "So it is {value}, is it?", "Would you say that it is {value}?", "And it is {value}, right?",
    "So it is {value}, yes or no?",
)  # fmt: skip
NUMBER = (
    "Do you see exactly {number} [shapes|objects]?", "So there are {number} [shapes|things]?",
    "And are there {number} [shapes|objects]?",
)  # fmt: skip
BACKGROUND = ("Is it {color} in the background?", "So is the background {color}?", "And the background, is it {color}?")
COUNT = (
    "How many [objects|shapes] can you count[ here|]?", "Say how many [objects|shapes|things] you see.",
    "What is the total number of [shapes|objects|things]?", "And how many [shapes|things] are there?",
    "The number of [shapes|things]?", "Count how many there are.",
)  # fmt: skip
COUNT_OF = (
    "How many {nouns} can you count?", "Say how many {nouns} you see.", "Of {nouns}, how many do you see?",
    "And how many {nouns} are there?", "How many {nouns} are there in all?",
)  # fmt: skip
SUM = (
    "How many {one} and {other} do you see together?", "What is the total of {one} and {other}?",
    "Count the {one} plus the {other}.",
)  # fmt: skip
MORE = (
    "Would you say that there are more {one} than {other}?", "So are there more {one} than {other}?",
    "Do you see more {one} than {other} in the picture?",
)  # fmt: skip


def yes_no_turn(rng: random.Random, picture: Picture, about: Item | None = None) -> Turn:
    kind = rng.choices(("there", "is", "number", "background"), (5, 6, 1, 1))[0]
    truth = rng.random() < 0.5
    word = "Yes" if truth else "No"
    if kind == "there":
        return _there(rng, picture, truth)
    if kind == "number":
        count = len(picture.items)
        number = count if truth else rng.choice([n for n in (count - 2, count - 1, count + 1, count + 2) if n > 0])
        question = _singular(ask(rng, NUMBER, number=NUMBERS[number]))
        are = there_are(count, "shape")
        return Turn(question, f"{word}, {are[0].lower()}{are[1:]}", grade="first_word")
    if kind == "background":
        name = picture.background.name
        asked = name if truth else rng.choice([n for n in BACKGROUNDS if n != name])
        return Turn(ask(rng, BACKGROUND, color=asked), f"{word}, the background is {name}.", grade="first_word")
    if about is None and len(picture.items) == 1:
        about = picture.items[0]
    by_pronoun = about is not None and rng.random() < 0.5
    item = about if about is not None and by_pronoun else rng.choice(picture.items)
    return _is(rng, picture, item, by_pronoun, truth)


def count_turn(rng: random.Random, picture: Picture) -> Turn:
    """All shapes, or those of a colour or kind. There may be none."""
    items = picture.items
    if rng.random() < 0.4:
        noun, found = "shape", items
        question = ask(rng, COUNT)
    else:
        noun, found = _kind(rng, picture, rng.random() < 0.75)
        question = ask(rng, COUNT_OF, nouns=plural(_loose(rng, noun)))
    thought = f"I count the {plural(noun)}.\n{caption(items)}"
    return Turn(question, there_are(len(found), noun), thought=thought)


def _there(rng: random.Random, picture: Picture, truth: bool) -> Turn:
    """Whether there is a shape, a colour, or both together. A wrong pair often has one right part."""
    items, kind = picture.items, rng.choice(("kind", "kind", "both", "place"))
    if kind == "kind":
        noun, found = _kind(rng, picture, truth)
        truth = bool(found)  # a picture may have every shape
    elif truth:
        noun = rng.choice(items).name
    else:
        absent = [f"{c} {s}" for c in COLORS for s in SHAPES if all(i.name != f"{c} {s}" for i in items)]
        near = [n for n in absent if any(n.split()[0] == i.color or n.split()[1] == i.shape for i in items)]
        noun = rng.choice(near if rng.random() < 0.7 else absent)
    answer = f"Yes, there is {a(noun)}." if truth else f"No, there is no {noun}."
    asked = _loose(rng, noun)
    return Turn(ask(rng, THERE, noun=a(asked), nouns=plural(asked)), answer, grade="first_word")


def _is(rng: random.Random, picture: Picture, item: Item, by_pronoun: bool, truth: bool) -> Turn:
    """Whether a shape has this colour, kind, place or size. The answer says the right value."""
    items = picture.items
    kinds = ["place", "size"]
    if by_pronoun or sum(other.shape == item.shape for other in items) == 1:
        kinds += ["color", "color"]
    if by_pronoun or sum(other.color == item.color for other in items) == 1:
        kinds += ["shape"]
    kind = rng.choice(kinds)
    if kind == "size" and not item.size:
        kind = "place"
    right, others = {
        "color": (item.color, [c for c in COLORS if c != item.color]),
        "shape": (a(item.shape), [a(s) for s in SHAPES if s != item.shape]),
        "place": (at(item.place), [at(p) for p in ALL_PLACES if p != item.place]),
        "size": (SIZE_WORDS[item.size], [SIZE_WORDS["small" if item.size == "big" else "big"]]),
    }[kind]
    value = right if truth else rng.choice(others)
    # The name mustn't give away the answer.
    part = {"color": item.shape, "shape": f"{item.color} shape"}.get(kind)
    name, said = part or any_name(rng, items, item), part or item.name
    question = ask(rng, IS_IT, value=value) if by_pronoun else ask(rng, IS, name=name, value=value)
    subject = "it" if by_pronoun else f"the {said}"
    return Turn(question, f"{'Yes' if truth else 'No'}, {subject} is {right}.", item, "first_word")


def _kind(rng: random.Random, picture: Picture, there: bool) -> tuple[str, list[Item]]:
    """A noun ('circle' or 'red shape') and the items of that kind. `there`: whether there should be any."""
    by_shape = rng.random() < 0.55
    present = {item.shape if by_shape else item.color for item in picture.items}
    kinds = [kind for kind in (SHAPES if by_shape else COLORS) if (kind in present) == there]
    kind = rng.choice(kinds or [picture.items[0].shape])  # a picture may have every shape
    return kind if by_shape else f"{kind} shape", [i for i in picture.items if kind in (i.shape, i.color)]


def _loose(rng: random.Random, noun: str) -> str:
    """'red shape' as people type it: 'red one', 'red thing'."""
    return noun.replace("shape", rng.choice(("shape", "shape", "one", "one", "thing")))


def _singular(question: str) -> str:
    """Turns 'Are there one shapes?' into 'Is there one shape?', in any spelling."""
    question = re.sub(r"\b(one|1) (shape|thing|object)s\b", r"\1 \2", question, flags=re.IGNORECASE)
    question = re.sub(r"\bare there (exactly |)(?=(one|1)\b)", r"is there \1", question, flags=re.IGNORECASE)
    return question[0].upper() + question[1:] if question.startswith("is there") else question


def two_counts_turn(rng: random.Random, picture: Picture) -> Turn:
    """The sum of two shapes' or two colours' counts, or which is larger. One of them may be zero."""
    of_shapes = rng.random() < 0.55
    counts = Counter(item.shape if of_shapes else item.color for item in picture.items)
    absent = [each for each in (SHAPES if of_shapes else COLORS) if each not in counts]
    known = [*counts, *rng.sample(absent, min(len(absent), max(2 - len(counts), int(rng.random() < 0.2))))]
    nouns = {each: plural(each if of_shapes else f"{each} shape") for each in known}
    pairs = [(one, other) for one in known for other in known if one != other]
    if rng.random() < 0.5:
        one, other = _pair(rng, pairs, counts)
        total = counts[one] + counts[other]
        templates, answer = SUM, f"Together there {'is' if total == 1 else 'are'} {_number(total)}."
    else:
        wanted = rng.choice((1, 1, 0, -1))  # yes as often as no
        fitting = [pair for pair in pairs if _sign(counts[pair[0]] - counts[pair[1]]) == wanted]
        one, other = _pair(rng, fitting or pairs, counts)
        templates, difference = MORE, counts[one] - counts[other]
        no = f"No, there are {'as many' if difference == 0 else 'more'} {nouns[other]}."
        answer = f"Yes, there are more {nouns[one]}." if difference > 0 else no
    asked = _loose(rng, f"{nouns[one]}|{nouns[other]}").split("|")
    thought = "\n".join(f"The {nouns[each]}: {_number(counts[each])}." for each in (one, other))
    return Turn(ask(rng, templates, one=asked[0], other=asked[1]), answer, thought=thought)


def _pair(rng: random.Random, pairs: list[tuple[str, str]], counts: Counter[str]) -> tuple[str, str]:
    """One of the pairs, preferably with many shapes."""
    return rng.choices(pairs, [1 + (counts[one] + counts[other]) ** 2 for one, other in pairs])[0]


def _number(count: int) -> str:
    return NUMBERS[count] if count else "none"


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _two_counts_sample(thinking: bool) -> Callable[[random.Random, Split], Sample]:
    def sample(rng: random.Random, split: Split) -> Sample:
        picture = alike([picture_for(rng, split, 6, 3) for _ in range(6)])
        turn = two_counts_turn(rng, picture)
        return conversation(rng, [turn if thinking else replace(turn, thought=None)], [image(picture)])

    return sample


def _follow_up_sample(rng: random.Random, split: Split) -> Sample:
    """The last question says "it" and means the item of the question before."""
    about_it = (describing.color_turn, describing.shape_turn, describing.place_turn, describing.size_turn, yes_no_turn)
    picture = picture_for(rng, split, 4, 2)
    while True:
        turns: list[Turn] = [describing.what_turn(rng, picture)]
        if turns[0].about is None:
            continue
        for _ in range(rng.randint(1, 5)):
            turn = rng.choice(about_it)(rng, picture, turns[-1].about)
            if turn.about is not None:
                turns.append(turn)
        if len(turns) > 1 and " it" in f" {turns[-1].question.lower()}" and turns[-1].about == turns[-2].about:
            return conversation(rng, turns, [image(picture)])


def _second_picture_sample(rng: random.Random, split: Split) -> Sample:
    """A question about a new picture, after an answer about another."""
    first, second = picture_for(rng, split, 3), picture_for(rng, split, 3)
    before = conversation(rng, [describing.caption_turn(rng, first)], [image(first)])
    turn = rng.choice((describing.caption_turn, describing.place_turn, yes_no_turn))(rng, second)
    then = conversation(rng, [turn], [image(second)])
    return Sample(before.messages + then.messages, turn.grade)


SKILLS = (
    Skill("yes no", about_a_picture(yes_no_turn)),
    Skill("count", about_a_picture(count_turn)),
    Skill("count, thinking", about_a_picture(count_turn, 6, 3, thinking=True)),
    Skill("two counts", _two_counts_sample(False)),
    Skill("two counts, thinking", _two_counts_sample(True)),
)
FOLLOW_UPS = (Skill("follow-up", _follow_up_sample), Skill("second picture", _second_picture_sample))
