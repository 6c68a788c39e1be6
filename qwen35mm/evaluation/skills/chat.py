"""Small talk, words to repeat, and questions that the model can't answer.

It can't answer questions about photographs, noise, pictures that nobody sent, or the rest of the world.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from qwen35mm.evaluation import scenes, words
from qwen35mm.evaluation.language import a, ask, at, plural
from qwen35mm.evaluation.scenes import ALL_PLACES, COLORS, SHAPES, Picture, Split, Unknown
from qwen35mm.evaluation.skills import asking, describing, structured
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, about_a_picture, conversation, image

CANT_TELL = "I can't tell. I only know simple shapes, short words in pictures, and what you tell me."
NO_MEDIA = "Please send a picture or a video first."
WHO = "I am the small demo model of qwen35mm, made for testing."
WHAT = "I can describe pictures and short clips of simple shapes, read short words, and remember what you tell me."
_SMALL_TALK = (
    (("[Hello|Hi] and good [morning|evening|day][!|]", "[Hello|Hey], how is it going?", "Good morning, how are you?"),
      f"Hello! {WHAT}"),
    (("Tell me who you are.", "What model are you?", "Tell me your name.", "So which model are you?"), WHO),
    (("Which things do you know?", "Tell me what I can ask you.", "Tell me how you work.", "What are your skills?",
      "So what do you know?"), WHAT),
    (("Great, well done!", "Very nice, thank you!", "Great work, thanks!", "That was very nice!"), "You are welcome."),
    (("Good bye and thank you!", "Have a good night!"), "Goodbye!"),
)  # fmt: skip
_OFF_TOPIC = (
    "Who is the best [president|king] of {place}?", "How old is the capital of {place}?",
    "Give me a [book|poem|song] about {thing}.", "How important is {thing}?", "What do people eat in {place}?",
    "Explain the [meaning|history] of {thing}.", "What is the best time to learn {thing}?",
    "What is the date in {place}?", "Compute {number} plus {number}.", "Do you know a good story?",
    "What do people like in {place}?", "Is the food in {place} good?", "What can I eat in {place}?",
)  # fmt: skip
# Training used these with other things and places.
_KNOWN_OFF_TOPIC = (
    "{thing}?", "[Tell me|Something] about {thing}.", "Weather in {place}?", "[How is the weather|Weather] today?",
    "[What time is it|What is the time|What day is it|What is the date]?", "{number} [plus|times|minus] {number}?",
    "{number}[+| + |x| * |-]{number}?", "Capital of {place}?", "Time in {place}?",
    "[Tell me a|Know a|Any] [joke|story]?", "[Write|Sing] me a [song|poem|story].",
    "Who won the [game|match|race|election]?", "[News|Any news] from {place}?", "Price of {thing}?",
    "[Do you like|You like] {thing}?", "What is {thing}?", "Who is {thing}?", "Best [food|hotel|film] in {place}?",
    "[How old are you|Are you happy|Where do you live|Do you love me]?",
    "[What should I|What can I] [eat|cook|wear|read] [today|tonight]?", "What is {number}% of {number}?",
    "[Solve|Compute] {number} + {number}.", "Is {place} [big|far|nice|cold]?", "[What is|Name] the capital of {place}?",
    "Who [wrote|invented|discovered|made|is] {thing}?", "Tell me [a story|a joke|something|a fact] about {thing}.",
    "How [old|tall|heavy|fast] is {thing}?", "Write a [poem|song|short story|letter] about {thing}.",
    "What is the weather [like |]in {place}?", "Why is {thing} so [famous|important|expensive]?",
    "[Explain|Describe] {thing} to me.", "Translate {thing} into [French|German|Spanish|Chinese].",
    "How do I [learn|cook|repair|buy|clean|make] {thing}?", "What is {number} [plus|times|minus|divided by] {number}?",
    "[Can you |]write [code|a program|Python code] for {thing}?", "[Give me|I need] a recipe [with|for] {thing}.",
    "What do you think [about|of] {thing}?", "How many people live in {place}?", "When did {thing} [begin|end|start]?",
    "[Do you like|Have you seen|Do you know] {thing}?", "Who is the [president|king|mayor] of {place}?",
    "What time is it in {place}?", "How far is it to {place}?", "Should I [buy|sell|eat|learn] {thing}?",
    "How much is {thing} worth?", "What is the [meaning|history|price] of {thing}?",
    "Recommend [a book|a film|a song] about {thing}.", "Where can I [buy|find|learn] {thing}?",
    "[Is|Was] {thing} [good|bad|dangerous|healthy|old]?", "How does {thing} work?",
    "Which is the [best|biggest|oldest] [city|river|museum] in {place}?", "What language do they speak in {place}?",
    "How do I get to {place}?", "What is {thing} made of?", "Do you know a joke about {thing}?",
)  # fmt: skip
REPEAT = (
    "Can you type this text: {said}", "I want the answer {said}[.|]", "Just repeat {said}", "Echo the words {said}",
    "Say this after me: {said}",
)  # fmt: skip
_PLACES = ("Athens", "Dublin", "Iran", "Ghana", "Prague", "Seoul", "Mexico")
_THINGS = (
    "the economy", "a doctor", "democracy", "the brain", "rice", "a violin", "Napoleon", "the weather", "a tree",
    "science", "the Beatles", "an airplane", "dinosaurs", "the law",
)  # fmt: skip
# Questions about photographs.
PHOTO = (
    "How many [people|trees] do you see in this [photo|picture]?",
    "What is the name of [the place|this plant|the person]?", "Which [season|city] is [shown|it]?",
    "Which animal do you see?", "How many people can you count in it?", "Is this person [young|old]?",
    "What is this animal doing?", "What is that person looking at?", "Do you know which place this is?",
)  # fmt: skip
_NO_MEDIA = (
    describing.CAPTION, describing.CAPTION, describing.COLOR, describing.COLOR_IT, describing.SHAPE_IT,
    describing.PLACE, describing.WHAT, describing.BACKGROUND, describing.SHAPE,
    ("After how many seconds does it appear?", "Do you see any {shapes}?", "Tell me what it says."),
)  # fmt: skip
_UNKNOWN = (
    *((describing.CAPTION, PHOTO) * 4), asking.COUNT, asking.COUNT_OF, structured.READ, structured.AS_JSON,
    describing.COLOR, describing.COLOR_IT, describing.SHAPE, describing.SHAPE_AT, describing.SIZE, describing.PLACE,
    describing.WHAT, asking.THERE,
)  # fmt: skip


def chat_turn(rng: random.Random) -> Turn:
    questions, answer = rng.choice(_SMALL_TALK)
    return Turn(ask(rng, questions), answer)


def repeat_turn(rng: random.Random) -> Turn:
    """Words to repeat, mostly made up."""
    said = " ".join(_said(rng) for _ in range(rng.randint(1, 4)))
    mark = "0"  # `ask` never changes a digit
    return Turn(ask(rng, REPEAT, said=mark).replace(mark, said), said)


def _said(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.15:
        return str(rng.randint(1, 999))
    if kind < 0.4:
        return rng.choice(_PLACES)
    return rng.choice((str, str, str.capitalize, str.upper))(words.made_up(rng))


def no_media_turn(rng: random.Random) -> Turn:
    """A question about a picture that nobody sent."""
    shape, color = rng.choice(SHAPES), rng.choice(tuple(COLORS))
    spot = rng.choice(ALL_PLACES)
    slots = {"name": rng.choice((shape, f"{color} {shape}")), "place": at(spot), "spot": spot, "color": color,
             "shape": shape, "shapes": plural(shape)}  # fmt: skip
    return Turn(ask(rng, rng.choice(_NO_MEDIA), **slots), NO_MEDIA)


def off_topic_turn(rng: random.Random) -> Turn:
    """A question about the rest of the world."""
    slots = {"place": rng.choice(_PLACES), "thing": rng.choice(_THINGS), "number": rng.randint(2, 99)}
    return Turn(ask(rng, _KNOWN_OFF_TOPIC if rng.random() < 0.3 else _OFF_TOPIC, **slots), CANT_TELL)


def random_unknown(rng: random.Random, split: Split) -> Unknown:
    """A photograph or noise; "combos" uses photographs that training never showed."""
    seed = rng.randrange(2**31) + (2**31 if split == "combos" else 0)
    kinds = ("photo", "photo", "photo", "noise")
    return Unknown(*scenes.random_size(rng), rng.choice(kinds), seed)


def unknown_turn(rng: random.Random) -> Turn:
    """Any question about a picture without anything that the model knows."""
    shape, color, spot = rng.choice(SHAPES), rng.choice(tuple(COLORS)), rng.choice(ALL_PLACES)
    thing = rng.choice((shape, f"{color} {shape}", f"{color} one"))
    slots = {"name": thing, "color": color, "place": at(spot), "spot": spot, "noun": a(thing), "nouns": plural(thing)}
    return Turn(ask(rng, rng.choice(_UNKNOWN), **slots), CANT_TELL)


def _beyond_turn(rng: random.Random, picture: Picture) -> Turn:
    """A question that a picture of shapes doesn't answer."""
    return off_topic_turn(rng)


def _sample(turn: Callable[[random.Random], Turn]) -> Callable[[random.Random, Split], Sample]:
    return lambda rng, split: conversation(rng, [turn(rng)])


def _unknown_sample(rng: random.Random, split: Split) -> Sample:
    turn = unknown_turn(rng)
    return conversation(rng, [turn], [image(random_unknown(rng, split))])


SKILLS = (
    Skill("small talk", _sample(chat_turn), 95),
    Skill("repeat", _sample(repeat_turn), 95),
    Skill("no media", _sample(no_media_turn), 95),
    Skill("off topic", _sample(off_topic_turn), 95),
    Skill("unknown picture", _unknown_sample, 95),
    Skill("beyond", about_a_picture(_beyond_turn, 3), 95),
)
