"""Scenes as the product's own preprocessing makes them of the very files."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qwen35mm.evaluation import files, scenes
from qwen35mm.evaluation.scenes import BACKGROUNDS, COLORS, SHAPES, Background, Item, Picture, Word
from qwen35mm.evaluation.skills.clips import random_shown, seconds
from qwen35mm_preprocess import MediaProcessor
from training import media
from training.export import IMAGE_PROCESSOR, VIDEO_PROCESSOR, save_json
from training.media import (
    CLASSES,
    EDGES,
    MERGED,
    clip_media,
    frame_times,
    image_size,
    patchify,
    picture_media,
    pixel_values,
    token_targets,
)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    """As the exported checkpoint has it."""
    folder = tmp_path_factory.mktemp("processors")
    save_json(folder / "preprocessor_config.json", IMAGE_PROCESSOR)
    save_json(folder / "video_preprocessor_config.json", VIDEO_PROCESSOR)
    return MediaProcessor.from_pretrained(folder)


def test_pictures_have_the_size_and_nearly_the_pixels_of_the_apps(processor: MediaProcessor, tmp_path: Path) -> None:
    rng = random.Random(0)
    sizes = [(64, 64), (1024, 256), (70, 280), (1000, 1000), *(scenes.random_size(rng) for _ in range(12))]
    tokens = set()
    for size in sizes:
        picture = scenes.random_picture(rng, size, rng.randint(1, 4))
        path = tmp_path / "picture.png"
        path.write_bytes(files.picture_file(picture))
        prepared = processor.prepare(path, kind="image")
        made = picture_media(picture)
        assert tuple(prepared.plan.size) == image_size(size) == made.frames.shape[2:4]
        tokens.add(made.tokens_per_span)
        off = np.abs(prepared.patches.values() - pixel_values(torch.from_numpy(patchify(made.frames))).numpy())
        assert off.mean() < 0.03, size
    assert min(tokens) >= 16
    assert max(tokens) == 256


def test_clips_have_the_times_and_sizes_of_the_apps(processor: MediaProcessor, tmp_path: Path) -> None:
    rng = random.Random(0)
    spans = set()
    for index in range(10):
        shown = random_shown(rng, "train", most_frames=(8, 16, 32)[index % 3])
        path = tmp_path / "clip.mp4"
        path.write_bytes(files.clip_file(shown.clip, "mp4", shown.fps))
        plan = processor.plan(path, kind="video")
        made = clip_media(shown.clip, shown.times_s)
        assert tuple(plan.size) == made.frames.shape[2:4]
        assert plan.grid_thw.t == len(made.frames)
        assert made.times_s is not None
        assert [f"{time:.1f}" for time in made.times_s] == [f"{time:.1f}" for time in plan.timestamps_s or ()]
        spans.add(len(made.frames))
    assert max(spans) > 8
    assert media.video_size((64, 48), 32)[0] * media.video_size((64, 48), 32)[1] * 32 >= 96 * 2048


def test_frame_times_are_two_a_second_from_the_first_to_the_last() -> None:
    assert frame_times(4.0, 10.0) == [0.0, 0.6, 1.1, 1.7, 2.2, 2.8, 3.3, 3.9]
    assert frame_times(1.0, 8.0) == [0.0, 0.2, 0.6, 0.9] or len(frame_times(1.0, 8.0)) == 4
    assert len(frame_times(60.0, 30.0)) == VIDEO_PROCESSOR["max_frames"]
    assert frame_times(0.1, 8.0) == [0.0]


def plain(*items: Item, words: tuple[Word, ...] = ()) -> Picture:
    return Picture(320, 320, Background("white", (255, 255, 255), (255, 255, 255), "plain", 0.0, 0), items, words)


def test_targets_say_what_lies_at_each_token() -> None:
    big = Item("red", "circle", 0.5, 0.5, 0.2, 0.0, (220, 35, 35), "big")
    small = Item("blue", "star", 0.85, 0.15, 0.06, 0.0, (40, 80, 220), "small")
    targets, boxes = token_targets(plain(big, small), (320, 320))
    grid = dict(zip(CLASSES, np.moveaxis(targets.reshape(10, 10, -1), -1, 0), strict=True))
    pixels = np.asarray(files.render_picture(plain(big, small)).resize((320, 320)), dtype=int)
    for row in range(10):
        for column in range(10):
            at = pixels[row * MERGED + 16, column * MERGED + 16]
            color = grid["color"][row, column]
            # Where a token's middle is in a shape, its colour is the target; at the edge it may be left out.
            near = {tuple(big.rgb): "red", tuple(small.rgb): "blue"}.get(tuple(at))
            assert near is None or color == 0 or tuple(COLORS)[color - 1] == near
            assert (boxes.reshape(10, 10, 4)[row, column] >= 0).all() == (color > 0)
    assert (grid["color"] == 1 + tuple(COLORS).index("red")).sum() > 10
    assert grid["shape"][1, 8] == 1 + SHAPES.index("star")
    assert (grid["centre"] == 1).nonzero()[0].tolist() == [1, 5]
    assert set(grid["background"].flat) == {1 + tuple(BACKGROUNDS).index("white")}
    left, top, right, bottom = boxes.reshape(10, 10, 4)[5, 5]
    rows, columns = np.nonzero((pixels == big.rgb).all(-1))
    assert [left, top, right, bottom] == pytest.approx(
        [columns.min() / 320, rows.min() / 320, columns.max() / 320, rows.max() / 320], abs=0.01
    )
    for name, edge in zip(EDGES, (left, top, right, bottom, big.x, big.y), strict=True):
        hundreds, tens = (int(grid[f"{name} {digit}"][5, 5]) - 1 for digit in ("100", "10"))
        assert 0 <= 1000 * float(edge) - 100 * hundreds - 10 * tens < 10.6  # thousandths are rounded
    assert not grid["x1 100"][grid["color"] == 0].any()


def test_targets_have_each_letter_where_it_stands() -> None:
    word = Word("a1b", 0.5, 0.5, 0.3, "black", (0, 0, 0), 0, 0.0)
    targets, _ = token_targets(plain(words=(word,)), (320, 320))
    letters = targets.reshape(10, 10, -1)[..., 6:9]
    colored = targets.reshape(10, 10, -1)[..., 0]
    assert set(colored[letters.any(-1)]) == {1 + tuple(COLORS).index("black")}
    assert not colored[~letters.any(-1)].any()
    rows, columns, _ = letters.nonzero()
    found = [
        media.LETTERS[letters[row, column].max() - 1]
        for row, column in sorted(zip(rows, columns, strict=True), key=lambda at: at[1])
    ]
    assert found == list("a1b")
    assert set(rows.tolist()) <= {4, 5}


def test_a_jpeg_has_its_artefacts() -> None:
    picture = scenes.random_picture(random.Random(0), (200, 200), 2)
    smooth = Picture(*(200, 200), picture.background, picture.items)
    rough = Picture(*(200, 200), picture.background, picture.items, jpeg=45)
    a, b = (np.asarray(files.render_picture(each), dtype=int) for each in (smooth, rough))
    assert 0 < np.abs(a - b).mean() < 10
    assert Image.open(io.BytesIO(files.picture_file(smooth, "JPEG", 60))).format == "JPEG"


def test_what_was_before_is_of_the_span_before_where_their_grids_are_the_same() -> None:
    disc = Item("red", "circle", 0.5, 0.5, 0.2, 0.0, (220, 35, 35), "big")
    star = Item("blue", "star", 0.5, 0.5, 0.2, 0.0, (40, 80, 220), "big")
    first, second = media.picture_media(plain(disc)), media.picture_media(plain(star))
    small = media.picture_media(replace(plain(disc), width=160, height=160))
    clip = media.clip_media(scenes.random_clip(random.Random(1), (160, 160), duration_s=4.0), [0.0, 1.0, 2.0, 3.0])
    found = media.to_know([first, second, second, small, clip])[:, :2]
    parts = np.split(found, np.cumsum([len(m.targets) for m in (first, second, second, small)]))
    assert (parts[0] == -1).all()
    assert (parts[3] == -1).all()
    np.testing.assert_array_equal(parts[1], first.targets[:, :2])
    np.testing.assert_array_equal(parts[2], second.targets[:, :2])
    before, *_ = np.split(clip.targets[:, :2], len(clip.frames))
    fresh = small.targets[:, :2] if small.grid == clip.grid else np.full_like(before, -1)
    np.testing.assert_array_equal(parts[4], np.concatenate([fresh, before]))


def test_the_decoder_is_asked_for_times_as_the_prompt_has_them_and_for_the_mediums_number() -> None:
    clip = media.clip_media(scenes.random_clip(random.Random(1), (160, 160), duration_s=30.0), [0.5, 1.0, 12.3, 13.5])
    picture = media.picture_media(scenes.random_picture(random.Random(2), (160, 160), 1))
    known = media.to_know([picture, clip, *[picture] * 6])
    names = list(media.KNOWN)
    digits = known[:, names.index("tens of seconds") : names.index("tenths of seconds") + 1]
    first, tokens = len(picture.targets), clip.tokens_per_span
    assert (digits[:first] == -1).all()
    assert [f"{time:.1f}" for time in clip.times_s or ()] == ["0.8", "12.9"]
    np.testing.assert_array_equal(digits[first : first + 2 * tokens], [[0, 0, 8]] * tokens + [[1, 2, 9]] * tokens)
    numbers = known[:, names.index("medium")]
    assert numbers[:first].tolist() == [0] * first
    assert numbers[first : first + 2 * tokens].tolist() == [1] * 2 * tokens
    assert numbers[-2 * first :].tolist() == [5] * 2 * first  # more are not told apart


def test_shapes_are_counted_in_the_order_of_the_tokens() -> None:
    placed = [(0.2, 0.2, "red", "circle"), (0.8, 0.2, "red", "star"), (0.2, 0.8, "blue", "circle")]
    placed.append((0.8, 0.8, "red", "circle"))
    items = [Item(color, shape, x, y, 0.1, 0.0, (220, 35, 35)) for x, y, color, shape in placed]
    picture = media.picture_media(replace(plain(items[0]), items=tuple(reversed(items))))
    counts = media.to_know([picture])[:, -3:]
    centres = picture.targets[:, list(media.CLASSES).index("centre")] == 1
    assert counts[centres].tolist() == [[0, 0, 0], [1, 1, 0], [2, 0, 1], [3, 2, 2]]
    assert (counts[~centres] == -1).all()


@pytest.mark.parametrize("event", ["appear", "vanish", "change"])
def test_a_spans_targets_change_where_the_answer_says_that_it_happens(event: str) -> None:
    """Also where it happens between the two frames of a span, and after its middle."""
    after_the_middle = 0
    for index in range(30):
        shown = random_shown(random.Random(index), "train", event, 16)
        made = clip_media(shown.clip, shown.times_s)
        assert made.times_s is not None
        spans = np.split(made.targets[:, :2], len(made.frames))
        (told,) = (i for i, time in enumerate(made.times_s) if abs(time - seconds(shown)) < 1e-6)
        changed = [i for i in range(1, len(spans)) if not np.array_equal(spans[i - 1], spans[i])]
        assert changed == ([told] if told else [])
        after_the_middle += made.times_s[told] < shown.clip.event_s
    assert after_the_middle
