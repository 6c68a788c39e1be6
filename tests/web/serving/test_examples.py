from __future__ import annotations

import logging
from pathlib import Path

import pytest

from qwen35mm.web.serving import examples
from qwen35mm.web.serving.examples import NUM_EXAMPLES, Sample, choose_examples, load_samples


def test_the_bundled_samples_are_examples() -> None:
    samples = load_samples()
    assert {sample.kind for sample in samples} == {"image", "video"}
    chosen = choose_examples(samples)
    assert len(chosen) == NUM_EXAMPLES
    assert all(sample.question and sample.path.is_file() for sample in chosen)


@pytest.mark.parametrize(
    ("num_images", "num_videos", "chosen"),
    [(5, 5, "iiivvv"), (2, 5, "iivvvv"), (5, 1, "iiiiiv"), (0, 9, "vvvvvv"), (1, 1, "iv"), (0, 0, "")],
)
def test_half_of_each_kind_where_there_are_enough(num_images: int, num_videos: int, chosen: str) -> None:
    samples = [Sample(Path("v"), "video", "v")] * num_videos + [Sample(Path("i"), "image", "i")] * num_images
    assert "".join(sample.question for sample in choose_examples(samples)) == chosen


@pytest.mark.parametrize("content", [None, "{", "{}", '[{"file": "a.png"}]', '[{"file": "a.png", "turns": []}]', "[1]"])
def test_unreadable_samples_cost_the_examples_only(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(examples, "asset_path", lambda name: tmp_path)
    if content is not None:
        (tmp_path / "samples.json").write_text(content)
    with caplog.at_level(logging.WARNING, "qwen35mm.web.serving.examples"):
        assert load_samples() == []
    assert ("can't be read" in caplog.text) == (content != "{}")
