"""MediaProcessor: pinned plans give the same pixels for ever, and anything else is noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen35mm_preprocess import (
    MediaBudget,
    MediaChangedError,
    MediaConfigError,
    MediaError,
    MediaPlanError,
    MediaProcessor,
    read_processing,
)
from qwen35mm_preprocess.media_plan import num_prompt_tokens
from tests.preprocess.media_files import PHOTOGRAPHS, encode_image, encode_video, scene
from tests.preprocess.test_types import CONFIG

PHOTO = PHOTOGRAPHS / "chelsea.png"


@pytest.fixture(scope="module", params=["image", "video"])
def source(request: pytest.FixtureRequest, clip: bytes) -> Path | bytes:
    return PHOTO if request.param == "image" else clip


def test_a_stored_plan_gives_the_same_pixels(source: Path | bytes, processor: MediaProcessor) -> None:
    media = processor.prepare(source)
    # Later settings never touch it.
    later = replace(processor, budget=MediaBudget(max_image_tokens=70, max_video_tokens=70, fps=1, drop_similar=True))
    assert later.plan(source).num_tokens < media.plan.num_tokens
    again = later.prepare(source, media.plan)
    assert again.plan == media.plan
    np.testing.assert_array_equal(again.pixel_values, media.pixel_values)


def test_digests(source: Path | bytes, processor: MediaProcessor) -> None:
    plan = processor.plan(source)
    assert (plan.digest, plan.unit_digests) == (None, None)
    prepared = processor.prepare(source, plan).plan
    assert prepared.digest is not None
    assert prepared.unit_digests is not None
    assert len(prepared.unit_digests) == plan.grid_thw.t
    assert all(len(digest) == 64 for digest in (prepared.digest, *prepared.unit_digests))
    assert replace(prepared, digest=None, unit_digests=None) == plan


def test_other_pixels_of_the_same_shape_are_noticed(processor: MediaProcessor) -> None:
    with Image.open(PHOTO) as picture:
        changed = picture.copy()
    plan = processor.prepare(PHOTO).plan
    changed.putpixel((200, 100), (255, 0, 255))
    with pytest.raises(MediaChangedError, match="has changed since its message was sent"):
        processor.prepare(changed, plan)
    assert processor.prepare(changed, plan.unpinned()).plan.digest != plan.digest


def test_other_frames_of_the_same_times_are_noticed(clip: bytes, processor: MediaProcessor) -> None:
    other = encode_video([scene(29 - index) for index in range(30)])
    with pytest.raises(MediaChangedError, match="has changed since its message was sent"):
        processor.prepare(other, processor.prepare(clip).plan)


def test_an_image_of_another_size_is_noticed(processor: MediaProcessor) -> None:
    plan = processor.plan(Image.new("RGB", (640, 480)))
    with pytest.raises(MediaChangedError, match=r"640 x 480 pixels were expected, 480 x 640 came"):
        processor.prepare(Image.new("RGB", (480, 640)), plan)


def test_a_plan_for_another_checkpoint_is_refused(source: Path | bytes, processor: MediaProcessor) -> None:
    plan = processor.prepare(source).plan
    other = replace(
        processor,
        image_processing=replace(processor.image_processing, image_std=(0.2, 0.2, 0.2)),
        video_processing=replace(processor.video_processing, image_std=(0.2, 0.2, 0.2)),
    )
    with pytest.raises(MediaPlanError, match="processes media in another way"):
        other.prepare(source, plan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": (60_000, 60_000)}, "a grid of another size"),
        ({"size": (60_000, 60_000), "grid_thw": 3750}, "tokens than its grid's"),
        ({"size": (60_000, 60_000), "grid_thw": 3750, "num_tokens": 1875**2}, "tokens than its prompt's"),
        ({"size": (60_000, 60_000), "grid_thw": 3750, "num_tokens": None}, "more pixels than are made"),
        ({"source_size": (60_000, 60_000)}, "60,?000 x 60,?000"),
        ({"size": (40, 32)}, "another size"),
    ],
)
def test_a_plan_that_no_medium_gives_is_refused_before_anything_is_made_of_it(
    source: Path | bytes, processor: MediaProcessor, changes: dict[str, Any], words: str
) -> None:
    """A record may say anything: 60,000 x 60,000 pixels are more memory than there is."""
    plan = processor.plan(source)
    made = dict(changes)
    if "grid_thw" in made:
        made["grid_thw"] = plan.grid_thw._replace(h=made["grid_thw"], w=made["grid_thw"])
        if made.get("num_tokens", 0) is None:
            made["num_tokens"] = made["grid_thw"].num_tokens(2)
            made["num_prompt_tokens"] = num_prompt_tokens(made["num_tokens"], plan.timestamps_s)
        elif "num_tokens" in made:
            made["num_tokens"] *= plan.grid_thw.t
    for digest in (None, "ab" * 32):
        units = None if digest is None else ("cd" * 32,) * plan.grid_thw.t
        with pytest.raises(MediaError, match=words):
            processor.prepare(source, replace(plan, **made, digest=digest, unit_digests=units))


def test_a_plan_of_more_frames_than_a_video_has_is_refused(clip: bytes, processor: MediaProcessor) -> None:
    plan = processor.plan(clip)
    with pytest.raises(MediaPlanError, match="more frames than the video has"):
        processor.check(replace(plan, source_frames=len(plan.frame_indices or ()) - 1), clip)
    with pytest.raises(MediaPlanError, match="frames than its grid's"):
        processor.check(replace(plan, frame_indices=(0,), frame_times_s=(0.0,)), clip)


def test_kind_can_be_asked_for(processor: MediaProcessor) -> None:
    gif = PHOTOGRAPHS / "no_time_for_that_tiny.gif"
    video, image = processor.plan(gif), processor.plan(gif, kind="image")
    assert (video.kind, image.kind) == ("video", "image")
    assert "the first is used" in str(image.notes[0])
    with pytest.raises(MediaPlanError, match="is for video, not image"):
        processor.prepare(gif, video, kind="image")


@pytest.mark.parametrize(
    ("source", "steps"),
    [("image", [(0, 1), (1, 1)]), ("video", [(done, 6) for done in range(1, 7)])],
    indirect=["source"],
)
def test_progress(source: Path | bytes, steps: list[tuple[int, int]], processor: MediaProcessor) -> None:
    calls: list[tuple[int, int]] = []
    processor.prepare(source, progress=lambda done, total: calls.append((done, total)))
    assert calls == steps


def test_a_digest_is_of_the_pixels_wherever_they_come_from(processor: MediaProcessor) -> None:
    red, blue = (Image.new("RGB", (300, 300), colour) for colour in ((200, 0, 0), (0, 0, 200)))
    first, again, other = (processor.prepare(each).plan.digest for each in (red, encode_image(red, "PNG"), blue))
    assert first == again != other


def _write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def test_from_pretrained(tmp_path: Path) -> None:
    _write(tmp_path, preprocessor_config=CONFIG, video_preprocessor_config={**CONFIG, "fps": 4})
    processor = MediaProcessor.from_pretrained(tmp_path, cache_bytes_per_token=7)
    assert processor.image_processing.max_pixels == 25165824
    assert processor.video_processing.fps == 4
    assert processor.budget == MediaBudget.for_cpu()
    assert processor.plan(PHOTO).cache_bytes == 7 * processor.plan(PHOTO).num_prompt_tokens


def test_from_one_joint_file(tmp_path: Path) -> None:
    _write(tmp_path, processor_config={"image_processor": CONFIG, "video_processor": {**CONFIG, "fps": 3}})
    assert read_processing(tmp_path)[1].fps == 3


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(MediaConfigError, match=r"lacks preprocessor_config\.json"):
        read_processing(tmp_path)
    _write(tmp_path, preprocessor_config=CONFIG)
    with pytest.raises(MediaConfigError, match=r"lacks video_preprocessor_config\.json"):
        read_processing(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(MediaConfigError, match=r"video_preprocessor_config\.json of the checkpoint is not readable"):
        read_processing(tmp_path)
    (tmp_path / "processor_config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(MediaConfigError, match=r"processor_config\.json of the checkpoint must hold a JSON object"):
        read_processing(tmp_path)
