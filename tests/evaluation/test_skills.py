"""Questions about the bundled model's world, and what is said of the answers."""

from __future__ import annotations

import math
from dataclasses import astuple
from pathlib import Path

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.errors import ConfigError
from qwen35mm.evaluation import skills
from qwen35mm.evaluation.compare import compare
from qwen35mm.evaluation.passages import hidden_states
from qwen35mm.evaluation.skills import Accuracy, SkillTest
from qwen35mm.model import LoadedModel


def test_standard_errors() -> None:
    # Of four questions one was lost and none won: steps of 0, 0, 0 and -1.
    found = Accuracy.of([True, False, True, False], [True, True, True, False])
    assert astuple(found) == pytest.approx((4, 50, 25, -25, 100 * math.sqrt(1 / 4 - 1 / 16) / 2))
    assert astuple(Accuracy.of([True, True], [True, True])) == (2, 100, 0, 0, 0)


def test_right_answers_are_foretold_after_their_questions(demo: LoadedModel) -> None:
    test = SkillTest(1)
    assert len(set(test.skills)) == len(test.skills) == 20
    found = test.passages(demo)
    answers = [demo.tokenizer.decode(each.targets.tolist()).strip() for each in found]
    assert answers == test._answers
    # What the model answers by itself is what it holds for likeliest here: both ways see the same pictures.
    right = test.run(demo)
    assert sum(right) >= 17
    for passage, hidden, is_right in zip(found, hidden_states(demo, found), right, strict=True):
        likeliest = demo.model.logits(hidden).argmax(dim=-1)
        assert bool((likeliest == passage.targets).all()) or not is_right


def test_without_a_checkout_there_are_no_questions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(skills, "_CHECKOUT", tmp_path)
    with pytest.raises(ConfigError, match="--questions 0"):
        SkillTest(1)


@pytest.mark.slow
def test_eight_bits_cost_no_skill() -> None:
    reference, eight, four = compare(demo_model_path(), ["int8", "int4"], num_questions=20)
    assert reference.accuracy is not None
    for result in (eight, four):
        assert result.accuracy is not None
        assert abs(result.accuracy.change) <= reference.accuracy.error
        for skill, found in result.skills.items():
            # One question of twenty, where the reference has no wrong answer to tell a standard error from.
            assert abs(found.change) <= max(reference.skills[skill].error, 5.0), skill
    assert eight.divergence.kl_mean < 0.0005
    assert eight.divergence.kl_mean < four.divergence.kl_mean < 0.005
    assert eight.num_bytes < reference.num_bytes
