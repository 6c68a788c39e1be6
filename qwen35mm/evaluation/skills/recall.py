"""One to thirty facts that the conversation tells, and questions about them up to 2,000 tokens later."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen35mm.evaluation import scenes, words
from qwen35mm.evaluation.language import ask, capital, filled
from qwen35mm.evaluation.scenes import COLORS, Split
from qwen35mm.evaluation.skills import describing
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image
from qwen35mm.evaluation.skills.chat import chat_turn, repeat_turn
from training.export import IMAGE_PROCESSOR

NOT_TOLD = "You have not told me."
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
_CITIES = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Tokyo", "Berlin", "Madrid", "Dublin", "Quito", "Delhi", "Seoul",
           "Vienna", "Boston", "Athens", "Geneva", "Lisbon", "Prague", "Warsaw", "Havana")  # fmt: skip
_FOODS = ("apples", "bread", "cheese", "rice", "soup", "cake", "eggs", "fish", "honey", "milk", "nuts", "pasta",
          "pears", "pizza", "salad", "tea")  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_REMEMBER = (
    "[Remember|Please remember|Keep in mind|Note] [this|the following|these facts|what I tell you][:|.] ",
    "[Here are|These are] some facts[:|.] ",
    "Let me tell you something. ",
    "I will tell you a few things. ",
    "[Learn|Memorize|Memorise] this: ",
    "Please [memorize|learn] the following: ",
    "[Fyi|Btw|By the way|So|Ok so], ",
    "[Some|A few] things [about me|to know|you should know]: ",
    "[Listen|Hey|Ok|Hi]. ",
)
_NOTED = "OK."
_FAR = 2040  # tokens between facts and questions, at most: 20 less for each fact, about what it takes itself


@dataclass(frozen=True)
class Fact:
    """`key` tells it from all others; `answer` is the right answer to any of `questions`."""

    key: str
    statement: str
    questions: tuple[str, ...]
    answer: str

    def question(self, rng: random.Random, split: Split) -> str:
        return ask(rng, self.questions, split)


def _name(rng: random.Random, names: tuple[str, ...], split: Split) -> str:
    """Of values, the last fifth is held out. Training has names that nobody has, too: what is told is to be copied."""
    bound = len(names) * 4 // 5
    if split == "train" and rng.random() < 0.2:
        made_up = words.made_up(rng)
        return made_up.capitalize() if names[0][0].isupper() else made_up
    return rng.choice(names[:bound] if split == "train" else names[bound:])


def _code(rng: random.Random, split: Split) -> Fact:
    place = f"{rng.choice(_NUMBERED)} {rng.randint(1, 99)}"
    kind, code = rng.choice(("code", "key number", "password")), rng.randint(10, 999)
    statement = filled(rng, rng.choice((
        "The {kind} of {place} is {code}.", "{place} has the {kind} {code}.", "For {place}, the {kind} is {code}.",
        "The {kind} for {place} is {code}.", "{place}, {kind} {code}.", "{code} is the {kind} [of|for] {place}.",
        "{kind} [of|for] {place} is {code}.", "[Btw|By the way|Also], the {kind} of {place} is {code}.",
    )), kind=kind, place=place, code=code)  # fmt: skip
    questions = (
        f"{place} {kind}?", f"{kind} {place}?", f"{kind} of {place}?", f"{kind} for {place}?", f"{place}: {kind}?",
        f"And the {kind} of {place}?", f"[What was|Remind me,] the {kind} of {place} again?",
        f"The {kind} for {place} is what?", f"Which {kind} for {place}?", f"Give me the {kind} for {place}.",
        f"What is the {kind} of {place}?", f"Which {kind} does {place} have?", f"Tell me the {kind} of {place}.",
        f"I need the {kind} of {place}.", f"[Can|Could] you give me the {kind} of {place}?",
        f"What {kind} did I [say|tell you] {place} has?",
        f"[The {kind} of {place}, please|{place}, what is its {kind}|{place}: {kind}].",
        f"[Do you remember|What was] the {kind} of {place}?", f"I forgot the {kind} of {place}. What is it?",
        f"What is the {kind} for {place}?", f"Say the {kind} of {place} again.",
        f"[Can|Could] you say the {kind} of {place}?",
    )  # fmt: skip
    return Fact(f"{kind} {place}", statement, questions, f"The {kind} of {place} is {code}.")


def _relative(rng: random.Random, split: Split) -> Fact:
    who, name = rng.choice(_RELATIVES), _name(rng, _PEOPLE, split)
    whose = rng.choice(("my", "my", rng.choice(_PEOPLE[:40]) + "'s"))
    statement = filled(rng, rng.choice((
        "[The name of {whose} {who}|{whose} {who}'s name] is {name}.", "{whose} {who} is called {name}.",
        "{whose} {who} is named {name}.", "{whose} {who} is {name}.", "{name} is {whose} {who}'s name.",
        "{name} is the name of {whose} {who}.", "[Btw|By the way|Also], {whose} {who} is called {name}.",
        "They call {whose} {who} {name}.",
    )), whose=whose, who=who, name=name)  # fmt: skip
    questions = (
        f"Name of {whose} {who}?", f"{whose} {who}'s name?", f"{whose} {who} is called what?",
        f"{whose} {who}, what name?", f"And the name of {whose} {who}?",
        f"[What was|Remind me,] {whose} {who}'s name again?", f"What name has {whose} {who}?",
        f"{whose} {who} has which name?", f"Who was {whose} {who} again?",
        f"What is {whose} {who}'s name?", f"What is {whose} {who} called?", f"What is the name of {whose} {who}?",
        f"[Who|And who] is {whose} {who}?", f"Tell me the name of {whose} {who}.",
        f"I forgot {whose} {who}'s name. What is it?", f"[Can|Could] you say [how|what] {whose} {who} is called?",
        f"[How|What] do they call {whose} {who}?", f"Do you remember the name of {whose} {who}?",
        f"Say the name of {whose} {who} again.", f"The name of {whose} {who}, please.",
        f"And what is {whose} {who} called?",
    )  # fmt: skip
    said = whose if whose != "my" else "your"
    return Fact(f"{whose} {who}", statement, questions, capital(f"{said} {who} is called {name}."))


def _color(rng: random.Random, split: Split) -> Fact:
    thing, color = rng.choice(_THINGS), rng.choice(tuple(COLORS))
    whose = rng.choice(("my", "my", rng.choice(_PEOPLE[:40]) + "'s"))
    statement = filled(rng, rng.choice((
        "{whose} {thing} is {color}.", "{whose} {thing} has the color {color}.",
        "The color of {whose} {thing} is {color}.", "{color} is the color of {whose} {thing}.",
        "[Btw|By the way|Also], {whose} {thing} is {color}.", "{whose} {thing}'s color is {color}.",
        "{whose} {thing} is {color}, you know.",
    )), whose=whose, thing=thing, color=color)  # fmt: skip
    questions = (
        f"[Color|Colour] of {whose} {thing}?", f"{whose} {thing} [color|colour]?",
        f"{whose} {thing} is [what|which] [color|colour]?", f"{whose} {thing}, [what|which] [color|colour]?",
        f"And the [color|colour] of {whose} {thing}?",
        f"[What was|Remind me,] the [color|colour] of {whose} {thing} again?",
        f"[What|Which] [color|colour] was {whose} {thing}?", f"{whose} {thing} has [what|which] [color|colour]?",
        f"[What|Which] [color|colour] is {whose} {thing}?", f"What is the [color|colour] of {whose} {thing}?",
        f"[What|Which] [color|colour] does {whose} {thing} have?", f"Tell me the [color|colour] of {whose} {thing}.",
        f"I forgot the [color|colour] of {whose} {thing}. What is it?",
        f"[What|Which] [color|colour] did I say {whose} {thing} has?",
        f"The [color|colour] of {whose} {thing}, please.",
        f"[Can|Could] you say [what|which] [color|colour] {whose} {thing} is?",
        f"Do you remember the [color|colour] of {whose} {thing}?",
        f"Say the [color|colour] of {whose} {thing} again.", f"And what is the [color|colour] of {whose} {thing}?",
    )  # fmt: skip
    said = whose if whose != "my" else "your"
    return Fact(f"{whose} {thing}", statement, questions, capital(f"{said} {thing} is {color}."))


def _lives(rng: random.Random, split: Split) -> Fact:
    who, city = rng.choice(_PEOPLE), _name(rng, _CITIES, split)
    told = ("{who} lives in {city}.", "{who} is from {city}.", "{city} is where {who} lives.",
            "{who} is living in {city}.", "The home of {who} is {city}.", "[Btw|By the way], {who} lives in {city}.",
            "{who} lives in {city} now.", "{who}'s home is [in |]{city}.")  # fmt: skip
    statement = filled(rng, rng.choice(told), who=who, city=city)
    questions = (
        f"{who} lives where?", f"Where [does {who} live|did {who} live] again?", f"{who} is from where?",
        f"Where in the world is {who} living?", f"{who}, which city?", f"City of {who}?",
        f"{who}'s [city|home city]?", f"[Home|City] of {who}?", f"And where does {who} live?",
        f"[Where does {who} live|Where is {who} at home|Where is {who}'s home]?",
        f"[Tell me where {who} lives|Say where {who} is at home].", f"Do you remember where {who} lives?",
        f"[What|Which] city is {who} [from|living in]?", f"I forgot where {who} lives. Where is it?",
        f"In which city does {who} live?", f"Where is {who} from?", f"Which city does {who} live in?",
        f"Where is {who} living?",
        f"{who} lives in which city?", f"Say where {who} lives.", f"And which city is {who} from?",
    )  # fmt: skip
    return Fact(f"{who} city", statement, questions, f"{who} lives in {city}.")


def _likes(rng: random.Random, split: Split) -> Fact:
    who, food = rng.choice(_PEOPLE), _name(rng, _FOODS, split)
    told = ("{who} likes {food}.", "{who}'s favorite food is {food}.", "What {who} likes most is {food}.",
            "{who} loves {food}.", "{who} really likes {food}.", "[Btw|By the way|Also], {who} likes {food}.",
            "{food} is what {who} likes.", "{who} likes to eat {food}.",
            "{who} is fond of {food}.")  # fmt: skip
    statement = filled(rng, rng.choice(told), who=who, food=food)
    questions = (
        f"{who} likes what?", f"What food for {who}?", f"[Favorite|Favourite|Fav] food of {who}?",
        f"{who}'s [favorite|favourite|fav] food?", f"{who}, which food?", f"And what does {who} like?",
        f"What did {who} like again?", f"{who} loves to eat what?", f"Food that {who} likes?",
        f"What does {who} [like|love|enjoy]?", f"Tell me what {who} [likes|loves|is fond of].",
        f"Do you remember what {who} likes?", f"What does {who} like [most|best]?",
        f"What was the favorite [food|dish] of {who}?", f"What is {who}'s [favorite|favourite] food?",
        f"[Which|What] food does {who} [like|love|prefer]?", f"What does {who} like to [eat|have]?",
        f"What food is {who} fond of?",
        f"{who} likes to eat what?", f"Say what {who} likes.", f"And which food does {who} like?",
    )  # fmt: skip
    return Fact(f"{who} food", statement, questions, f"{who} likes {food}.")


def _when(rng: random.Random, split: Split) -> Fact:
    what, day = (
        rng.choice(("meeting", "party", "concert", "exam", "match", "trip", "visit", "lesson")),
        rng.choice(_DAYS),
    )
    who = rng.choice(_PEOPLE)
    statement = filled(rng, rng.choice((
        "The {what} with {who} is on {day}.", "On {day} there is the {what} with {who}.",
        "{day} is the day of the {what} with {who}.", "The {what} with {who} is {day}.",
        "{what} with {who} is on {day}.",
        "[Btw|By the way|Also], the {what} with {who} is on {day}.", "{day} is the {what} with {who}.",
    )), what=what, who=who, day=day)  # fmt: skip
    questions = (
        f"{what} with {who}, when?", f"When again is the {what} with {who}?", f"Day of the {what} with {who}?",
        f"The {what} with {who} is when?", f"{what} with {who} is on [which|what] day?",
        f"And when is the {what} with {who}?", f"When was the {what} with {who} again?", f"{what} with {who}?",
        f"When is the {what} with {who}?", f"Tell me when the {what} with {who} is.",
        f"I forgot when the {what} with {who} is. Which day is it?", f"What was the day of the {what} with {who}?",
        f"Do you remember when the {what} with {who} is?", f"On [which|what] day is the {what} with {who}?",
        f"Which day is the {what} with {who}?", f"What day is the {what} with {who} on?",
        f"The day of the {what} with {who}, please.", f"Say when the {what} with {who} is.",
    )  # fmt: skip
    return Fact(f"{what} {who}", statement, questions, f"The {what} with {who} is on {day}.")


_FAMILIES: tuple[Callable[[random.Random, Split], Fact], ...] = (_code, _code, _relative, _color, _lives, _likes, _when)


def facts(rng: random.Random, split: Split, count: int) -> list[Fact]:
    """`count` facts about different things."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        fact = rng.choice(_FAMILIES)(rng, split)
        found.setdefault(fact.key, fact)
    return list(found.values())


def sample_with(
    rng: random.Random,
    split: Split,
    num_facts: int,
    spread: bool,
    questions: int | None = None,
    between: int = 0,
    not_told: float = 0.25,
) -> Sample:
    """A conversation that tells `num_facts` facts, at once or (`spread`) over several turns, and asks for some.

    `not_told`: the share of the questions that ask for what it wasn't told. `between`: about so many tokens of other
    turns, with pictures and without, lie between the facts and the questions.
    """
    told = facts(rng, split, num_facts)
    groups = [told]
    if spread and num_facts > 1:
        size = rng.randint(1, max(1, num_facts // 2))
        groups = [told[i : i + size] for i in range(0, num_facts, size)]
    before = []
    for index, group in enumerate(groups):
        opening = filled(rng, rng.choice(_REMEMBER)) if index == 0 or rng.random() < 0.2 else ""
        opening = opening + " " if opening and rng.random() < 0.98 else opening
        before.append(Turn("noted", opening + " ".join(fact.statement for fact in group), _NOTED))
    turns = []
    for fact in rng.sample(told, min(num_facts, rng.randint(2, 6) if questions is None else questions)):
        if rng.random() < not_told:
            turns.append(Turn("not told", _untold(rng, split, told).question(rng, split), NOT_TOLD))
        else:
            turns.append(Turn("recall", fact.question(rng, split), fact.answer))
    if not between:
        return conversation(rng, [*before, *turns], [])
    parts = [conversation(rng, before, []), *_others(rng, split, between), conversation(rng, turns, [])]
    messages, skills = ([each for part in parts for each in getattr(part, name)] for name in ("messages", "skills"))
    return Sample(parts[-1].skill, messages, skills, parts[-1].grade)


def _untold(rng: random.Random, split: Split, told: list[Fact]) -> Fact:
    """A fact that is none of these; as often as not one that has a word of its key in common with one of them."""
    keys = {fact.key for fact in told}
    others = [fact for fact in facts(rng, split, len(told) + 8) if fact.key not in keys]
    said = {word for key in keys for word in key.split()} - {"my"}
    near = [fact for fact in others if said & set(fact.key.split())]
    return rng.choice(near) if near and rng.random() < 0.5 else others[0]


def far(rng: random.Random, num_facts: int) -> int:
    """How many tokens may lie between so many facts and the questions about them."""
    return rng.randint(0, _FAR - 20 * num_facts)


def _others(rng: random.Random, split: Split, tokens: int) -> list[Sample]:
    """Conversations about other things, of `tokens` tokens or a little less."""
    found = []
    while tokens > 0:
        if rng.random() < 0.5:
            picture = scenes.random_picture(rng, scenes.random_size(rng, largest=320), rng.randint(1, 3), split)
            asked = (describing.caption_turn, describing.place_turn, describing.color_turn)
            turns = [rng.choice(asked)(rng, picture, split) for _ in range(rng.randint(1, 2))]
            each = conversation(rng, turns, [image(picture)])
            tokens -= max(IMAGE_PROCESSOR["size"]["shortest_edge"], picture.width * picture.height) // 1024
        else:
            each = conversation(rng, [rng.choice((chat_turn, repeat_turn))(rng, split)], [])
        tokens -= sum(_roughly(message["content"]) for message in each.messages)
        found.append(each)
    return found[:-1]  # the last one was too much


def _roughly(content: str | list[dict[str, Any]]) -> int:
    """A message's tokens without its media, more or less."""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return 6 + sum(len(text) for text in texts) // 3


def _sample(num_facts: int) -> Callable[[random.Random, Split], Sample]:
    def sample(rng: random.Random, split: Split) -> Sample:
        between = far(rng, num_facts) if rng.random() < 0.7 else 0
        return sample_with(rng, split, num_facts, rng.random() < 0.4, questions=1, between=between, not_told=0.0)

    return sample


def _not_told_sample(rng: random.Random, split: Split) -> Sample:
    return sample_with(rng, split, rng.randint(1, 10), rng.random() < 0.4, questions=1, not_told=1.0)


SKILLS = (
    Skill("recall 1", _sample(1), 95),
    Skill("recall 10", _sample(10), 95),
    Skill("recall 30", _sample(30), 85),
    Skill("not told", _not_told_sample, 95),
)
