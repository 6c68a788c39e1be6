"""Sharpness and letterbox bars."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from qwen35mm.assets import demo_model_path
from qwen35mm.captioning.media.measures import letterbox, measures, sharpness
from qwen35mm_preprocess import MediaProcessor


def test_the_variance_of_the_laplacian_is_what_its_definition_says() -> None:
    grey = np.zeros((5, 5))
    grey[2, 2] = 9.0
    # Nine inner places: -36 in the middle, 9 at four neighbours, else 0.
    assert sharpness(grey) == pytest.approx((36**2 + 4 * 9**2) / 9)
    assert sharpness(np.full((5, 5), 7.0)) == sharpness(np.zeros((2, 9))) == 0.0


@pytest.mark.parametrize("level", [0.0, 255.0])
def test_bars_are_found_on_two_opposite_sides_only(level: float) -> None:
    rng = np.random.default_rng(0)
    grey = rng.uniform(30, 220, (100, 60))
    assert letterbox(grey) == 0.0
    both = grey.copy()
    both[:10] = both[-15:] = level
    assert letterbox(both) == letterbox(both.T) == 0.25
    one = grey.copy()
    one[:10] = level
    assert letterbox(one) == 0.0
    assert letterbox(np.full((50, 50), level)) == 0.0
    plain = grey.copy()
    plain[:10] = plain[-10:] = 128.0
    assert letterbox(plain) == 0.0


def test_a_blurred_picture_is_less_sharp_at_every_size(tmp_path: Path) -> None:
    processor = MediaProcessor.from_pretrained(demo_model_path())
    rng = np.random.default_rng(0)
    scene = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).resize((512, 512), Image.Resampling.BOX)
    found = []
    for size in (256, 512):
        for blurred in (scene, scene.filter(ImageFilter.GaussianBlur(8))):
            path = tmp_path / "a.png"
            blurred.resize((size, size), Image.Resampling.LANCZOS).save(path)
            found.append(measures(processor.prepare(path, kind="image"), processor.image_processing)[0])
    assert found[0] > 5 * found[1]
    assert found[2] > 5 * found[3]
    assert 1 / 3 < found[0] / found[2] < 3
