"""Questions and answers about scenes: every answer follows from the scene's data, word for word."""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.phrases import (
    MOTION_PHRASES,
    NO_MEDIA,
    NUMBERS,
    OFF_TOPIC,
    OFF_TOPIC_QUESTIONS,
    QUESTIONS,
    SMALL_TALK,
    SYSTEM_PROMPTS,
    TOPICS,
    WHAT,
    WHO,
)
from training.scenes import COLORS, MOTIONS, SHAPES, Clip, Item, Picture


@dataclass(frozen=True)
class Turn:
    """One question and its only right answer. `about` is the item that "it" means in the next turn."""

    skill: str
    question: str
    answer: str
    about: Item | None = None


def at(place: str) -> str:
    """'at the top left', 'on the left', 'in the center'."""
    preposition = {"left": "on the", "right": "on the", "center": "in the"}.get(place, "at the")
    return f"{preposition} {place}"


def plural(noun: str) -> str:
    """'circles', 'crosses', 'red shapes'."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def there_are(count: int, noun: str) -> str:
    """'There is one shape.', 'There are no stars.'"""
    return f"There {'is' if count == 1 else 'are'} {NUMBERS[count]} {noun if count == 1 else plural(noun)}."


def picture_caption(picture: Picture) -> str:
    """'A red circle at the top left, a blue star in the center and a green cross on the right.'"""
    parts = [f"{_a(item.color)} {item.shape} {at(item.place)}" for item in picture.items]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return text[0].upper() + text[1:] + "."


def clip_caption(clip: Clip) -> str:
    """'A red circle moves to the left.', 'A circle changes from red to blue.', 'A red circle stays still.'"""
    item = clip.start
    if clip.event == "change":
        return f"A {item.shape} changes from {item.color} to {clip.end.color}."
    verb = f"moves {MOTION_PHRASES[clip.event]}" if clip.event in MOTIONS else "stays still"
    text = f"{_a(item.color)} {item.shape} {verb}."
    return text[0].upper() + text[1:]


def picture_turn(rng: random.Random, picture: Picture, skill: str, about: Item | None = None) -> Turn | None:
    """A turn of `skill` about the picture, or None where the picture allows none (two red shapes, say).

    `about`: the item of the turn before, which "it" may mean; in a picture of one shape that is always clear.
    """
    items = picture.items
    if about is None and len(items) == 1:
        about = items[0]
    by_pronoun = about is not None and rng.random() < 0.6
    item = about if about is not None and by_pronoun else rng.choice(items)
    only_shape = sum(i.shape == item.shape for i in items) == 1
    only_color = sum(i.color == item.color for i in items) == 1
    by_place = rng.random() < 0.3

    if skill == "caption":
        return Turn(skill, _ask(rng, "caption"), picture_caption(picture), items[0] if len(items) == 1 else None)
    if skill == "count":
        return Turn(skill, _ask(rng, "count"), there_are(len(items), "shape"))
    if skill == "count_of":
        if rng.random() < 0.5:
            shape = item.shape if rng.random() < 0.8 else rng.choice(SHAPES)
            count = sum(i.shape == shape for i in items)
            return Turn(skill, _ask(rng, "count_of", plural(shape)), there_are(count, shape))
        color = item.color if rng.random() < 0.8 else rng.choice(tuple(COLORS))
        count = sum(i.color == color for i in items)
        return Turn(skill, _ask(rng, "count_color", color), there_are(count, f"{color} shape"))
    if skill == "what":
        answer = f"{_a(item.color)} {item.shape} is {at(item.place)}."
        return Turn(skill, _ask(rng, "what", at(item.place)), answer[0].upper() + answer[1:], item)
    if by_pronoun:
        answer = {"color": item.color, "shape": f"a {item.shape}", "place": at(item.place)}[skill]
        return Turn(skill, _ask(rng, f"{skill}_it"), f"It is {answer}.", item)
    if skill == "color" and by_place:
        return Turn(skill, _ask(rng, "color_at", at(item.place)), f"It is {item.color}.", item)
    if skill == "color" and only_shape:
        return Turn(skill, _ask(rng, "color", item.shape), f"The {item.shape} is {item.color}.", item)
    if skill == "shape" and by_place:
        return Turn(skill, _ask(rng, "shape_at", at(item.place)), f"It is a {item.shape}.", item)
    if skill == "shape" and only_color:
        return Turn(skill, _ask(rng, "shape", item.color), f"The {item.color} shape is a {item.shape}.", item)
    if skill == "place":
        names = [f"{item.color} {item.shape}"] + [item.shape] * only_shape + [f"{item.color} shape"] * only_color
        name = rng.choice(names)
        return Turn(skill, _ask(rng, "place", name), f"The {name} is {at(item.place)}.", item)
    return None


def clip_turn(rng: random.Random, clip: Clip, skill: str) -> Turn:
    """A turn of `skill` about the clip; "it" is always the clip's only shape."""
    item = clip.start
    change = f"It changes from {item.color} to {clip.end.color}."
    if skill == "clip":
        return Turn("change" if clip.event == "change" else skill, _ask(rng, "clip"), clip_caption(clip), item)
    if skill == "clip_shape":
        return Turn(skill, _ask(rng, skill), f"It is a {item.shape}.", item)
    if skill == "clip_color" or clip.event == "change":
        if clip.event == "change":
            kind = rng.choice(("change", "change", "clip_color"))
            return Turn("change", _ask(rng, kind, item.shape), change, item)
        return Turn(skill, _ask(rng, skill, item.shape), f"It is {item.color}.", item)
    answer = f"It moves {MOTION_PHRASES[clip.event]}." if clip.event in MOTIONS else "It does not move."
    return Turn("motion", _ask(rng, "motion", item.shape), answer, item)


def text_turn(rng: random.Random) -> Turn:
    """Small talk, a question about a picture that was never sent, or one about the rest of the world."""
    draw = rng.random()
    if draw < 0.4:
        questions, answer = rng.choice(SMALL_TALK)
        return Turn("chat", _loose(rng, rng.choice(questions)), answer)
    if draw < 0.75:
        kind = rng.choice(list(QUESTIONS))
        filler = rng.choice(("circle", "red", "star", "left", "square", "blue"))
        if kind in ("what", "color_at", "shape_at"):
            filler = at(rng.choice(("left", "top", "bottom right", "center")))
        if kind == "count_of":
            filler = plural(rng.choice(SHAPES))
        return Turn("no_media", _ask(rng, kind, filler), NO_MEDIA)
    question = rng.choice(OFF_TOPIC_QUESTIONS).format(rng.choice(TOPICS))
    return Turn("off_topic", _loose(rng, question), OFF_TOPIC)


def all_texts(rng: random.Random) -> list[str]:
    """Every phrase of this module once or more: what the tokenizer is trained on."""
    fillers = [*COLORS, *SHAPES, *(f"{c} {s}" for c in COLORS for s in SHAPES)]
    texts = [q.format(f) for group in QUESTIONS.values() for q in group for f in fillers]
    texts += [q.format(plural(s)) for q in QUESTIONS["count_of"] for s in SHAPES]
    texts += [q for questions, answer in SMALL_TALK for q in (*questions, answer)]
    texts += [q.format(t) for q in OFF_TOPIC_QUESTIONS for t in TOPICS]
    texts += [*SYSTEM_PROMPTS, WHO, WHAT, NO_MEDIA, OFF_TOPIC]
    texts += [thought(turn_skill, kind) for turn_skill in (*QUESTIONS, "chat") for kind in ("picture", "clip", "text")]
    texts += [
        f"The {c} {s} is {at(p)}." for c in COLORS for s in SHAPES for p in ("top left", "left", "bottom", "right")
    ]
    texts += [f"A {s} changes from {c} to {d}. It is {c}." for s in SHAPES for c in COLORS for d in COLORS]
    texts += [f"A {c} {s} moves {m}. It moves {m}." for c in COLORS for s in SHAPES for m in MOTION_PHRASES.values()]
    texts += [there_are(n, s) for n in range(4) for s in SHAPES]
    return [_loose(rng, text) for text in texts] + texts


def thought(skill: str, kind: str) -> str:
    """The one line that the model thinks when thinking is on; `kind` is "picture", "clip" or "text"."""
    if kind == "text":
        return "There is no picture to look at. I answer in one sentence."
    topic = {
        "color": "the color",
        "shape": "the shape",
        "place": "the place",
        "count": "the number of shapes",
    }
    topic |= {"motion": "the motion", "change": "the change of color", "clip_color": "the color"}
    topic |= {"clip_shape": "the shape", "count_of": "the number of shapes"}
    return f"The user asks about {topic.get(skill, f'the {kind}')}. I look at the {kind}."


def _ask(rng: random.Random, kind: str, filler: str = "") -> str:
    return _loose(rng, rng.choice(QUESTIONS[kind]).format(filler))


def _loose(rng: random.Random, text: str) -> str:
    """The text as people type it: sometimes without capital, without its last mark, or with a 'please'."""
    draw = rng.random()
    if draw < 0.6:
        return text
    if draw < 0.7:
        return text.rstrip(".?!")
    if draw < 0.8:
        return text[0].lower() + text[1:]
    if draw < 0.95:
        return (text[0].lower() + text[1:]).rstrip(".?!")
    return f"Please: {text[0].lower()}{text[1:]}" if draw < 0.97 else f"{text[:-1]}, please{text[-1]}"


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
