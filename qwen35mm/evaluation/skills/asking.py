"""Yes and no, and how many: of all, by colour, by shape; both answers to each as often."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

from qwen35mm.evaluation.language import NUMBERS, a, ask, at, plural, there_are
from qwen35mm.evaluation.scenes import ALL_PLACES, BACKGROUNDS, COLORS, SHAPES, Item, Picture, Split
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image, picture_for
from qwen35mm.evaluation.skills.describing import SIZE_WORDS, any_name, caption

THERE = (
    "Any {nouns}?", "{noun}?", "See any {nouns}?", "You see {noun}?", "And {noun}?", "Any {nouns} in there?",
    "Got any {nouns}?", "{noun} in there?", "Do we have {noun}?", "Is there {noun} or not?", "And any {nouns}?",
    "There is {noun}, right?",
    "Is there {noun} [in the picture|in the image|in it|here|]?",
    "Is there {noun}?",
    "[Do|Can] you see {noun} [here|in the picture|]?",
    "Does [the picture|the image|it] [show|contain|have] {noun}?",
    "Is {noun} [in the picture|in there|to be seen]?",
    "Are there any {nouns}?",
    "Any {nouns} [in it|here|in the picture|]?",
    "Can {noun} be seen [anywhere|in it]?",
    "[Can|Could] you [find|make out] {noun}[ here|]?",
    "Do you see any {nouns}[ in it|]?",
    "Tell me [if|whether] there is {noun}.",
    "Is [one of them|any of them] {noun}?",
    "Are any {nouns} [there|in the picture|to be seen]?",
    "Do you [find|see] {noun} anywhere?",
    "Does the picture [show|contain] any {nouns}?",
    "And is there {noun}?", "Is there {noun} in there?", "See {noun} anywhere?",
)  # fmt: skip
IS = (
    "So the {name} is {value}?", "The {name}, is it {value}?", "And the {name}, is it {value}?",
    "The {name} is {value}?", "The {name} is {value}, yes or no?", "The {name} is {value}, correct?",
    "{name} is {value}, right?", "Is that {name} {value}?",
    "Is the {name} {value}?",
    "Is the {name} {value}?",
    "The {name} is {value}, [right|isn't it|is it]?",
    "Would you say [that |]the {name} is {value}?",
    "Is it true that the {name} is {value}?",
    "[I think|I would say] the {name} is {value}. [Right|Is that true|Correct]?",
    "Can you see [if|whether] the {name} is {value}?",
    "The {name}: is it {value}?",
    "I would say that the {name} is {value}. Right?",
    "Is the {name} {value}, would you say?",
    "Is that {name} {value}, yes or no?", "So is the {name} {value}?",
)  # fmt: skip
IS_IT = (
    "It is {value}?", "So it is {value}?", "Is it {value} or not?", "It is {value}, yes or no?",
    "So it is {value}, right?", "Is it {value}, yes or no?", "Is this {value}?", "It is {value}, correct?",
    "Is it {value}?",
    "Is that {value}?",
    "It is {value}, right?",
    "So is it {value}?",
    "Would you call it {value}?",
    "Would you say it is {value}?",
    "And is it {value}?",
    "Is it true that it is {value}?",
    "So it is {value}, is it?",
    "Would you say that it is {value}?",
    "And it is {value}, right?", "So it is {value}, yes or no?",
)  # fmt: skip
NUMBER = (
    "{number} [shapes|things|objects]?", "Are there {number}?", "So {number} [shapes|things]?", "{number} of them?",
    "{number} in all?", "You see {number} [shapes|things]?", "{number} [shapes|things], right?",
    "Is it {number} [shapes|things]?",
    "Are there {number} [shapes|things|objects] [in the picture|]?",
    "Do you see {number} [shapes|things|objects]?",
    "Is the number of shapes {number}?",
    "Does [the picture|it] [show|have|contain] {number} [shapes|things]?",
    "There are {number} [shapes|objects], right?",
    "Are there exactly {number} [shapes|things]?",
    "Can you see {number} [shapes|things|objects]?",
    "Is the number of [objects|things] {number}?",
    "Do you see exactly {number} [shapes|objects]?",
    "So there are {number} [shapes|things]?", "And are there {number} [shapes|objects]?",
)  # fmt: skip
BACKGROUND = (
    "{color} background?", "The background, is it {color}?", "A {color} background, right?",
    "So the background is {color}?", "And is the background {color}?", "The background is {color}, yes or no?",
    "Is the background {color}?", "Does [it|the picture] have a {color} background?", "Is it on {color}?",
    "Is the color of the background {color}?", "The background is {color}, right?",
    "Does it have a background of {color}?", "Is {color} the color of the background?",
    "Is it {color} in the background?",
    "So is the background {color}?", "And the background, is it {color}?",
)  # fmt: skip
COUNT = (
    "How many in there?", "Count.", "[Total|Count|Number]?", "And how many?", "How many of them?", "Count them.",
    "Count it all.", "Number of [things|objects]?", "[The total|The number|The count][, please|].",
    "How many [shapes|things] in all?", "Shape count?",
    "How many [shapes|objects|things] are [there|in the picture|in the image|in it]?",
    "How many [shapes|objects|things] [do you see|can you see|does it show]?",
    "Count the [shapes|objects|things].",
    "What is the number of [shapes|objects]?",
    "How many are there?",
    "[How many shapes in all|How many shapes in total|How many things altogether|The total, please]?",
    "[Can|Could] you count the [shapes|objects]?",
    "How many things can be counted [here|in it]?",
    "[Tell me|Say] how many [shapes|objects|things] there are.",
    "How many [shapes|things|objects]?",
    "Count [all shapes|all the things|everything][ in the picture|].",
    "How many are there in [all|total]?",
    "[Tell me|Give me] the [|total ]number of [shapes|things].",
    "How many do you [see|count]?",
    "How many [objects|shapes] can you count[ here|]?",
    "Say how many [objects|shapes|things] you see.",
    "What is the total number of [shapes|objects|things]?",
    "And how many [shapes|things] are there?", "The number of [shapes|things]?", "Count how many there are.",
)  # fmt: skip
COUNT_OF = (
    "Number of {nouns}?", "{nouns}, how many?", "And how many {nouns}?", "And {nouns}, how many?", "Count {nouns}.",
    "How many of the {nouns}?", "[Just |]count the {nouns}.", "The {nouns}, how many are there?",
    "How many {nouns} in there?", "{nouns} in all?", "How many {nouns} have we got?",
    "How many {nouns} are [there|in the picture|in the image|in it]?",
    "How many {nouns} [do you see|can you see]?",
    "Count the {nouns}.",
    "What is the number of {nouns}?",
    "How many {nouns} does it show?",
    "How many {nouns}?",
    "How many {nouns} can be counted?",
    "[Tell me|Say] how many {nouns} there are.",
    "[Can|Could] you count the {nouns}?",
    "How many {nouns} [in all|in total]?",
    "Of [the |]{nouns}, how many are there[ in it|]?",
    "[Tell me|Give me] the [|total ]number of {nouns}.",
    "How many {nouns} can you count?",
    "Say how many {nouns} you see.",
    "Of {nouns}, how many do you see?",
    "And how many {nouns} are there?", "How many {nouns} are there in all?",
)  # fmt: skip


def yes_no_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    kind = rng.choices(("there", "is", "number", "background"), (5, 6, 1, 1))[0]
    truth = rng.random() < 0.5
    if kind == "there":
        return _there(rng, picture, split, truth)
    if kind == "number":
        count = len(picture.items)
        number = count if truth else rng.choice([n for n in (count - 2, count - 1, count + 1, count + 2) if n > 0])
        question = ask(rng, NUMBER, split, number=NUMBERS[number])
        answer = f"{'Yes' if truth else 'No'}, {_small(there_are(count, 'shape'))}"
        return Turn("yes no", _singular(question), answer, grade="first_word")
    if kind == "background":
        name = picture.background.name
        asked = name if truth else rng.choice([n for n in BACKGROUNDS if n != name])
        answer = f"{'Yes' if truth else 'No'}, the background is {name}."
        return Turn("yes no", ask(rng, BACKGROUND, split, color=asked), answer, grade="first_word")
    if about is None and len(picture.items) == 1:
        about = picture.items[0]
    by_pronoun = about is not None and rng.random() < 0.5
    item = about if about is not None and by_pronoun else rng.choice(picture.items)
    return _is(rng, picture, split, item, by_pronoun, truth)


def count_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    """All shapes, those of a colour or of a kind, of which there may be none."""
    items, kind = picture.items, rng.random()
    if kind < 0.4:
        noun, found = "shape", items
        question = ask(rng, COUNT, split)
    else:
        # Training asks most for what there are most of: one is told in 96% of cases, two were in half of them.
        noun, found = _kind(rng, picture, rng.random() < 0.75, many=split == "train")
        question = ask(rng, COUNT_OF, split, nouns=plural(loose(rng, noun)))
    # The thought is the caption, which can be written: a list of what alone fits stops early, and marks behind each
    # part (whether it fits, how many that makes) had more mistakes than the number itself (docs/log.md).
    thought = f"I count the {plural(noun)}.\n{caption(items)}"
    return Turn("count", question, there_are(len(found), noun), thought=thought)


def _there(rng: random.Random, picture: Picture, split: Split, truth: bool) -> Turn:
    """A shape, a colour, both together: there or not; where not, one of both often is."""
    items, kind = picture.items, rng.choice(("kind", "kind", "both", "place"))
    if kind == "kind":
        noun, found = _kind(rng, picture, truth)
        truth = bool(found)  # of every shape there is one, now and then
    elif truth:
        noun = rng.choice(items).name
    else:
        absent = [f"{c} {s}" for c in COLORS for s in SHAPES if all(i.name != f"{c} {s}" for i in items)]
        near = [n for n in absent if any(n.split()[0] == i.color or n.split()[1] == i.shape for i in items)]
        noun = rng.choice(near if rng.random() < 0.7 else absent)
    answer = f"Yes, there is {a(noun)}." if truth else f"No, there is no {noun}."
    asked = loose(rng, noun)
    question = ask(rng, THERE, split, noun=a(asked), nouns=plural(asked))
    return Turn("yes no", question, answer, grade="first_word")


def _is(rng: random.Random, picture: Picture, split: Split, item: Item, by_pronoun: bool, truth: bool) -> Turn:
    """Whether a shape has this colour, is of this kind, or at this place; where not, the answer says what is right."""
    items, unique = picture.items, sum(other.shape == item.shape for other in picture.items) == 1
    kinds = ["place", "size"]
    if by_pronoun or unique:
        kinds += ["color", "color"]
    if by_pronoun or sum(other.color == item.color for other in items) == 1:
        kinds += ["shape"]
    kind = rng.choice(kinds)
    right, others = {
        "color": (item.color, [c for c in COLORS if c != item.color]),
        "shape": (a(item.shape), [a(s) for s in SHAPES if s != item.shape]),
        "place": (at(item.place), [at(p) for p in ALL_PLACES if p != item.place]),
        "size": (SIZE_WORDS[item.size or "big"], [SIZE_WORDS["small" if item.size == "big" else "big"]]),
    }[kind]
    if kind == "size" and not item.size:
        kind, right, others = "place", at(item.place), [at(p) for p in ALL_PLACES if p != item.place]
    value = right if truth else rng.choice(others)
    # What is asked for stays unsaid in the name.
    part = {"color": item.shape, "shape": f"{item.color} shape"}.get(kind)
    name, said = part or any_name(rng, items, item), part or item.name
    question = ask(rng, IS_IT, split, value=value) if by_pronoun else ask(rng, IS, split, name=name, value=value)
    subject = "it" if by_pronoun else f"the {said}"
    return Turn("yes no", question, f"{'Yes' if truth else 'No'}, {subject} is {right}.", item, "first_word")


def _kind(rng: random.Random, picture: Picture, there: bool, many: bool = False) -> tuple[str, list[Item]]:
    """('circle' or 'red shape', those of that kind); `there` says whether there are any, `many` prefers more."""
    by_shape = rng.random() < 0.55
    counts = Counter(item.shape if by_shape else item.color for item in picture.items)
    kinds = [kind for kind in (SHAPES if by_shape else COLORS) if (kind in counts) == there]
    kinds = kinds or [picture.items[0].shape]  # of every shape there is one, now and then
    kind = rng.choices(kinds, [max(1, counts[kind] ** 2) for kind in kinds])[0] if many else rng.choice(kinds)
    return kind if by_shape else f"{kind} shape", [i for i in picture.items if kind in (i.shape, i.color)]


def loose(rng: random.Random, noun: str) -> str:
    """'red shape' as it is typed: 'red one', 'red thing'."""
    return noun.replace("shape", rng.choice(("shape", "shape", "one", "one", "thing")))


def _singular(question: str) -> str:
    """'Is there one shape?': of every template that asks for a number, in any spelling."""
    question = re.sub(r"\b(one|1) (shape|thing|object)s\b", r"\1 \2", question, flags=re.IGNORECASE)
    question = re.sub(r"\bare there (exactly |)(?=(one|1)\b)", r"is there \1", question, flags=re.IGNORECASE)
    return question[0].upper() + question[1:] if question.startswith("is there") else question


def _small(text: str) -> str:
    return text[0].lower() + text[1:]


def _sample(turn, thinking: bool = False):
    def sample(rng: random.Random, split: Split) -> Sample:
        picture = picture_for(rng, split, 6 if thinking else 5, 3 if thinking else 1)
        found = turn(rng, picture, split)
        if not thinking:
            found = replace(found, thought=None)
        return conversation(rng, [found], [image(picture)])

    return sample


TURNS = {"yes no": yes_no_turn, "count": count_turn}
SKILLS = (
    Skill("yes no", _sample(yes_no_turn)),
    Skill("count", _sample(count_turn)),
    Skill("count, thinking", _sample(count_turn, thinking=True)),
)
