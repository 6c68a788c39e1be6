"""Colours of code: each can be read on the page's surfaces, light and dark, and each rule names a class there is."""

from __future__ import annotations

import re

import pytest
from pygments.token import STANDARD_TYPES

from qwen35mm.assets import asset_path
from tests.web.rendering.contrast import contrast

CSS = asset_path("web/styles/code.css").read_text("utf-8")
PAGE = asset_path("web/styles/base.css").read_text("utf-8")
COLOUR = re.compile(r"([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);")


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_colour_can_be_read(theme: int) -> None:
    page = {name: colours[theme] for name, *colours in COLOUR.findall(PAGE)}
    colours = [each[theme] for _, *each in COLOUR.findall(CSS)]
    assert len(set(colours)) == 8
    for colour in colours:
        for surface in ("--ground", "--surface", "--raised"):
            assert contrast(colour, page[surface]) >= 4.5, (colour, surface)


def test_contrast_is_reckoned_as_wcag_does() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_each_rule_names_a_class_there_is() -> None:
    known = set(STANDARD_TYPES.values())
    assert set(re.findall(r"\.hl-(\w+)", CSS)) <= known
    for beginning in re.findall(r'\^="hl-(\w+)"', CSS):
        assert any(name.startswith(beginning) for name in known)
