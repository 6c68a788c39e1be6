"""What a batch is drawn from: the same batch for the same seed, phase and number, whoever draws it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qwen35mm.evaluation import scenes, words
from qwen35mm.evaluation.drawing import NUM_FONTS
from qwen35mm.evaluation.scenes import Picture, Unknown
from qwen35mm.evaluation.skills import (
    asking,
    chat,
    clips,
    declining,
    describing,
    followups,
    pictures,
    reading,
    recall,
    relations,
    structured,
    tools,
    two_counts,
)
from qwen35mm.evaluation.skills.base import Sample, Turn, alike, conversation, image, video
from training.data import SPELLED, Encoded, Encoder, Example, call_text, collate
from training.fast import GAP
from training.media import Media, clip_media, picture_media, random_timing, vision_batch
from training.phases import Phase

_VISION_TOKENS = 1400  # merged tokens of a vision batch
_FULL = 4  # examples in turn that fit into no row: then the rows are full
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be concise.",
    "You answer questions about pictures and videos.",
    "Answer in one sentence.",
    "You are a friendly assistant for pictures.",
)
Asked = tuple[tuple[Callable[..., Turn | None], int], ...]
# How often each is asked about a picture: what has more to learn comes more often.
PICTURE_TURNS: Asked = (
    (describing.caption_turn, 7), (describing.color_turn, 3), (describing.shape_turn, 3), (describing.place_turn, 4),
    (describing.size_turn, 2), (describing.what_turn, 4), (describing.background_turn, 1), (asking.yes_no_turn, 9),
    (asking.count_turn, 6), (relations.relation_turn, 8), (relations.extreme_turn, 2), (structured.box_turn, 2),
    (structured.point_turn, 1), (structured.json_turn, 2), (declining.beyond_turn, 4), (two_counts.two_counts_turn, 2),
)  # fmt: skip
# What an answer takes one look for: it is learned first, and nothing else before it.
SIMPLE_TURNS: Asked = (
    (describing.caption_turn, 4), (describing.color_turn, 5), (describing.shape_turn, 5), (describing.place_turn, 5),
    (describing.size_turn, 2), (describing.what_turn, 4), (describing.background_turn, 2), (asking.yes_no_turn, 8),
    (asking.count_turn, 5),
)  # fmt: skip
PLACING_TURNS: Asked = (
    (describing.place_turn, 4), (asking.count_turn, 4), (relations.relation_turn, 8), (relations.extreme_turn, 2),
    (describing.what_turn, 2),
)  # fmt: skip
BOX_TURNS: Asked = ((structured.box_turn, 5), (structured.point_turn, 2))
CLIP_TURNS = {"clip caption": 5, "motion": 3, "change": 5, "when": 4, "clip color": 2, "clip shape": 2, "others": 3}
EVENT_TURNS = {"when": 6, "change": 2, "clip caption": 2}


def draw(rngs: list[random.Random], encoder: Encoder, phase: Phase, done: float) -> dict[str, Any]:
    """Parts of a step as one batch, each from its own generator, when the fraction `done` of the phase is over."""
    done = phase.begins + (phase.ends - phase.begins) * done
    if not phase.parts:
        return vision_batch([medium for rng in rngs for medium in _vision(rng, done, phase.least_tokens)])
    return collate(encoder, [row for rng in rngs for row in _rows(rng, encoder, phase, done)], phase.most_tokens)


def _rows(rng: random.Random, encoder: Encoder, phase: Phase, done: float) -> list[list[Encoded]]:
    """A part's rows, as full as they get."""
    names, weights = tuple(phase.parts), tuple(phase.parts.values())
    rows: list[list[Encoded]] = [[] for _ in range(phase.rows)]
    room = [phase.most_tokens] * phase.rows
    misses = 0
    while misses < _FULL:
        sample = PARTS[rng.choices(names, weights)[0]](rng, done)
        encoded = encoder.encode(realized(sample, phase.least_tokens))
        if len(encoded.ids) > phase.most_tokens:
            raise ValueError(
                f"A conversation about {sample.skill!r} has {len(encoded.ids)} tokens, and rows of the phase "
                f"{phase.name!r} have {phase.most_tokens}: give it longer rows (most_tokens), or tell it less."
            )
        fitting = [i for i, left in enumerate(room) if left >= len(encoded.ids)]
        if not fitting:
            misses += 1
            continue
        row = min(fitting, key=lambda i: room[i])  # where the least is left
        rows[row].append(encoded)
        room[row] -= len(encoded.ids) + GAP
    return rows


def texts(seed: int, count: int = 6000) -> list[str]:
    """What a tokenizer is trained on: the texts of `count` conversations, without the template around them."""
    rng = random.Random(f"{seed}/texts")
    found: list[str] = []
    for index in range(count):
        sample = PARTS[rng.choice(tuple(PARTS))](rng, index / count)
        for message in sample.messages:
            content = message["content"]
            found += [content] if isinstance(content, str) else [p["text"] for p in content if p["type"] == "text"]
            found += [call_text(call["function"]) for call in message.get("tool_calls", ())]
        found += [json.dumps(sample.tools)] * (sample.tools is not None) + [sample.thought or ""]
    # What is spelled needs no tokens.
    return [SPELLED.sub("", text) for text in found]


def realized(sample: Sample, least_tokens: int | None = None) -> Example:
    """The sample with its scenes drawn; `least_tokens` of a picture, where it isn't the processor's own limit."""
    media: list[Media] = []
    messages = []
    for message in sample.messages:
        content = message["content"]
        if not isinstance(content, str):
            parts = []
            for part in content:
                if part["type"] == "image":
                    media.append(picture_media(part["image"], least_tokens))
                if part["type"] == "video":
                    media.append(clip_media(part["video"].clip, part["video"].times_s))
                parts.append({"type": part["type"]} if part["type"] != "text" else part)
            message = message | {"content": parts}
        messages.append(message)
    return Example(messages, sample.skills, media, sample.thought, sample.tools)


def picture_turns(rng: random.Random, picture: Picture, count: int, asked: Asked = PICTURE_TURNS) -> list[Turn]:
    """Up to `count` questions about one picture; "it" is what the one before was about.

    Each has another answer: one that was given before teaches to copy, and not to look.
    """
    turns: list[Turn] = []
    functions, weights = zip(*asked, strict=True)
    for _ in range(20 * count):
        turn = rng.choices(functions, weights)[0](rng, picture, "train", turns[-1].about if turns else None)
        if turn is not None and turn.answer not in [each.answer for each in turns]:
            turns.append(turn)
        if len(turns) == count:
            break
    return turns


def _picture(rng: random.Random, done: float) -> Sample:
    """Up to seven questions about a picture, which gets fuller and larger, and they harder, by the middle."""
    most = 1 + round(5 * min(1.0, 2 * done))
    number = rng.choices(range(1, most + 1), (5, 5, 6, 5, 4, 2)[:most])[0]
    picture = scenes.random_picture(rng, _size(rng, done), number, unique=rng.random() < 0.3)
    asked = SIMPLE_TURNS if rng.random() > 2 * done else PICTURE_TURNS
    turns = [_loud(turn) for turn in picture_turns(rng, picture, rng.randint(2, 7), asked)]
    return _opened(rng, turns, [image(picture)])


def _about(numbers: tuple[int, ...], asked: Asked) -> Callable[[random.Random, float], Sample]:
    """Questions of a few kinds about small pictures: what they take forms where little else is asked."""

    def part(rng: random.Random, done: float) -> Sample:
        size = scenes.random_size(rng, largest=224)
        picture = scenes.random_picture(rng, size, rng.choice(numbers), unique=rng.random() < 0.5)
        turns = picture_turns(rng, picture, rng.randint(3, 6), asked)
        return _opened(rng, [_loud(turn) for turn in turns], [image(picture)])

    return part


def _thinking(rng: random.Random, done: float) -> Sample:
    """Thinking counts one by one, at first few shapes in small pictures, by the middle up to six in any.

    Other questions, without a picture too, are answered after a short thought.
    """
    if rng.random() < 0.2:
        asked = rng.choice((chat.chat_turn, chat.no_media_turn, chat.off_topic_turn))(rng, "train")
        thought = Turn(asked.skill, asked.question, asked.answer, thought="There is no picture to look at.")
        return conversation(rng, [thought], [], _system(rng))
    picture = _alike(rng, done)
    turns = picture_turns(rng, picture, rng.randint(0, round(2 * min(1.0, 2 * done))))
    last = asking.count_turn(rng, picture, "train")
    if rng.random() < 0.15:
        last = picture_turns(rng, picture, 1)[0]
        last = Turn(last.skill, last.question, last.answer, last.about, last.grade, "I look at the picture.")
    return _opened(rng, [*map(_loud, turns), last], [image(picture)])


def _counts(rng: random.Random, done: float) -> Sample:
    """The caption, and how many there are of this and that, which can be counted in its words."""
    picture = _alike(rng, done)
    counted = picture_turns(rng, picture, rng.randint(2, 5), ((asking.count_turn, 1),))
    turns = [describing.caption_turn(rng, picture, "train"), *counted]
    return _opened(rng, [_loud(turn) for turn in turns], [image(picture)])


def _two_counts(rng: random.Random, done: float) -> Sample:
    """What takes two counts, without thinking more often than with it, and counts beside it."""
    picture = _alike(rng, done)
    turns = picture_turns(rng, picture, rng.randint(1, 4), ((two_counts.two_counts_turn, 3), (asking.count_turn, 1)))
    last = two_counts.two_counts_turn(rng, picture, "train")
    if rng.random() < 0.4:
        return _opened(rng, [_loud(turn) for turn in [*turns, last]], [image(picture)])
    return _opened(rng, [*map(_loud, turns[:-1]), replace(last, skill="two counts, thinking")], [image(picture)])


def _alike(rng: random.Random, done: float) -> Picture:
    """Two shapes to six, half of the time with many of one colour or kind."""
    size, number = _size(rng, done), rng.randint(2, 2 + round(4 * min(1.0, 2 * done)))
    return alike([scenes.random_picture(rng, size, number) for _ in range(rng.choice((1, 12)))])


def _sign(rng: random.Random, done: float) -> Sample:
    """What signs say; words grow to eight letters, and signs to any size, by the middle."""
    sign = reading.random_sign(rng, "train", 2 + round(6 * min(1.0, 2 * done)), size=_size(rng, done))
    turns: list[Turn] = [reading.read_turn(rng, sign, "train")]
    for turn in (reading.text_color_turn, reading.num_words_turn, describing.background_turn):
        found = turn(rng, sign, "train") if rng.random() < 0.25 else None
        if found is not None:
            turns.insert(rng.randint(0, len(turns)), found)
    return _opened(rng, turns, [image(sign)])


def _clips(asked: dict[str, int], events: tuple[str, ...] | None = None) -> Callable[[random.Random, float], Sample]:
    """Questions about clips of one of these events, or of any."""
    names, weights = tuple(asked), tuple(asked.values())

    def part(rng: random.Random, done: float) -> Sample:
        event = rng.choice(events) if events else None
        shown = clips.random_shown(rng, "train", event, rng.choice((6, 8, 12, 16, 32, 32)))
        turns: list[Turn] = []
        for name in rng.choices(names, weights, k=20):
            turn = clips.clip_turn(rng, shown, "train", name)
            if turn is not None and turn.answer not in [each.answer for each in turns]:
                turns.append(turn)
        return _opened(rng, turns[: rng.randint(2, 5)], [video(shown)])

    return part


def _pictures(rng: random.Random, done: float) -> Sample:
    """Two small pictures at first, up to four by the middle: which is which is learned on few tokens."""
    few = min(1.0, 2 * done)
    several = pictures.some_pictures(rng, "train", 2 + round(2 * few), round(128 + 132 * few))
    turns = [pictures.pictures_turn(rng, several, "train") for _ in range(rng.randint(1, 4))]
    # Of each picture a description once: a second one would be copied.
    described = {turn.answer: turn for turn in turns if turn.skill == "nth picture"}
    turns = [turn for turn in turns if described.get(turn.answer, turn) is turn]
    return conversation(rng, turns, [image(each) for each in several])


def _difference(rng: random.Random, done: float) -> Sample:
    """One shape in small pictures at first, up to three by the middle."""
    few = min(1.0, 2 * done)
    two, turn = pictures.difference_turn(rng, "train", 1 + round(2 * few), round(128 + 172 * few))
    turns = [turn, *(pictures.pictures_turn(rng, two, "train") for _ in range(rng.randint(0, 1)))]
    return conversation(rng, [t for t in turns if t.skill != "which picture"], [image(each) for each in two])


def _second(rng: random.Random, done: float) -> Sample:
    """A second picture, sign or clip is sent in a later turn; the questions are about the newest."""
    first, then = _picture(rng, 0.1), rng.choice((_picture, _picture, _sign, PARTS["clip"]))(rng, 0.1)
    kept = [message for message in then.messages if message["role"] != "system"]
    return Sample(then.skill, first.messages + kept, first.skills + then.skills, then.grade)


def _unknown(rng: random.Random, done: float) -> Sample:
    unknown = declining.random_unknown(rng, "train")
    return conversation(rng, [declining.unknown_turn(rng, "train") for _ in range(rng.randint(1, 2))], [image(unknown)])


def _chat(rng: random.Random, done: float) -> Sample:
    kinds = (chat.chat_turn, chat.chat_turn, chat.no_media_turn, chat.off_topic_turn)
    turns = [rng.choice(kinds)(rng, "train") for _ in range(rng.randint(1, 4))]
    return conversation(rng, turns, [], _system(rng))


def _repeat(rng: random.Random, done: float) -> Sample:
    turns = [chat.repeat_turn(rng, "train") for _ in range(rng.randint(2, 6))]
    return conversation(rng, turns, [], _system(rng))


def _recall(rng: random.Random, done: float) -> Sample:
    """Facts told and asked for; their number grows to thirty, slowly at first: to look them up is learned on few."""
    most = 2 + round(28 * done**2)
    num_facts = rng.randint(1, most)
    between = recall.far(rng, num_facts) if rng.random() < 0.4 * done else 0
    return recall.sample_with(rng, "train", num_facts, rng.random() < 0.4, between=between)


def _told(rng: random.Random, done: float) -> Sample:
    """Facts, few at first, and questions half of which nobody has told the answer to."""
    num_facts = rng.randint(2, 4 + round(12 * done))
    return recall.sample_with(rng, "train", num_facts, rng.random() < 0.4, not_told=0.5)


def _recall_picture(rng: random.Random, done: float) -> Sample:
    """Facts, then a picture and questions about both."""
    told = recall.facts(rng, "train", rng.randint(1, 6))
    before = [Turn("small talk", fact.statement, "OK.") for fact in told]
    picture = scenes.random_picture(rng, scenes.random_size(rng, largest=256), rng.randint(1, 3))
    turns = [_loud(turn) for turn in picture_turns(rng, picture, rng.randint(1, 3))]
    for fact in rng.sample(told, min(len(told), 2)):
        turns.append(Turn("recall", fact.question(rng, "train"), fact.answer))
    return conversation(rng, turns, [image(picture)], before=before)


def _tools(rng: random.Random, done: float) -> Sample:
    return rng.choice([skill.sample for skill in tools.SKILLS])(rng, "train")


PARTS: dict[str, Callable[[random.Random, float], Sample]] = {
    "picture": _picture,
    "plain": _about((1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5), SIMPLE_TURNS),
    "verdict": _about((1, 2, 3), ((asking.yes_no_turn, 1),)),
    # Beside signs, which are asked the same: a square alone was read as a letter.
    "lone": _about((1,), ((describing.caption_turn, 1),)),
    "relation": _about((2, 2, 3, 3, 4, 5), PLACING_TURNS),
    "box": _about((1, 1, 2, 3), BOX_TURNS),
    "thinking": _thinking,
    "counts": _counts,
    "two counts": _two_counts,
    "sign": _sign,
    "clip": _clips(CLIP_TURNS),
    "event": _clips(EVENT_TURNS, ("appear", "vanish", "change")),
    "pictures": _pictures,
    "difference": _difference,
    "second": _second,
    "unknown": _unknown,
    "chat": _chat,
    "repeat": _repeat,
    "recall": _recall,
    "told": _told,
    "recall picture": _recall_picture,
    "tools": _tools,
    "again": lambda rng, done: followups.again_sample(rng, "train"),
}


def _size(rng: random.Random, done: float) -> tuple[int, int]:
    """Small at first, of any size from the middle on: many small pictures teach more in the same time."""
    return scenes.random_size(rng, largest=None if done > 0.5 else 128 + 384 * done)


def _opened(rng: random.Random, turns: list[Turn], media: list[dict[str, Any]]) -> Sample:
    """The turns as a conversation; now and then after a system prompt, or after small talk."""
    before = [chat.chat_turn(rng, "train")] if rng.random() < 0.06 else None
    if rng.random() < 0.12:
        turns = [*turns, chat.chat_turn(rng, "train")]
    return conversation(rng, turns, media, _system(rng), before)


def _system(rng: random.Random) -> str | None:
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.08 else None


def _loud(turn: Turn) -> Turn:
    """The turn without its thought: thinking is off."""
    return replace(turn, thought=None)


def _vision(rng: random.Random, done: float, least_tokens: int | None) -> list[Media]:
    """A part for the vision tower alone; pictures get fuller and words longer while `done` goes from 0 to 1."""
    media: list[Media] = []
    num_tokens = 0
    while num_tokens < _VISION_TOKENS:
        medium = _vision_medium(rng, done, least_tokens)
        media.append(medium)
        num_tokens += len(medium.targets)
    media.sort(key=lambda medium: medium.tokens_per_span)  # spans of one length share an attention
    return media


def _vision_medium(rng: random.Random, done: float, least_tokens: int | None) -> Media:
    # Large pictures come last: many small ones teach more in the same time.
    size = scenes.random_size(rng, largest=176 if done < 0.7 else None)
    chosen = rng.random()
    if chosen < 0.4:
        picture = scenes.random_picture(rng, size, rng.randint(1, 2 + round(4 * min(1.0, 3 * done))))
        return picture_media(picture, least_tokens)
    if chosen < 0.86:
        most = 2 + round(6 * min(1.0, 3 * done))
        return picture_media(scenes.random_sign(rng, size, words.random_words(rng, most), NUM_FONTS), least_tokens)
    if chosen < 0.94:
        duration, times = random_timing(rng, 8, 12.0)
        return clip_media(scenes.random_clip(rng, size, duration_s=duration), times)
    unknown = Unknown(*size, rng.choice(("photo", "photo", "page", "noise")), rng.randrange(2**31))
    return picture_media(unknown, least_tokens)
