"""Scenes are reproducible, drawn where they say, and held-out combinations show in "combos" only."""

from __future__ import annotations

import importlib
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from qwen35mm.errors import ConfigError
from qwen35mm.evaluation import drawing, scenes
from qwen35mm.evaluation.drawing import render_clip, render_picture
from qwen35mm.evaluation.scenes import (
    ALL_PLACES,
    BACKGROUNDS,
    COLORS,
    EVENTS,
    MOTIONS,
    SHAPES,
    Background,
    Picture,
    Split,
    Word,
    is_held_out,
    random_clip,
    random_picture,
)

SIZE = (160, 120)
SPLITS: list[tuple[Split, bool]] = [("seen", False), ("combos", True)]
PLAIN = Background("white", (255, 255, 255), (255, 255, 255), "plain", 0.0, 0)


def test_same_seed_same_pixels() -> None:
    first, second, other = (render_picture(random_picture(random.Random(seed), SIZE, 3)) for seed in (7, 7, 8))
    assert np.array_equal(np.asarray(first), np.asarray(second))
    assert not np.array_equal(np.asarray(first), np.asarray(other))


@pytest.mark.parametrize("size", [(160, 120), (90, 300), (400, 100)])
def test_items_are_in_reading_order_in_different_places_and_of_their_color(size: tuple[int, int]) -> None:
    rng = random.Random(1)
    for _ in range(30):
        picture = replace(random_picture(rng, size, rng.randint(1, 6)), jpeg=None)
        places = [item.place for item in picture.items]
        assert places == sorted(set(places), key=ALL_PLACES.index)
        assert len({item.name for item in picture.items}) == len(picture.items)
        pixels = np.asarray(render_picture(picture))
        for item in picture.items:
            assert math.dist(pixels[int(item.y * size[1]), int(item.x * size[0])], item.rgb) < 8
            assert min(COLORS, key=lambda name, rgb=item.rgb: math.dist(COLORS[name], rgb)) == item.color


def test_colors_and_backgrounds_can_be_told_apart() -> None:
    rng = random.Random(0)
    for _ in range(200):
        picture = random_picture(rng, SIZE, 1)
        ground = picture.background
        assert ground.name in BACKGROUNDS
        for rgb in (ground.start, ground.end):
            spread = max(rgb) - min(rgb)
            assert (spread <= 12) == (ground.name in ("white", "gray", "black")), (ground.name, rgb)
            assert math.dist(rgb, picture.items[0].rgb) >= 90


@pytest.mark.parametrize("unique", [False, True])
def test_unique_pictures_have_each_color_and_shape_once(unique: bool) -> None:
    rng = random.Random(0)
    for _ in range(30):
        items = random_picture(rng, (300, 300), 4, unique=unique).items
        is_unique = len({i.color for i in items}) == len({i.shape for i in items}) == 4
        assert is_unique or not unique


def test_about_a_tenth_is_held_out_and_only_the_combos_split_shows_it() -> None:
    held_out = [is_held_out(c, s, p) for c in COLORS for s in SHAPES for p in (*ALL_PLACES, *EVENTS)]
    assert 0.05 < np.mean(held_out) < 0.15
    rng = random.Random(2)
    for _ in range(100):
        for split, expected in SPLITS:
            items = random_picture(rng, SIZE, 2, split).items
            assert any(is_held_out(i.color, i.shape, i.place) for i in items) is expected
            clip = random_clip(rng, SIZE, split)
            assert is_held_out(clip.start.color, clip.start.shape, clip.event) is expected
            assert not any(is_held_out(i.color, i.shape, i.place) for i in clip.others)


@pytest.mark.parametrize("event", EVENTS)
def test_clips_show_their_event(event: str) -> None:
    for seed in range(15):
        clip = random_clip(random.Random(seed), SIZE, event=event)
        mine = [[i for i in clip.at(f) if i not in clip.others] for f in (0.0, 1.0)]
        assert [len(each) for each in mine] == {"appear": [0, 1], "vanish": [1, 0]}.get(event, [1, 1])
        if all(mine):
            (before,), (after,) = mine
            dx, dy = after.x - before.x, after.y - before.y
            direction = MOTIONS.get(event, (0, 0))
            assert (dx * direction[0] + dy * direction[1] > 0.33) is (event in MOTIONS)
            assert abs(dx * direction[1]) + abs(dy * direction[0]) == 0
            assert (after.color != before.color) is (event == "change")
        first, *_, last = render_clip(clip, 10)
        assert np.array_equal(np.asarray(first), np.asarray(last)) is (event == "still")
        assert 0 <= clip.event_s <= clip.duration_s


def test_sizes_are_what_people_have() -> None:
    rng = random.Random(0)
    sizes = [scenes.random_size(rng) for _ in range(2000)]
    assert all(min(size) >= 64 and max(size) <= 1024 for size in sizes)
    assert all(0.24 < width / height < 4.2 for width, height in sizes)
    assert max(width / height for width, height in sizes) > 3
    assert max(map(max, sizes)) > 800


@pytest.mark.parametrize("font", range(drawing.NUM_ALL_FONTS))
def test_words_stay_in_the_picture_in_every_font(font: int) -> None:
    word = Word("Wg7", 0.5, 0.5, 0.3, "black", (0, 0, 0), font, 0.0)
    pixels = np.asarray(render_picture(Picture(200, 120, PLAIN, words=(word,))))
    rows, columns = np.nonzero(pixels.min(-1) < 128)
    assert 0 < rows.min() < rows.max() < 119
    assert 0 < columns.min() < columns.max() < 199


def test_each_font_draws_other_letters() -> None:
    words = [Word("Rag5", 0.5, 0.5, 0.4, "black", (0, 0, 0), n, 0.0) for n in range(drawing.NUM_ALL_FONTS)]
    drawn = {np.asarray(render_picture(Picture(160, 80, PLAIN, words=(word,)))).tobytes() for word in words}
    assert len(drawn) == drawing.NUM_ALL_FONTS


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"font_caladea.*pip install 'qwen35mm\[eval\]'.*--questions 0"):
        drawing._font.__wrapped__(drawing.NUM_FONTS, 33)
    with pytest.raises(ConfigError, match=r"skimage\.data.*pip install 'qwen35mm\[eval\]'"):
        drawing._photo.__wrapped__("moon.png")


def test_every_photograph_is_installed() -> None:
    for name in (*drawing._PHOTOS, *drawing._HELD_OUT_PHOTOS):
        assert max(drawing._photo(name).size) <= 512
