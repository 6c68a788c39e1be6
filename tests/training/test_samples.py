"""The page's examples: their answers are true, and their files are what they are named."""

from __future__ import annotations

import io
import re
from pathlib import Path

import av
import pytest
from PIL import Image

from qwen35mm.evaluation.scenes import Clip, Picture
from tests.training.claims import captioned, holds, named, seen
from training import make_samples
from training.make_samples import FPS, MAX_BYTES, Sample, content, samples, shown

SAMPLES = {sample.name: sample for sample in samples()}
PICTURES = [name for name, sample in SAMPLES.items() if isinstance(sample.scene, Picture)]


@pytest.mark.parametrize("name", PICTURES)
def test_answers_about_pictures_are_true(name: str) -> None:
    sample = SAMPLES[name]
    picture = sample.scene
    assert isinstance(picture, Picture)
    it = picture.items[0] if len(picture.items) == 1 else None
    for question, answer in sample.turns:
        if compared := re.search(r"more (\w+) than (\w+)", question):
            one, other = (len(named(picture.items, noun) or ()) for noun in compared.groups())
            assert one > other
            assert answer == f"Yes, there are more {compared[1]}."
        elif answer.startswith("No, "):
            assert holds(picture, answer.removeprefix("No, "), it)
        elif re.match("An? ", answer) and " is " not in answer:
            assert captioned(answer) == seen(picture.items)
        else:
            assert holds(picture, answer[0].lower() + answer[1:], it), (question, answer)


def test_answers_about_clips_are_true() -> None:
    clips = [sample for sample in SAMPLES.values() if isinstance(sample.scene, Clip)]
    assert len(clips) >= 5
    for sample in clips:
        clip = sample.scene
        assert isinstance(clip, Clip)
        for question, answer in sample.turns:
            if " at " in answer:
                (told,) = re.findall(r"at (\d\.\d) seconds", answer)
                assert abs(float(told) - clip.event_s) < 1
                assert f"{float(told):.1f}" in [f"{sum(p) / 2:.1f}" for p in _pairs(shown(clip).times_s)]
            elif "move" in answer:
                way = {"right": "to the right", "left": "to the left", "up": "up", "down": "down"}[clip.event]
                assert answer.endswith(f" {way}.")
            elif question == "What shape is it?":
                assert answer == f"It is a {clip.start.shape}."
            if answer.startswith("A "):
                assert named([clip.start], answer) == [clip.start] or clip.event == "change"
            if clip.event == "change":
                assert f"from {clip.start.color} to {clip.end.color}" in answer


def _pairs(times: list[float]) -> list[tuple[float, float]]:
    times = times + times[-1:] * (len(times) % 2)
    return list(zip(times[::2], times[1::2], strict=True))


@pytest.mark.parametrize("name", SAMPLES)
def test_files_are_what_they_are_named(name: str) -> None:
    sample: Sample = SAMPLES[name]
    file, kind = content(sample), name.rsplit(".", 1)[1]
    if kind in ("png", "jpg", "gif"):
        image = Image.open(io.BytesIO(file))
        assert image.format == {"png": "PNG", "jpg": "JPEG", "gif": "GIF"}[kind]
        assert image.size == (sample.scene.width, sample.scene.height)
        assert getattr(image, "n_frames", 1) > 1 or kind != "gif"
        return
    with av.open(io.BytesIO(file)) as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate or 0) == FPS
        assert isinstance(sample.scene, Clip)
        assert sum(1 for _ in container.decode(video=0)) == round(sample.scene.duration_s * FPS)


def test_the_command_writes_all_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["make_samples", "--out", str(tmp_path)])
    monkeypatch.setattr(make_samples, "content", lambda sample: b"x" * 100)
    make_samples.main()
    assert {path.name for path in tmp_path.iterdir()} == {*SAMPLES, "samples.json"}
    monkeypatch.setattr(make_samples, "content", lambda sample: b"x" * (MAX_BYTES // 10))
    with pytest.raises(ValueError, match="make the samples smaller"):
        make_samples.main()
