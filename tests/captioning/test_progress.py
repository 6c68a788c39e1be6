"""The scan runs ahead of the slots, and what is counted tells how long the rest will take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from qwen35mm.captioning import run as run_module
from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.job import Job
from qwen35mm.captioning.progress import Counts
from qwen35mm.captioning.run import Run
from tests.captioning.fake_model import Asked, FakeModel
from tests.captioning.runs import interrupted, job, run, settings

pytestmark = pytest.mark.usefixtures("media_in_process")


async def test_the_first_caption_comes_before_the_scan_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries, answered = Job.entries, Event()

    def slow(job: Job, *how: Any) -> Iterator[Item | Unreadable]:
        for number, entry in enumerate(entries(job, *how)):
            assert number < 4 or answered.wait(10)
            yield entry

    monkeypatch.setattr(Job, "entries", slow)
    monkeypatch.setattr(run_module, "_SCAN_BATCH", 2)
    outcome = await run(job(folder, run=settings()), FakeModel(lambda asked: str(answered.set())))
    assert (outcome.counts.num_captioned, outcome.exit_code) == (6, 0)


@pytest.mark.parametrize("has_room", [False, True])
async def test_the_scan_runs_ahead_as_far_as_there_is_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    for number in range(24):
        (folder / f"z{number:03}.png").write_bytes((folder / "0.png").read_bytes() + number.to_bytes(2, "big"))
    (folder / "0.txt").write_text("mine")
    monkeypatch.setattr(run_module, "_SCAN_BATCH", 4)
    monkeypatch.setattr(run_module, "_LINE_BYTES", 1 << 20 if has_room else 0)
    watched: list[Run] = []
    seen: list[Counts] = []

    def answer(asked: Asked) -> str:
        seen.append(replace(watched[0].counts))
        return "Fine."

    async def begun(run: Run) -> None:
        watched.append(run)

    model = FakeModel(answer, waits=lambda: has_room and not watched[0].counts.scanned)
    outcome = await run(job(folder, run=settings()), model, begun=begun)
    assert (outcome.counts.num_captioned, outcome.counts.num_kept) == (29, 1)
    assert (seen[0].num_found, seen[0].num_kept) == (30, 1) if has_room else seen[0].num_found < 20


async def test_what_an_interrupted_run_leaves_in_line_is_counted(folder: Path) -> None:
    one = job(folder, run=settings(slots=1))
    outcome = await interrupted(one, FakeModel(delay_s=0.05), lambda run: run.counts.num_captioned > 0)
    assert outcome.counts.num_left > 0
    assert outcome.counts.num_over == outcome.counts.num_found == 6


async def test_what_only_has_to_be_written_is_known_before_it_is_taken_up(folder: Path) -> None:
    for path in folder.rglob("*.png"):
        os.utime(path, (1, 1))
    await run(job(folder, run=settings(limit=3)), FakeModel())
    outcome = await run(job(folder, outputs=("sidecar", f"jsonl:{folder}/all.jsonl")), FakeModel())
    counts = outcome.counts
    assert (counts.num_known, counts.num_recalled, counts.num_captioned) == (3, 3, 3)


def test_the_time_left_is_that_of_what_has_to_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1060.0)
    # A minute of work for 20 captions and 10 failures; 900 were there, and 30 are only to be written again.
    counts = Counts(num_found=1000, num_present=900, num_known=40, num_recalled=10, began_s=1000.0)
    counts.num_captioned, counts.num_failed = 20, 10
    assert counts.remaining_s is None
    counts.scanned = True
    assert counts.remaining_s == pytest.approx(60.0)  # 30 to compute
    assert counts.items_per_s == pytest.approx(20 / 60)
