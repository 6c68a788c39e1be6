"""Captions, and colour, shape, size and place of one shape, of what is at a place, and of the background."""

from __future__ import annotations

import random

from qwen35mm.evaluation.language import a, ask, at, capital, listed, sized
from qwen35mm.evaluation.scenes import BACKGROUNDS, COLORS, SHAPES, Item, Picture, Split
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image, picture_for

CAPTION = (
    "Describe [it|this|that|everything].", "[What do you see|What can you see|What all do you see]?",
    "[What is here|What have we here|What is there|What is in there|What is in it]?",
    "[What|Which] [shapes|objects|things]?", "[Shapes|Objects|All shapes|Contents|Shapes and colors]?",
    "[Description|Summary]?", "[Caption, please|Description[, please|]|Summary[, please|]].",
    "[Give me|Make|I want|I need] a [short |quick |brief |full |][list|caption|description|summary][ of it|].",
    "[And this|What about this|And this one|And this picture|Now this one]?",
    "[What is this|What is that|What is on it|What is on here|And what is this]?",
    "[List|Name|Describe|Show|Go through] [everything|all of it|all shapes|the shapes|each shape|what you see].",
    "[Explain|Describe] [this|the] [picture|image|pic].", "What is this a [picture|image|photo] of?",
    "[Picture|Image] of what?", "What did I [send|draw|show you]?",
    "[Take a look|Have a look|Look at this] and [tell me what you see|describe it].",
    "[In one sentence, what is it|In a few words, what is it|In short, what do you see]?",
    "So what [do we have|is in the picture|do you see]?", "[Describe|Caption] [the|this] [picture|image|photo|pic].",
    "[Describe|Summarize|Summarise] [the|this] [picture|image] in [one|a single] sentence.",
    "What is [in|on] [the|this] [picture|image|pic]?",
    "What [do you see|can you see|can be seen] [here|in this picture|in the image|in the picture]?",
    "What do you see?", "What does [the|this] [picture|image] show?",
    "[Tell me|Say|Write down] what is in [the|this] [picture|image].", "What is this?", "What is it?",
    "What am I looking at?", "Give me a [short |][caption|description] [of this picture|for this image|of it].",
    "List [everything|all shapes|all the shapes] [in the picture|you see|that you see].",
    "[Which|What] shapes are [there|in the picture|in the image|shown]?",
    "Which [things|objects] are [there|in it|in the picture]?",
    "I would like a [short |]description of [this|the] [picture|image].",
    "What [shapes|objects|things] can you [make out|find] [here|in it]?",
    "[How would you|Could you|Can you] [describe|caption] [this|the] [picture|image]?",
    "Tell me [about|something about] [this|the] [picture|image].", "Write a [short |]caption[ for this picture|].",
    "[Can|Could] you tell me what is [there|in it|in the picture]?",
    "[Can you|Please] list [the shapes|the things|what there is].", "What is [shown|there] [here|in this image]?",
    "[Could|Can] you describe [it|what you see]?", "[What|Which] objects do you see [here|]?",
    "Give me a description of [what you see|what is there].",
    "[Could|Can] you tell me what you see in [this|the] [picture|image]?",
    "Write a short description of [this|the] [picture|image].",
    "I would like a list of all [shapes|objects] in [this|the] [picture|image].",
    "Describe what is shown [here|in the image].", "[Can|Could] you list all the [shapes|objects] that you see?",
    "What can you tell me about [this|the] [picture|image]?", "And what do you see in [this|it]?",
    "What do we see here?", "Describe all [objects|things] in [it|this picture].", "In short, what is [in it|this]?",
)  # fmt: skip
COLOR = (
    "[color|colour] of the {name}?", "{name} [color|colour]?", "The {name} is [what|which] [color|colour]?",
    "The {name}, [what|which] [color|colour]?", "And the [color|colour] of the {name}?",
    "And the {name}, [what|which] [color|colour] is it?", "What [color|colour] has the {name} got?",
    "[What|Which] [color|colour], the {name}?", "The [color|colour] of the {name}[, please|].",
    "[What|Which] [color|colour] is the {name}?", "What is the [color|colour] of the {name}?",
    "[What|Which] [color|colour] does the {name} have?", "The {name}: [what|which] [color|colour] is it?",
    "In [what|which] [color|colour] is the {name} [drawn|painted|shown]?",
    "Tell me the [color|colour] of the {name}.", "How would you call the [color|colour] of the {name}?",
    "The {name} [has|is] [what|which] [color|colour]?", "[Can|Could] you tell me what [color|colour] the {name} has?",
    "Say [what|which] [color|colour] the {name} is.", "[Color|Colour] of the {name}?",
    "I would like to know the [color|colour] of the {name}.",
    "[Could|Can] you say [what|which] [color|colour] the {name} has?",
    "[Could|Can] you say the [color|colour] of the {name}?", "Say the [color|colour] of the {name}.",
    "And [what|which] [color|colour] does the {name} have?", "And what is the [color|colour] of the {name}?",
)  # fmt: skip
COLOR_AT = (
    "[color|colour] {place}?", "{spot} [color|colour]?", "[color|colour] of the {spot} [one|shape|thing]?",
    "[What|Which] [color|colour] is the {spot} [one|shape|thing]?",
    "[color|colour] of the [one|thing|shape] {place}?", "[What|Which] [color|colour] {place}?",
    "The {spot} one is [what|which] [color|colour]?", "The {spot} one, [color|colour]?",
    "[What|Which] [color|colour] is the [shape|one|object|thing] {place}?",
    "What is the [color|colour] of the [shape|thing|object] {place}?",
    "[What|Which] [color|colour] does the [shape|one|thing] {place} have?",
    "[What|Which] [color|colour] is it {place}?", "Tell me the [color|colour] of what is {place}.",
    "The [shape|one|thing] {place}: [what|which] [color|colour] is it?",
    "[Can|Could] you tell me the [color|colour] of the [shape|thing] {place}?",
    "Say [what|which] [color|colour] [it is|the shape is] {place}.", "What [color|colour] is there {place}?",
    "Tell me the [color|colour] of the [one|object|thing] {place}.",
    "Say [what|which] [color|colour] the [object|thing] {place} is.",
    "[What|Which] [color|colour] has the [one|thing] {place}?",
    "The [shape|thing] {place} has [what|which] [color|colour]?",
)  # fmt: skip
COLOR_IT = (
    "[color|colour]?", "[What|Which] [color|colour]?", "The [color|colour]?", "[color|colour][, please|].",
    "And its [color|colour]?", "It is [what|which] [color|colour]?", "It has [what|which] [color|colour]?",
    "[What|Which] [color|colour] is it?", "What is its [color|colour]?",
    "And [which|what] [color|colour] does it have?", "[What|Which] [color|colour] does it have?",
    "Its [color|colour]?", "Tell me its [color|colour].", "And the [color|colour]?",
    "[What|Which] [color|colour] is [that|this]?", "[Can|Could] you tell me its [color|colour]?",
    "Could you tell me [which|what] [color|colour] it has?", "Tell me [which|what] its [color|colour] is.",
    "And what is its [color|colour]?", "The [color|colour], please?",
)  # fmt: skip
SHAPE = (
    "What is {color}?", "The {color} one?", "The {color} [one|thing|shape], what is it?", "{color} one is what?",
    "[Which|What] one is {color}?", "Shape of the {color} [one|thing]?", "And the {color} [one|thing|shape]?",
    "{color} [one|thing], [what|which] shape?", "What is that {color} thing?", "[What|Which] shape is {color}?",
    "What is the {color} [shape|one|thing|object]?", "What is the shape of the {color} [one|thing|object]?",
    "What kind of shape is the {color} one?", "Which shape does the {color} [one|object|thing] have?",
    "What do you call the {color} [shape|thing]?", "[Can|Could] you tell me what the {color} [thing|shape|one] is?",
    "The {color} [one|shape|thing]: what is it?", "Tell me [what|which] shape the {color} [one|thing] has.",
    "Name the {color} [shape|object].", "What is the name of the {color} [shape|object]?",
    "Tell me what the {color} [object|shape] is.", "[Can|Could] you name the {color} [thing|object]?",
    "And what is the {color} [one|thing]?", "The shape of the {color} [one|thing]?",
)  # fmt: skip
SHAPE_AT = (
    "Shape {place}?", "[What|Which] shape {place}?", "{spot} shape?", "Shape of the {spot} [one|thing]?",
    "[What|Which] shape is the {spot} [one|thing]?", "The [one|thing] {place}, [what|which] shape?",
    "The {spot} [one|thing], [what|which] shape is it?", "Shape of the [one|thing] {place}?",
    "[What|Which] shape is {place}?", "What is the shape of the [thing|object|one] {place}?",
    "What kind of shape is {place}?", "Which shape do you see {place}?", "Which kind of shape can you see {place}?",
    "Tell me [which|what] shape is {place}.", "Name the shape {place}.", "The shape {place}: [what|which] is it?",
    "[What|Which] shape can you see {place}?", "Tell me the shape of the [thing|object] {place}.",
    "And the shape {place}?", "[What|Which] shape has the [one|thing] {place}?",
)  # fmt: skip
SHAPE_IT = (
    "Shape?", "Which shape?", "The shape?", "Shape[, please|].", "And its shape?", "It is [what|which] shape?",
    "It has [what|which] shape?", "What sort of shape?", "[What|Which] shape is it?", "What is its shape?",
    "And [what|which] shape does it have?", "What kind of shape is it?", "Its shape?", "Which kind of shape is that?",
    "Tell me its shape.", "And the shape?", "What kind of shape does it have?", "[What|Which] shape is that?",
    "And what is its shape?", "The shape, please?",
)  # fmt: skip
PLACE = (
    "{name}, where?", "Where, the {name}?", "The {name} is where?", "And where is the {name}?",
    "[Place|Position|Location] of the {name}?", "Where is that {name}?", "The {name}, where is it?",
    "{name} [place|position]?", "[Show me|Tell me] where the {name} is.", "[Find|Locate] {name}.",
    "And the {name}, where [is it|is that]?", "Where is the {name}?", "Where is the {name} in the [picture|image]?",
    "Where do you see the {name}?", "In which [part|corner|area] [of the picture |]is the {name}?",
    "Where [in the picture |]can I find the {name}?", "On which side is the {name}?", "[Locate|Find] the {name}.",
    "Whereabouts is the {name}?", "Tell me where the {name} is.",
    "[Can|Could] you [tell me|see] where the {name} is?", "Where can the {name} be [found|seen]?",
    "The {name}: where is it?", "Say where [you see the {name}|the {name} is].",
    "What is the [place|position] of the {name}?", "Where exactly is the {name}?",
    "Tell me [in which part|on which side] the {name} is.", "Where can you see the {name}[ in the picture|]?",
    "[Can|Could] you find the {name}?", "And where do you see the {name}?", "The [place|position] of the {name}?",
    "And in which part is the {name}?",
)  # fmt: skip
PLACE_IT = (
    "Where?", "[Where at|Whereabouts]?", "And where?", "It is where?", "[Position|Place|Location]?",
    "Where in the [picture|image]?", "[Which|What] [corner|side|part]?", "Where exactly?", "Where is it?",
    "And where is it?", "Where is it in the [picture|image]?", "In which part of the [picture|image] is it?",
    "Where do you see it?", "Whereabouts is it?", "Tell me where it is.", "Where can I find it?",
    "Its [place|position]?", "Where can you see it?", "In which part is it?", "And where do you see it?",
    "Where exactly is it?",
)  # fmt: skip
SIZE = (
    "Size of the {name}?", "{name} size?", "How [big|large], the {name}?", "The {name} is how [big|large]?",
    "And the size of the {name}?", "The {name}, [big or small|small or big|large or small]?",
    "{name}: [big or small|large or small]?", "And how [big|large] is the {name}?",
    "[How big|How large|What size] is the {name}?", "What is the size of the {name}?",
    "Is the {name} [big or small|small or big|large or small]?", "What size does the {name} have?",
    "Of what size is the {name}?", "Tell me the size of the {name}.", "Tell me how [big|large] the {name} is.",
    "The {name}: [how big|what size] is it?", "[Can|Could] you tell me [how large|how big] the {name} is?",
    "Tell me what size the {name} has.", "And what size is the {name}?", "The size of the {name}?",
)  # fmt: skip
SIZE_IT = (
    "Size?", "How [big|large]?", "[What|Which] size?", "[Big|Large] or small?", "And its size?",
    "It is how [big|large]?", "Small or [big|large]?", "[How big|How large|What size] is it?", "What is its size?",
    "Is it [big or small|large or small]?", "Its size?", "Tell me [how big it is|its size].",
    "What size does it have?", "And the size?", "Of what size is it?", "And how [big|large] is it?",
    "And what is its size?", "And what size is it?",
)  # fmt: skip
WHAT = (
    "{spot}, what?", "And {spot}, what is it?", "{place}?", "And {place}, what is there?", "What about {place}?",
    "[What|Which] [one|thing] {place}?",
    "What is that [thing|one] {place}?", "The [thing|one] {place}?", "The {spot} one?", "And the {spot} one?",
    "What is the {spot} [one|thing|shape]?", "Anything {place}?", "{place} is what?", "What is {place}?",
    "What do you see {place}?", "Which [thing|object|shape] is {place}?", "What can you see {place}?",
    "What is there {place}?", "Tell me what is {place}.", "Describe what is {place}.",
    "Which thing can be found {place}?", "[Can|Could] you tell me what is {place}?",
    "Is there [something|anything] {place}, and what?", "{place}, what [is there|do you see]?",
    "Describe what you see {place}.", "Tell me what can be found {place}.", "{place}, what can you see?",
    "Tell me what [you see|there is] {place}.", "And what do you see {place}?", "Which one is {place}?",
    "And what can you see {place}?",
)  # fmt: skip
BACKGROUND = (
    "Background?", "Background [color|colour]?", "[color|colour] of the background?", "What background?",
    "And the background?", "And the background, [what|which] [color|colour]?", "And behind [it|them], which?",
    "Behind [it|them], [what|which] [color|colour] is it?", "[What|Which] [color|colour] is there behind [it|them]?",
    "The background is [what|which] [color|colour]?", "[What|Which] [color|colour] is behind [it|it all|them]?",
    "[What|Which] [color|colour] is the background?", "What is the [color|colour] of the background?",
    "[What|Which] [color|colour] does the background have?", "The background is of which [color|colour]?",
    "[What|Which] background [color|colour] [is it|does the picture have]?",
    "On which [color|colour] are the shapes drawn?", "Tell me the [color|colour] of the background.",
    "What [color|colour] is behind the shapes?", "The background: [what|which] [color|colour]?",
    "Tell me [what|which] [color|colour] the background is.", "[What|Which] [color|colour] is behind the shape?",
    "And the [color|colour] of the background?", "[What|Which] [color|colour] is it [behind|in the background]?",
)  # fmt: skip
# Of two that are named, one is right.
EITHER = (
    "Is the {name} {first} or {second}?", "The {name}, {first} or {second}?", "The {name} is {first} or {second}?",
    "Is that {name} {first} or {second}?", "And is the {name} {first} or {second}?", "{name}: {first} or {second}?",
    "Is the {name} {first}, or is it {second}?", "The {name}: is it {first} or {second}?",
    "What is the {name}, {first} or {second}?", "Which is the {name}, {first} or {second}?",
)  # fmt: skip
EITHER_IT = (
    "Is it {first} or {second}?", "{first} or {second}?", "Is that {first} or {second}?", "It is {first} or {second}?",
    "And is it {first} or {second}?", "Is it {first}, or is it {second}?", "Is this {first} or {second}?",
    "So {first} or {second}?", "What would you call it, {first} or {second}?", "Which one is it, {first} or {second}?",
    "It is what, {first} or {second}?", "Would you say {first} or {second}?",
    "What is it, {first} or {second}?", "Which is it, {first} or {second}?",
)  # fmt: skip
SIZE_WORDS = {"small": "small", "": "medium-sized", "big": "big"}


def caption(items: tuple[Item, ...]) -> str:
    """'A big red circle at the top left, a blue star in the center, a green cross on the right.'"""
    return capital(listed([f"{a(sized(item))} {at(item.place)}" for item in items])) + "."


def names(items: tuple[Item, ...], item: Item) -> list[str]:
    """What an item may be called so that no other is meant."""
    found = [item.name]
    if sum(other.shape == item.shape for other in items) == 1:
        found += [item.shape] * 2
    if sum(other.color == item.color for other in items) == 1:
        found += [f"{item.color} {noun}" for noun in ("shape", "one", "thing")]
    return found


def any_name(rng: random.Random, items: tuple[Item, ...], item: Item) -> str:
    return rng.choice(names(items, item))


def caption_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    items = picture.items
    only = items[0] if len(items) == 1 else None
    return Turn("caption", ask(rng, CAPTION, split), caption(items), only, "phrases")


def color_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    item, by_pronoun = _choose(rng, picture, about)
    either = _two(rng, item.color, tuple(COLORS)) if rng.random() < 0.12 else {}
    if by_pronoun:
        return Turn("color", ask(rng, EITHER_IT if either else COLOR_IT, split, **either), f"It is {item.color}.", item)
    if rng.random() < 0.35 or sum(other.shape == item.shape for other in picture.items) > 1:
        return Turn(
            "color", ask(rng, COLOR_AT, split, place=at(item.place), spot=item.place), f"It is {item.color}.", item
        )
    question = ask(rng, EITHER if either else COLOR, split, name=item.shape, **either)
    return Turn("color", question, f"The {item.shape} is {item.color}.", item)


def shape_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    item, by_pronoun = _choose(rng, picture, about)
    either = _two(rng, a(item.shape), tuple(map(a, SHAPES))) if rng.random() < 0.12 else {}
    if by_pronoun:
        question = ask(rng, EITHER_IT if either else SHAPE_IT, split, **either)
        return Turn("shape", question, f"It is a {item.shape}.", item)
    if rng.random() < 0.35 or sum(other.color == item.color for other in picture.items) > 1:
        return Turn(
            "shape", ask(rng, SHAPE_AT, split, place=at(item.place), spot=item.place), f"It is a {item.shape}.", item
        )
    name = f"{item.color} {rng.choice(('shape', 'one', 'thing'))}"
    question = ask(rng, EITHER if either else SHAPE, split, color=item.color, name=name, **either)
    return Turn("shape", question, f"The {item.color} shape is a {item.shape}.", item)


def place_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    item, by_pronoun = _choose(rng, picture, about)
    if by_pronoun:
        return Turn("place", ask(rng, PLACE_IT, split), f"It is {at(item.place)}.", item)
    question = ask(rng, PLACE, split, name=any_name(rng, picture.items, item))
    return Turn("place", question, f"The {item.name} is {at(item.place)}.", item)


def size_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    item, by_pronoun = _choose(rng, picture, about)
    if by_pronoun:
        return Turn("size", ask(rng, SIZE_IT, split), f"It is {SIZE_WORDS[item.size]}.", item)
    question = ask(rng, SIZE, split, name=any_name(rng, picture.items, item))
    return Turn("size", question, f"The {item.name} is {SIZE_WORDS[item.size]}.", item)


def what_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    """What is at a place; now and then nothing is."""
    item = rng.choice(picture.items)
    empty = [p for p in ("left", "right", "center", "top", "bottom") if all(i.place != p for i in picture.items)]
    if rng.random() < 0.12 and empty:
        spot = rng.choice(empty)
        return Turn("what", ask(rng, WHAT, split, place=at(spot), spot=spot), f"There is nothing {at(spot)}.")
    answer = capital(f"{a(sized(item))} is {at(item.place)}.")
    return Turn("what", ask(rng, WHAT, split, place=at(item.place), spot=item.place), answer, item)


def background_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    assert picture.background.name in BACKGROUNDS
    return Turn("background", ask(rng, BACKGROUND, split), f"The background is {picture.background.name}.")


def _two(rng: random.Random, right: str, values: tuple[str, ...]) -> dict[str, str]:
    """The right value and a wrong one, in either order."""
    wrong = rng.choice([value for value in values if value != right])
    first, second = rng.sample((right, wrong), 2)
    return {"first": first, "second": second}


def _choose(rng: random.Random, picture: Picture, about: Item | None) -> tuple[Item, bool]:
    """An item, and whether "it" means it: the one of the turn before, or the picture's only one."""
    if about is None and len(picture.items) == 1:
        about = picture.items[0]
    if about is not None and rng.random() < 0.6:
        return about, True
    return rng.choice(picture.items), False


def _sample(turn, most: int = 5, least: int = 1):
    def sample(rng: random.Random, split: Split) -> Sample:
        picture = picture_for(rng, split, most, least)
        return conversation(rng, [turn(rng, picture, split)], [image(picture)])

    return sample


assert len(SHAPES) == 6  # the phrasings above name none
TURNS = {
    "caption": caption_turn,
    "color": color_turn,
    "shape": shape_turn,
    "place": place_turn,
    "size": size_turn,
    "what": what_turn,
    "background": background_turn,
}
SKILLS = (
    Skill("caption 1-3", _sample(caption_turn, 3)),
    Skill("caption 4-6", _sample(caption_turn, 6, 4)),
    *(Skill(name, _sample(turn)) for name, turn in TURNS.items() if name != "caption"),
)
