"""A conversation with one to thirty facts, and a question about one of them up to 2,000 tokens later."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen35mm.evaluation import scenes
from qwen35mm.evaluation.language import ask, capital, filled
from qwen35mm.evaluation.scenes import COLORS, Split
from qwen35mm.evaluation.skills import describing
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image
from qwen35mm.evaluation.skills.chat import chat_turn, repeat_turn

NOT_TOLD = "You have not told me."
NOTED = "OK."
_PEOPLE = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mia", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tina", "Uma", "Victor", "Wendy", "Xenia", "Yusuf", "Zoe", "Alice", "Bob", "Carl",
    "Diana", "Erik", "Fiona", "George", "Hanna", "Ivan", "Julia", "Karl", "Lena", "Mark", "Nina", "Oscar", "Petra",
    "Rex", "Sara", "Tom", "Vera", "Will", "Max", "Bella", "Luna", "Rocky", "Milo", "Coco", "Ruby", "Toby", "Lucy",
)  # fmt: skip
_RELATIVES = ("sister", "brother", "dog", "cat", "teacher", "boss", "neighbor", "uncle", "aunt", "friend", "doctor",
              "horse", "cousin", "parrot", "daughter", "son")  # fmt: skip
_THINGS = ("bike", "car", "hat", "coat", "bag", "cup", "house", "door", "phone", "chair", "boat", "pen", "lamp", "book",
           "shirt", "table", "kite", "tent", "umbrella", "scarf")  # fmt: skip
_NUMBERED = ("locker", "room", "box", "gate", "safe", "office", "garage", "cabin", "suitcase", "flat")
# Names, cities and foods that training never used in such facts.
_NEW_NAMES = _PEOPLE[len(_PEOPLE) * 4 // 5 :]
_CITIES = ("Lisbon", "Prague", "Warsaw", "Havana")
_FOODS = ("pears", "pizza", "salad", "tea")
_KINDS = ("code", "key number", "password")
_EVENTS = ("meeting", "party", "concert", "exam", "match", "trip", "visit", "lesson")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_REMEMBER = (
    "[Remember|Please remember|Keep in mind|Note] [this|the following|these facts|what I tell you][:|.] ",
    "[Here are|These are] some facts[:|.] ", "Let me tell you something. ", "I will tell you a few things. ",
    "[Learn|Memorize|Memorise] this: ", "Please [memorize|learn] the following: ", "[Fyi|Btw|By the way|So|Ok so], ",
    "[Some|A few] things [about me|to know|you should know]: ", "[Listen|Hey|Ok|Hi]. ",
)  # fmt: skip
_FAR = 2040  # most tokens between the facts and the question; 20 fewer for each fact
_LEAST_PIXELS = 256 * 256  # what the demo's image processor enlarges smaller pictures to


@dataclass(frozen=True)
class _Family:
    """Facts of one kind: `draw` fills the slots of its templates. `key` identifies a fact."""

    draw: Callable[[random.Random], dict[str, Any]]
    key: str
    answer: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Fact:
    """A fact. `statement` is its sentence, `answer` the right answer to its questions."""

    key: str
    statement: str
    family: _Family
    slots: dict[str, Any]

    @property
    def answer(self) -> str:
        return capital(self.family.answer.format(**self.slots))

    def question(self, rng: random.Random) -> str:
        return ask(rng, self.family.questions, **self.slots)


def _whose(rng: random.Random) -> dict[str, str]:
    whose = rng.choice(("my", "my", rng.choice(_PEOPLE[:40]) + "'s"))
    return {"whose": whose, "said": "your" if whose == "my" else whose}


_FAMILIES = (
    _Family(
        lambda rng: {"place": f"{rng.choice(_NUMBERED)} {rng.randint(1, 99)}", "kind": rng.choice(_KINDS),
                     "code": rng.randint(10, 999)},
        "{kind} {place}", "The {kind} of {place} is {code}.",
        ("The {kind} of {place} is {code}.", "{place} has the {kind} {code}.", "For {place}, the {kind} is {code}.",
         "The {kind} for {place} is {code}.", "{place}, {kind} {code}.", "{code} is the {kind} [of|for] {place}.",
         "{kind} [of|for] {place} is {code}.", "[Btw|By the way|Also], the {kind} of {place} is {code}."),
        ("I forgot the {kind} of {place}. What is it?", "What is the {kind} for {place}?",
         "Say the {kind} of {place} again.", "[Can|Could] you say the {kind} of {place}?"),
    ),
    _Family(
        lambda rng: {"who": rng.choice(_RELATIVES), "name": rng.choice(_NEW_NAMES), **_whose(rng)},
        "{whose} {who}", "{said} {who} is called {name}.",
        ("[The name of {whose} {who}|{whose} {who}'s name] is {name}.", "{whose} {who} is called {name}.",
         "{whose} {who} is named {name}.", "{whose} {who} is {name}.", "{name} is {whose} {who}'s name.",
         "{name} is the name of {whose} {who}.", "[Btw|By the way|Also], {whose} {who} is called {name}.",
         "They call {whose} {who} {name}."),
        ("Do you remember the name of {whose} {who}?", "Say the name of {whose} {who} again.",
         "The name of {whose} {who}, please.", "And what is {whose} {who} called?"),
    ),
    _Family(
        lambda rng: {"thing": rng.choice(_THINGS), "color": rng.choice(tuple(COLORS)), **_whose(rng)},
        "{whose} {thing}", "{said} {thing} is {color}.",
        ("{whose} {thing} is {color}.", "{whose} {thing} has the color {color}.",
         "The color of {whose} {thing} is {color}.", "{color} is the color of {whose} {thing}.",
         "[Btw|By the way|Also], {whose} {thing} is {color}.", "{whose} {thing}'s color is {color}.",
         "{whose} {thing} is {color}, you know."),
        ("Do you remember the [color|colour] of {whose} {thing}?", "Say the [color|colour] of {whose} {thing} again.",
         "And what is the [color|colour] of {whose} {thing}?"),
    ),
    _Family(
        lambda rng: {"who": rng.choice(_PEOPLE), "city": rng.choice(_CITIES)},
        "{who} city", "{who} lives in {city}.",
        ("{who} lives in {city}.", "{who} is from {city}.", "{city} is where {who} lives.",
         "{who} is living in {city}.", "The home of {who} is {city}.", "[Btw|By the way], {who} lives in {city}.",
         "{who} lives in {city} now.", "{who}'s home is [in |]{city}."),
        ("Where is {who} living?", "{who} lives in which city?", "Say where {who} lives.",
         "And which city is {who} from?"),
    ),
    _Family(
        lambda rng: {"who": rng.choice(_PEOPLE), "food": rng.choice(_FOODS)},
        "{who} food", "{who} likes {food}.",
        ("{who} likes {food}.", "{who}'s favorite food is {food}.", "What {who} likes most is {food}.",
         "{who} loves {food}.", "{who} really likes {food}.", "[Btw|By the way|Also], {who} likes {food}.",
         "{food} is what {who} likes.", "{who} likes to eat {food}.", "{who} is fond of {food}."),
        ("What food is {who} fond of?", "{who} likes to eat what?", "Say what {who} likes.",
         "And which food does {who} like?"),
    ),
    _Family(
        lambda rng: {"what": rng.choice(_EVENTS), "day": rng.choice(_DAYS), "who": rng.choice(_PEOPLE)},
        "{what} {who}", "The {what} with {who} is on {day}.",
        ("The {what} with {who} is on {day}.", "On {day} there is the {what} with {who}.",
         "{day} is the day of the {what} with {who}.", "The {what} with {who} is {day}.",
         "{what} with {who} is on {day}.", "[Btw|By the way|Also], the {what} with {who} is on {day}.",
         "{day} is the {what} with {who}."),
        ("What day is the {what} with {who} on?", "The day of the {what} with {who}, please.",
         "Say when the {what} with {who} is."),
    ),
)  # fmt: skip


def facts(rng: random.Random, count: int) -> list[Fact]:
    """`count` facts about different things."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        family = rng.choice((_FAMILIES[0], *_FAMILIES))  # codes twice as often
        slots = family.draw(rng)
        statement = filled(rng, rng.choice(family.statements), **slots)
        fact = Fact(family.key.format(**slots), statement, family, slots)
        found.setdefault(fact.key, fact)
    return list(found.values())


def sample_with(rng: random.Random, split: Split, num_facts: int, told: bool, between: int = 0) -> Sample:
    """A conversation with `num_facts` facts, in one or several turns, and a question.

    Args:
        told: whether the question is about one of these facts, or about something else.
        between: tokens of other turns between the facts and the question, about.
    """
    spread = rng.random() < 0.4
    all_facts = facts(rng, num_facts)
    groups = [all_facts]
    if spread and num_facts > 1:
        size = rng.randint(1, max(1, num_facts // 2))
        groups = [all_facts[i : i + size] for i in range(0, num_facts, size)]
    before = []
    for index, group in enumerate(groups):
        opening = filled(rng, rng.choice(_REMEMBER)) if index == 0 or rng.random() < 0.2 else ""
        opening = opening + " " if opening and rng.random() < 0.98 else opening
        before.append(Turn(opening + " ".join(fact.statement for fact in group), NOTED))
    (fact,) = rng.sample(all_facts, 1)
    rng.random()  # keeps the card's questions: they were drawn with this call
    answer = fact.answer if told else NOT_TOLD
    turn = Turn((fact if told else _untold(rng, all_facts)).question(rng), answer)
    if not between:
        return conversation(rng, [*before, turn])
    parts = [conversation(rng, before), *other_turns(rng, split, between), conversation(rng, [turn])]
    return Sample([message for part in parts for message in part.messages])


def _untold(rng: random.Random, told: list[Fact]) -> Fact:
    """A different fact. Half of the time its key shares a word with one of `told`."""
    keys = {fact.key for fact in told}
    others = [fact for fact in facts(rng, len(told) + 8) if fact.key not in keys]
    said = {word for key in keys for word in key.split()} - {"my"}
    near = [fact for fact in others if said & set(fact.key.split())]
    return rng.choice(near) if near and rng.random() < 0.5 else others[0]


def other_turns(rng: random.Random, split: Split, tokens: int, *, pictures: bool = True) -> list[Sample]:
    """Conversations about other things, at most `tokens` tokens together, and not much less."""
    found = []
    while tokens > 0:
        if pictures and rng.random() < 0.5:
            picture = scenes.random_picture(rng, scenes.random_size(rng, largest=320), rng.randint(1, 3), split)
            asked = (describing.caption_turn, describing.place_turn, describing.color_turn)
            turns = [rng.choice(asked)(rng, picture) for _ in range(rng.randint(1, 2))]
            each = conversation(rng, turns, [image(picture)])
            tokens -= max(_LEAST_PIXELS, picture.width * picture.height) // 1024
        else:
            each = conversation(rng, [rng.choice((chat_turn, repeat_turn))(rng)])
        tokens -= sum(_roughly(message["content"]) for message in each.messages)
        found.append(each)
    return found[:-1]  # the last one exceeds the limit


def _roughly(content: str | list[dict[str, Any]]) -> int:
    """Approximate number of tokens of a message, without its media."""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return 6 + sum(len(text) for text in texts) // 3


def _recall(num_facts: int) -> Callable[[random.Random, Split], Sample]:
    def sample(rng: random.Random, split: Split) -> Sample:
        between = rng.randint(0, _FAR - 20 * num_facts) if rng.random() < 0.7 else 0
        return sample_with(rng, split, num_facts, told=True, between=between)

    return sample


def _not_told(rng: random.Random, split: Split) -> Sample:
    return sample_with(rng, split, rng.randint(1, 10), told=False)


SKILLS = (
    Skill("recall 1", _recall(1), 95),
    Skill("recall 10", _recall(10), 95),
    Skill("recall 30", _recall(30), 85),
    Skill("not told", _not_told, 95),
)
