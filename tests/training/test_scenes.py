"""Scenes are reproducible, drawn where they say, and never leak a held-out combination into training."""

import math
import random

import numpy as np
import pytest

from training.drawing import render_clip, render_picture
from training.scenes import COLORS, MOTIONS, PLACES, SHAPES, Split, is_held_out, random_clip, random_picture

SIZE = (160, 120)
SPLITS: list[tuple[Split, bool]] = [("train", False), ("seen", False), ("combos", True)]


def test_same_seed_same_pixels():
    first, second = (render_picture(random_picture(random.Random(7), SIZE, 3)) for _ in range(2))
    assert np.array_equal(np.asarray(first), np.asarray(second))
    other = render_picture(random_picture(random.Random(8), SIZE, 3))
    assert not np.array_equal(np.asarray(first), np.asarray(other))


@pytest.mark.parametrize("size", [(160, 120), (90, 300), (400, 60)])
def test_items_are_in_reading_order_in_different_places_and_of_their_color(size: tuple[int, int]):
    rng = random.Random(1)
    order = [place for row in PLACES for place in row]
    for _ in range(30):
        picture = random_picture(rng, size, rng.choice((1, 2, 3)))
        places = [item.place for item in picture.items]
        assert places == sorted(set(places), key=order.index)
        pixels = np.asarray(render_picture(picture))
        for item in picture.items:
            assert math.dist(pixels[int(item.y * size[1]), int(item.x * size[0])], item.rgb) < 8
            assert min(COLORS, key=lambda name, rgb=item.rgb: math.dist(COLORS[name], rgb)) == item.color


def test_about_a_tenth_is_held_out_and_only_the_combos_split_shows_it():
    places = [place for row in PLACES for place in row]
    held_out = [is_held_out(c, s, p) for c in COLORS for s in SHAPES for p in (*places, *MOTIONS, "change")]
    assert 0.05 < np.mean(held_out) < 0.15
    rng = random.Random(2)
    for _ in range(150):
        for split, expected in SPLITS:
            items = random_picture(rng, SIZE, 2, split).items
            assert any(is_held_out(i.color, i.shape, i.place) for i in items) is expected
            clip = random_clip(rng, SIZE, split)
            assert is_held_out(clip.start.color, clip.start.shape, clip.event) is expected


@pytest.mark.parametrize("event", [*MOTIONS, "change", "still"])
def test_clips_show_their_event(event: str):
    for seed in range(20):
        clip = random_clip(random.Random(seed), SIZE, event=event)
        dx, dy = clip.at(1).x - clip.at(0).x, clip.at(1).y - clip.at(0).y
        direction = MOTIONS.get(event, (0, 0))
        assert (dx * direction[0] + dy * direction[1] > 0.33) is (event in MOTIONS)
        assert abs(dx * direction[1]) + abs(dy * direction[0]) == 0
        assert (clip.at(1).color != clip.at(0).color) is (event == "change")
        first, last = render_clip(clip, [0.0, 1.0])
        assert np.array_equal(np.asarray(first), np.asarray(last)) is (event == "still")
