"""The grammar: choices, slots, slips; and what is held out of training."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from qwen35mm.evaluation import language
from qwen35mm.evaluation.language import a, ask, filled, listed, loosened, plural, slipped, split_templates, there_are
from qwen35mm.evaluation.skills import (
    SKILLS,
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
from training import mixture
from training.data import plain

MODULES = (asking, chat, clips, declining, describing, followups, pictures, reading, relations, structured, two_counts)


def templates() -> Iterator[Sequence[str]]:
    """Every tuple of ways to ask one thing."""
    for module in MODULES:
        for name, value in vars(module).items():
            is_asked = name.isupper() and name not in ("ORDINALS", "_PLACES", "_THINGS")
            if is_asked and isinstance(value, tuple) and all(isinstance(each, str) and " " in each for each in value):
                yield value
    yield chat._OFF_TOPIC
    for questions, _ in chat._SMALL_TALK:
        yield questions
    for tool in tools._TOOLS:
        yield tool.questions


def pattern(template: str) -> re.Pattern[str]:
    """What a template's questions look like, before they are loosened."""
    for relation in relations.RELATIONS:
        template = template.replace("{relation}", relation.asked) if "{relation}" in template else template
    parts = []
    for piece in re.split(r"(\{\w+\}|\[[^\[\]]*\])", template):
        if piece.startswith("{"):
            parts.append(r"\d+" if piece in ("{a}", "{b}", "{number}") else r"\w[\w' -]*")
        elif piece.startswith("["):
            parts.append(f"(?:{'|'.join(map(re.escape, piece[1:-1].split('|')))})")
        else:
            parts.append(re.escape(piece))
    return re.compile("".join(parts).replace(r"\ ", " *"), re.IGNORECASE)


def words(template: str) -> set[str]:
    return {*re.findall(r"[a-z']+", re.sub(r"\{\w+\}", " ", template).lower())}


def questions(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        if message["role"] == "user":
            content = message["content"]
            parts = [content] if isinstance(content, str) else [p["text"] for p in content if p["type"] == "text"]
            yield from map(plain, parts)


def test_choices_are_made_and_slots_filled() -> None:
    rng = random.Random(0)
    found = {filled(rng, "[what|which [small|big]] {noun} [is it|]?", noun="shape") for _ in range(200)}
    assert found == {f"{w} shape{e}?" for w in ("What", "Which small", "Which big") for e in (" is it", "")}


def test_the_words_of_answers() -> None:
    assert [a("orange star"), a("red star")] == ["an orange star", "a red star"]
    assert [plural("cross"), plural("star")] == ["crosses", "stars"]
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a, b", "a, b, c"]
    assert [there_are(n, "cross") for n in (0, 1, 2)] == [
        "There are no crosses.", "There is one cross.", "There are two crosses.",
    ]  # fmt: skip


def test_questions_are_loosened_in_thousands_of_ways() -> None:
    rng = random.Random(0)
    texts = {loosened(rng, "What is the color of the square?") for _ in range(3000)}
    assert len(texts) > 200
    shouted, typed = "WHAT IS THE COLOR OF THE SQUARE?", "what is the color of the square"
    assert {"What's the color of the square?", shouted, typed} <= texts
    assert all(text and text == text.strip() for text in texts)
    # A slip leaves all words but one.
    for _ in range(300):
        question = "where is the purple triangle in this picture"
        pairs = zip(slipped(rng, question).split(), question.split(), strict=True)
        assert sum(slip != word for slip, word in pairs) <= 1


def test_what_is_copied_stays_as_it_is_however_hurried_the_question() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        assert re.search(r"\b0\W*$", loosened(rng, "Repeat after me: 0."))  # what stands for the words
        assert re.match(r"0\. \w", loosened(rng, "0. Say that."))
        asked = loosened(rng, "What is the weather in Willow And Are?").lower()
        assert re.search(r"willow and are\b", asked), asked
        # Of a number no other one is made.
        assert {*re.findall(r"\b(?:\d+|two|three|four|five)\b", loosened(rng, "Are there four?").lower())} <= {
            "four",
            "4",
        }
    first, second = ([loosened(random.Random(seed), "Where is it?") for seed in range(200)] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("count", "held_out"), [(1, 0), (3, 0), (4, 1), (5, 1), (9, 1), (10, 2), (17, 3)])
def test_one_in_five_templates_is_held_out(count: int, held_out: int) -> None:
    names = [str(i) for i in range(count)]
    train, evaluated = split_templates(names, "train"), split_templates(names, "combos")
    assert len(train) == count - held_out
    assert list(evaluated) == (names[count - held_out :] if held_out else names)
    assert split_templates(names, "seen") == evaluated


def test_training_asks_in_no_held_out_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "loosened", lambda rng, text: text)
    held_out = {
        template: pattern(template)
        for each in templates()
        if len(each) >= 4
        for template in split_templates(each, "combos")
        if template not in split_templates(each, "train")
    }
    assert len(held_out) > 50
    rng = random.Random(0)
    samples = (part(rng, (i % 10) / 10) for part in mixture.PARTS.values() for i in range(250))
    asked = {question for sample in samples for question in questions(sample.messages)}
    assert len(asked) > 3000
    # Of any skill: a question about a clip is no new one where pictures are asked so.
    broken = {t: next(q for q in asked if p.fullmatch(q)) for t, p in held_out.items() if any(map(p.fullmatch, asked))}
    assert broken == {}


def test_no_held_out_way_has_a_word_of_its_own() -> None:
    ways = [each for each in templates() if len(each) >= 4]
    trained = {word for each in ways for template in split_templates(each, "train") for word in words(template)}
    foreign = {t: words(t) - trained for each in ways for t in split_templates(each, "combos") if words(t) - trained}
    assert foreign == {}


@pytest.mark.parametrize("name", [name for name in SKILLS if name not in ("off topic", "beyond", "follow-up")])
def test_the_evaluation_asks_in_held_out_ways_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def watched(rng: random.Random, ways: Sequence[str], split: Any, **slots: object) -> str:
        asked.append(split_templates(ways, split))
        assert split != "train"
        assert len(ways) < 4 or len(asked[-1]) <= len(ways) / 4
        return ask(rng, ways, split, **slots)

    for module in (*MODULES, recall, tools):
        monkeypatch.setattr(module, "ask", watched)
    for split in ("seen", "combos"):
        SKILLS[name].sample(random.Random(name), split)  # type: ignore[arg-type]
    assert asked
