"""What is asked was told once, and only once; held-out values are never a fact's in training."""

from __future__ import annotations

import random
import re

import pytest

from qwen35mm.evaluation.skills import recall
from qwen35mm.evaluation.skills.base import Sample
from qwen35mm.evaluation.skills.recall import NOT_TOLD
from training.data import Encoder, Example
from training.mixture import realized
from training.phases import PHASES

pytestmark = pytest.mark.usefixtures("plainly")
# Words that stand in questions or answers, and tell no fact from another.
_COMMON = """
    a again also an and are at best by call called can city code color colour could day did dish do does eat enjoy
    favorite favourite fav fond food for forgot from give has have home how i in is it its key like likes live lives
    living love loves me most my name named need number of on password please prefer remember remind say tell that
    the there they to was what when where which who whose with world you your"""
COMMON = set(_COMMON.split())


def _words(text: str) -> set[str]:
    return {word.removesuffix("'s") for word in re.findall(r"[a-z0-9']+", text.lower())}


def content(text: str) -> set[str]:
    return _words(text) - COMMON


def told(sample: Sample) -> list[str]:
    """The statements, one sentence each."""
    before = [m["content"] for m, reply in zip(sample.messages, sample.messages[1:], strict=False)
              if m["role"] == "user" and reply["content"] == "OK."]  # fmt: skip
    return [sentence for text in before for sentence in re.split(r"(?<=[.:]) +", text)]


@pytest.mark.parametrize("split", ["train", "seen"])
def test_answers_stand_in_one_statement_alone(split) -> None:
    rng = random.Random(split)
    unknown = 0
    for index in range(150):
        sample = recall.sample_with(rng, split, rng.randint(1, 30), spread=index % 2 == 0)
        statements = told(sample)
        for question, answer in zip(sample.messages, sample.messages[1:], strict=False):
            if question["role"] != "user" or answer["content"] == "OK.":
                continue
            asked = content(question["content"])
            if answer["content"] == NOT_TOLD:
                unknown += 1
                kind = {w for w in ("password", "key number", "code") if w in question["content"].lower()}
                assert not [
                    each
                    for each in statements
                    if asked <= content(each)
                    and all(w in each.lower() for w in kind)
                    and _same_kind(question["content"], each)
                    and ("my" in _words(question["content"])) == ("my" in _words(each))
                ], question["content"]
                continue
            wanted = content(answer["content"])
            own = "your" in _words(answer["content"])
            holding = {each for each in statements if wanted <= content(each) and own == ("my" in _words(each))}
            # "The key number of room 5" and "the code of room 5" have the same words, and other numbers.
            assert len(holding) == 1, (answer, holding)
            (statement,) = holding
            assert asked <= wanted | content(statement)
    assert unknown > 5


def _same_kind(question: str, statement: str) -> bool:
    """Whether a person is asked for by what the statement tells: where, what is liked, when."""
    kinds = (
        "live|living|from|city|home",
        "like|food|fond|dish|love|enjoy|prefer|eat",
        "when|day|meeting",
        "code|key number|password",
        "call|name",
        "colou?r",
    )
    return any(re.search(kind, question.lower()) and re.search(kind, statement.lower()) for kind in kinds)


def test_thirty_facts_have_thirty_keys() -> None:
    for seed in range(20):
        facts = recall.facts(random.Random(seed), "train", 30)
        assert len({fact.key for fact in facts}) == 30
        assert len({fact.answer.split(" is ")[0] for fact in facts if " is " in fact.answer}) > 5


def test_held_out_values_are_no_facts_of_training() -> None:
    rng = random.Random(0)
    training = {fact.answer.rstrip(".").split()[-1] for fact in recall.facts(rng, "train", 250)}
    for names in (recall._PEOPLE, recall._CITIES, recall._FOODS):
        held_out = set(names[len(names) * 4 // 5 :])
        assert not training & held_out
        assert training & set(names)
    evaluated = {fact.answer.rstrip(".").split()[-1] for fact in recall.facts(rng, "combos", 100)}
    assert evaluated & set(recall._PEOPLE[44:])
    assert not evaluated & set(recall._PEOPLE[:44])


@pytest.mark.parametrize("count", [1, 10, 30])
def test_the_evaluation_asks_one_question_about_so_many_facts(count: int) -> None:
    skill = next(skill for skill in recall.SKILLS if skill.name == f"recall {count}")
    for index in range(10):
        asked = skill.sample(random.Random(index), "seen").skills
        assert (asked.count("recall"), asked.count("not told"), asked[-1]) == (1, 0, "recall")
    sample = skill.sample(random.Random(0), "seen")
    statements = [each for each in told(sample) if content(each) - {"facts", "some", "this", "these", "here"}]
    assert count <= len([each for each in statements if each.endswith(".")]) <= count + 2


def test_the_evaluation_asks_one_question_about_what_was_not_told() -> None:
    skill = next(skill for skill in recall.SKILLS if skill.name == "not told")
    for index in range(20):
        sample = skill.sample(random.Random(index), "seen")
        assert [each for each in sample.skills if each != "noted"] == ["not told"]
        assert sample.messages[-1]["content"] == NOT_TOLD


def test_more_than_half_of_what_was_not_told_was_nearly_told() -> None:
    """ "Your dog is called Rex. What is the name of my cat?" is harder than a question about somebody unheard of."""
    near, count = 0, 200
    for seed in range(count):
        rng = random.Random(seed)
        told = recall.facts(rng, "train", 4)
        unknown = recall._untold(rng, "train", told)
        assert unknown.key not in {fact.key for fact in told}
        said = {word for fact in told for word in fact.key.split()} - {"my"}
        near += bool(said & set(unknown.key.split()))
    assert count // 2 <= near < 0.95 * count


def test_a_share_of_the_questions_is_about_what_was_not_told() -> None:
    asked = [s for i in range(60) for s in recall.sample_with(random.Random(i), "train", 6, False, not_told=0.5).skills]
    share = asked.count("not told") / (asked.count("not told") + asked.count("recall"))
    assert 0.4 < share < 0.6
    assert "not told" not in recall.sample_with(random.Random(0), "train", 30, False, not_told=0.0).skills


def test_rows_hold_what_was_told_far_before(encoder: Encoder) -> None:
    """Between what is told and what is asked lie other turns, of pictures too, for up to two thousand tokens."""
    rng = random.Random(0)
    lengths, distances = [], []
    for num_facts in (1, 10, 30) * 12:
        sample = recall.sample_with(rng, "seen", num_facts, True, between=recall.far(rng, num_facts))
        texts = [m["content"] if isinstance(m["content"], str) else "a picture" for m in sample.messages]
        last = max(i for i, text in enumerate(texts) if text == "OK.")
        asked = next(i for i, skill in enumerate(sample.skills) if skill in ("recall", "not told"))
        assert len(sample.skills) == len(texts) // 2
        assert 2 * asked >= last  # nothing is asked before all is told
        example = realized(sample)
        lengths.append(len(encoder.encode(example).ids))
        rest = Example(sample.messages[last + 1 :], sample.skills[last // 2 + 1 :], example.media)
        distances.append(len(encoder.encode(rest).ids))
    assert max(lengths) <= max(phase.most_tokens for phase in PHASES)
    assert 1700 < max(distances) <= 2100
