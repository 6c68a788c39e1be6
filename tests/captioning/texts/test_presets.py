from __future__ import annotations

import re

import pytest

from qwen35mm.captioning.texts.presets import PRESETS
from qwen35mm.captioning.texts.prompts import PromptSet, preset_question
from qwen35mm.errors import CaptioningError


def test_the_presets_are_the_promised_ones() -> None:
    assert list(PRESETS) == ["short", "detailed", "tags", "alt-text", "ocr", "events", "plain"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_asked_and_names_its_kind_of_medium(name: str) -> None:
    preset = PRESETS[name]
    assert preset.name == name
    assert PromptSet([preset_question(name, 2.0)]).needs() == frozenset()
    assert re.search("image|picture", preset.text("image"))
    assert "video" not in preset.text("image")
    assert "video" in preset.text("video")
    assert "  " not in preset.image + preset.video


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(CaptioningError, match=r"'tgas'.*short, detailed, tags"):
        preset_question("tgas")
