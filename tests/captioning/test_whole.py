"""Captions of whole videos from those of their parts: once, after all parts, and again when a part's changes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.captioning.job import Job, carry_out
from qwen35mm.captioning.outputs import OutputSettings
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.whole import SUMMARY
from qwen35mm.errors import CaptioningError, EngineError
from tests.captioning.fake_model import Asked, FakeModel
from tests.captioning.kills import killed_at, needs_fork
from tests.captioning.runs import interrupted, listed, run, settings, texts
from tests.captioning.test_parts import make_video, split

pytestmark = pytest.mark.usefixtures("media_in_process")


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """A video of three scenes, and one of a single scene."""
    folder = tmp_path / "media"
    make_video(folder / "long.mp4", (1, 2, 3))
    make_video(folder / "short.mp4", (4,))
    return folder


def whole(folder: Path, kind: str, text: str = "scenes", **options: Any) -> Job:
    return split(folder, text, run=settings(whole=kind, **options.pop("run", {})), **options)


def say(asked: Asked) -> str:
    return f"Part {asked.digest[:6]}." if asked.digest else "All of it."


def summaries(model: FakeModel) -> list[str]:
    return [asked.question for asked in model.asked if not asked.digest]


async def test_a_summary_is_asked_once_with_all_captions_in_order(videos: Path) -> None:
    model, rows = FakeModel(say), videos / "all.jsonl"
    one = whole(videos, "summary", outputs=("sidecar", f"jsonl:{rows}"))
    outcome = await run(one, model)
    written = texts(videos)
    lines = [f"0:00:0{2 * n}-0:00:0{2 * n + 2} {written[f'long.{n + 1:04}.txt'].strip()}" for n in range(3)]
    assert summaries(model) == ["\n".join([SUMMARY, "", *lines])]
    assert (written["long.txt"], outcome.counts.num_captioned, outcome.counts.num_found) == ("All of it.\n", 5, 5)
    (row,) = [row for row in listed(rows) if row["name"] == "long.mp4"]
    assert (row["duration_s"], row["width"], row["prompt"], "part" in row) == (6.0, 64, SUMMARY, False)
    again = FakeModel(say)
    assert (await run(one, again)).counts.num_present == 5
    assert again.asked == []


async def test_a_timeline_asks_nobody(videos: Path) -> None:
    model = FakeModel(say)
    await run(whole(videos, "timeline"), model)
    written = texts(videos)
    assert written["long.txt"].splitlines() == [
        f"0:00:0{2 * n}-0:00:0{2 * n + 2} {written[f'long.{n + 1:04}.txt'].strip()}" for n in range(3)
    ]
    assert summaries(model) == []


async def test_another_caption_of_a_part_is_another_summary(videos: Path) -> None:
    await run(whole(videos, "summary"), FakeModel(say))
    model = FakeModel(lambda asked: f"Other {asked.digest[:6]}." if asked.digest else "Another whole.")
    await run(whole(videos, "summary", style=CaptionStyle(max_attempts=5)), model)
    assert (len(summaries(model)), texts(videos)["long.txt"]) == (1, "Another whole.\n")


async def test_a_missing_part_is_said(videos: Path) -> None:
    (videos / "short.mp4").unlink()
    model, rows = FakeModel(lambda asked: say(asked) if len(model.asked) != 3 else ""), videos / "all.jsonl"
    job = whole(videos, "summary", outputs=(f"jsonl:{rows}",), style=CaptionStyle(max_attempts=1), run={"slots": 1})
    assert (await run(job, model)).exit_code == 3
    flags = {row["name"]: row["flags"] for row in listed(rows)}
    assert (flags["long.mp4"], len(flags)) == (["parts missing: 1 of 3"], 3)
    (row,) = [row for row in listed(rows) if row["name"] == "long.mp4"]
    assert row["duration_s"] == 6.0, "also if it is the last one"


async def test_a_part_that_a_filter_leaves_out_is_not_missing(videos: Path) -> None:
    make_video(videos / "long.mp4", (1, 1, 2))
    rows, alike = videos / "all.jsonl", {"max_distance": 2, "skips_similar": True}
    one = whole(videos, "timeline", "2s", outputs=(f"jsonl:{rows}",), run=alike)
    for _ in range(2):
        assert (await run(one, FakeModel(say))).counts.num_filtered == 1
        (row,) = [row for row in listed(rows) if row["name"] == "long.mp4"]
        assert (len(row["caption"].splitlines()), row["flags"]) == (2, [])


async def test_a_run_ends_when_the_engine_fails_at_one_summary_after_the_other(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    made = make_video(folder / "00.mp4", (1, 2))
    for number in range(1, 12):
        shutil.copy(made, folder / f"{number:02}.mp4")

    def fail(asked: Asked) -> str:
        if asked.digest:
            return say(asked)
        raise EngineError("It broke.")

    model = FakeModel(fail)
    outcome = await run(whole(folder, "summary", run={"slots": 1}), model)
    assert (outcome.exit_code, len(summaries(model))) == (5, 10)


async def test_long_lists_are_summarized_in_groups(tmp_path: Path) -> None:
    make_video(tmp_path / "media" / "long.mp4", (1, 2, 3))
    words = "word " * 2000
    model = FakeModel(lambda asked: f"{asked.digest[:6]} {words}end." if asked.digest else f"Of {len(asked.question)}.")
    style = CaptionStyle(cleans=False)
    await run(whole(tmp_path / "media", "summary", "1s", style=style), model)
    questions = summaries(model)
    assert len(questions) == 4
    assert all(len(question) < 30_000 for question in questions)
    assert questions[-1].splitlines()[2:] == [
        f"0:00:0{2 * n}-0:00:0{2 * n + 2} Of {len(questions[n])}." for n in range(3)
    ]


async def test_a_persons_text_beside_the_video_stays(videos: Path) -> None:
    (videos / "long.txt").write_text("mine")
    model = FakeModel(say)
    outcome = await run(whole(videos, "summary"), model)
    assert ((videos / "long.txt").read_text(), summaries(model), outcome.counts.num_kept) == ("mine", [], 1)


async def test_an_interrupted_run_makes_it_later(videos: Path) -> None:
    model = FakeModel(say, delay_s=0.05)
    outcome = await interrupted(whole(videos, "summary"), model, lambda run: run.counts.num_captioned > 0)
    assert (outcome.exit_code, summaries(model)) == (130, [])
    later = FakeModel(say)
    assert (await run(whole(videos, "summary"), later)).exit_code == 0
    assert (len(summaries(later)), texts(videos)["long.txt"]) == (1, "All of it.\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "never"}, "say with --split which parts"),
        ({"clips": Path("clips"), "outputs": ("webdataset:tars",)}, "would hold the whole video"),
        ({"output_settings": OutputSettings(embed_media=True)}, "would hold the whole video"),
    ],
)
def test_what_does_not_go_together_is_refused(videos: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptioningError, match=message):
        whole(videos, "summary", **options).check()


SLOW_STEPS = [pytest.param(step, marks=pytest.mark.slow) for step in range(35, 130, 11)]


@needs_fork
@pytest.mark.parametrize("step", [30, 61, 90, *SLOW_STEPS])
def test_kills_leave_one_summary(videos: Path, step: int) -> None:
    rows = videos.parent / "all.jsonl"
    one = whole(videos, "summary", outputs=("sidecar", f"jsonl:{rows}"))

    def go() -> int:
        model = FakeModel(say)
        assert asyncio.run(carry_out(one, model.captioner())).exit_code == 0
        return len(model.asked)

    killed_at(step, go)
    go()
    names = ["long.mp4", *(f"long.mp4/{n:04}" for n in (1, 2, 3)), "short.mp4"]
    assert sorted(row["name"] for row in listed(rows)) == names
    assert set(texts(videos)) == {"long.txt", "short.txt", *(f"long.{n:04}.txt" for n in (1, 2, 3))}
    assert go() == 0
