"""What a person should know of captions and of media without one: in records, in two files that grow, in numbers."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage

import qwen35mm_preprocess
from qwen35mm.assets import asset_path
from qwen35mm.captioning.records import MEDIUM_FLAGS
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.run import Run, RunSettings
from qwen35mm.captioning.texts.words import Words
from tests.captioning.fake_model import FakeModel, picture, seen_digest
from tests.captioning.outputs.helpers import rows_of
from tests.captioning.runs import failures, interrupted, job, listed, problems, run, settings, texts

pytestmark = pytest.mark.usefixtures("media_in_process")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A whole picture, three pages, a clip that is cut off, and half a picture."""
    folder = tmp_path / "odd"
    folder.mkdir()
    picture(0).save(folder / "whole.png")
    picture(1).save(folder / "pages.tiff", save_all=True, append_images=[picture(2), picture(3)])
    clip = asset_path("samples/moves-down.webm").read_bytes()
    (folder / "cut.webm").write_bytes(clip[: len(clip) * 3 // 5])
    (folder / "half.png").write_bytes((folder / "whole.png").read_bytes()[:60])
    return folder


async def test_what_was_not_seen_or_not_met_is_in_records_files_and_numbers(odd: Path) -> None:
    style = CaptionStyle(words=Words(("red",), ()), max_attempts=1)
    one = job(odd, outputs=("sidecar", f"jsonl:{odd}/all.jsonl"), style=style)
    outcome = await run(one, FakeModel())
    flags = {line["name"]: line["flags"] for line in listed(odd / "all.jsonl")}
    assert flags["whole.png"] == ["missing: red"]
    assert flags["pages.tiff"] == ["first page only: 1 of 3", "missing: red"]
    assert flags["cut.webm"][0].startswith("cut off: ")
    assert {row["name"]: row["flags"] for row in problems(odd)} == flags
    assert {row["path"] for row in problems(odd)} == {str(odd / name) for name in flags}
    assert outcome.failed == {"damaged": 1}
    assert outcome.flagged == {"missing": 3, "first page only": 1, "cut off": 1}
    # As long as it is so, and no longer.
    outcome = await run(one, FakeModel())
    assert (outcome.flagged["missing"], len(problems(odd)), len(failures(odd))) == (3, 3, 1)
    (odd / "cut.webm").unlink()
    (odd / "whole.txt").write_text("mine")
    outcome = await run(job(odd, style=style), FakeModel())
    assert [row["name"] for row in problems(odd)] == ["pages.tiff"]
    await run(job(odd, "Else?"), FakeModel())
    assert [row["flags"] for row in problems(odd)] == [["first page only: 1 of 3"]]


async def test_a_near_duplicate_has_the_flags_of_its_own_medium(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    one = job(folder, outputs=(f"jsonl:{folder}/all.jsonl",), run=RunSettings(max_distance=4))
    for number, pages in enumerate(([picture(2)], [], [picture(2), picture(3)])):
        picture(1).save(folder / f"{number}.tiff", save_all=True, append_images=pages)
        await run(one, FakeModel())
    found = [(line.get("shared_from"), line["flags"]) for line in listed(folder / "all.jsonl")]
    assert found[:2] == [(None, ["first page only: 1 of 2"]), ("0.tiff", [])]
    assert found[2] == ("0.tiff", ["first page only: 1 of 3"])


async def test_both_files_grow_while_the_run_goes_on(odd: Path) -> None:
    seen: list[tuple[int, int]] = []
    told = asyncio.Event()
    model = FakeModel(waits=lambda: not told.is_set() and len(model.asked) > 2)

    def both_grew(run: Run) -> bool:
        seen.append((len(problems(odd)), len(failures(odd))))
        if seen[-1] == (2, 1):
            told.set()
        return told.is_set()

    style = CaptionStyle(words=Words(("red",), ()), max_attempts=1)
    outcome = await asyncio.wait_for(interrupted(job(odd, style=style, run=settings(slots=1)), model, both_grew), 30)
    assert seen[-1] == (2, 1)
    assert outcome.stopped == "interrupted"
    # A line that a kill has torn is whole when the next run begins.
    path = odd / ".qwen35mm" / "problems.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    await run(job(odd, style=style), FakeModel())
    assert len(problems(odd)) == 3


async def test_sharing_is_taken_back_by_a_run_that_does_not_share(folder: Path) -> None:
    outputs = ("sidecar", f"jsonl:{folder}/all.jsonl", f"webdataset:{folder}/tars")
    sharing, alone = (
        job(folder, outputs=outputs, run=settings(slots=1, max_distance=distance)) for distance in (6, None)
    )
    await run(sharing, FakeModel())
    PILImage.open(folder / "0.png").resize((96, 64), PILImage.Resampling.NEAREST).save(folder / "larger.png")
    outcome = await run(sharing, FakeModel())
    assert (outcome.counts.num_shared, texts(folder)["larger.txt"]) == (1, texts(folder)["0.txt"])
    outcome = await run(sharing, again := FakeModel())
    assert (outcome.counts.num_present, again.asked) == (7, [])
    outcome = await run(alone, model := FakeModel())
    assert (len(model.asked), outcome.counts.num_captioned, outcome.counts.num_present) == (1, 1, 6)
    assert texts(folder)["larger.txt"] == f"A picture {seen_digest(folder / 'larger.png')[:8]}.\n"
    lines = {line["name"]: line for line in listed(folder / "all.jsonl")}
    assert (len(lines), [name for name, line in lines.items() if "shared_from" in line]) == (7, [])
    # Its own caption is better than a shared one, also where sharing is asked for again.
    for one in (sharing, alone):
        assert (await run(one, again := FakeModel())).counts.num_present == 7
        assert again.asked == []


OUTPUTS = ["sidecar", "jsonl:{}/a.jsonl", "parquet:{}", "webdataset:{}", "dataset:{}"]


async def test_media_that_are_gone_are_counted(folder: Path, tmp_path: Path) -> None:
    jobs = [job(folder, outputs=(output.format(tmp_path / output[:5]),)) for output in OUTPUTS]
    for one in jobs:
        assert (await run(one, FakeModel())).num_gone == 0
    (folder / "0.png").unlink()
    (folder / "more" / "4.png").unlink()
    # One that is only renamed isn't gone from records; its old text file is without a medium.
    (folder / "1.png").rename(folder / "renamed.png")
    assert [(await run(one, FakeModel())).num_gone for one in jobs] == [3, 2, 2, 2, 2]


def names_in(output: str, folder: Path) -> set[str]:
    """The media that an output has captions of."""
    if output == "sidecar":
        return {name.replace(".txt", ".png") for name in texts(folder)}
    return {row["name"] for row in rows_of(output)}


@pytest.mark.parametrize("output", OUTPUTS)
async def test_prune_takes_out_what_is_gone(folder: Path, tmp_path: Path, output: str) -> None:
    output = output.format(tmp_path / "out")
    one = job(folder, outputs=(output,))
    pruning = replace(one, run=settings(prune=True))
    await run(one, FakeModel())
    everything = {"0.png", "1.png", "2.png", "3.png", "more/4.png", "more/5.png"}
    assert names_in(output, folder) == everything
    removed = {path: path.read_bytes() for path in (folder / "0.png", folder / "more" / "4.png")}
    for path in removed:
        path.unlink()
    # A part of the work says nothing about the rest.
    for number in (8, 9):
        picture(number).save(folder / f"{number}.png")
    assert (await run(replace(one, run=settings(prune=True, limit=1)), FakeModel())).num_pruned == 0
    outcome = await run(pruning, again := FakeModel())
    assert (outcome.num_pruned, outcome.num_gone, outcome.exit_code, len(again.asked)) == (2, 0, 0, 1)
    assert names_in(output, folder) == {"1.png", "2.png", "3.png", "more/5.png", "8.png", "9.png"}
    assert (await run(pruning, FakeModel())).num_pruned == 0
    # What comes back is written again, without the model.
    for path, content in removed.items():
        path.write_bytes(content)
    assert (await run(pruning, again := FakeModel())).num_pruned == 0
    assert again.asked == []
    assert names_in(output, folder) == everything | {"8.png", "9.png"}


async def test_prune_leaves_what_somebody_wrote_and_a_folder_that_is_not_there(folder: Path) -> None:
    one = job(folder, run=settings(prune=True))
    await run(one, FakeModel())
    (folder / "0.txt").write_text("mine")
    (folder / "0.png").unlink()
    (folder / "1.png").unlink()
    outcome = await run(one, FakeModel())
    assert (outcome.num_pruned, outcome.num_gone, sorted(texts(folder))[:2]) == (1, 1, ["0.txt", "2.txt"])
    # Nothing at all is rather a disk that isn't mounted.
    for path in folder.rglob("*.png"):
        path.unlink()
    before = texts(folder)
    outcome = await run(one, FakeModel())
    assert (outcome.num_pruned, outcome.exit_code, texts(folder)) == (0, 3, before)


async def test_prune_leaves_what_is_of_other_sources_or_out_of_reach(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = f"jsonl:{tmp_path / 'all.jsonl'}"
    state = tmp_path / "state"
    await run(job(folder, outputs=(output,), state=state), FakeModel())
    (folder / "0.png").unlink()
    outcome = await run(job(folder / "more", outputs=(output,), state=state, run=settings(prune=True)), FakeModel())
    assert (outcome.num_pruned, outcome.num_gone) == (0, 1)
    lstat = os.lstat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if Path(path).name == "0.png":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return lstat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refuse)
        outcome = await run(job(folder, outputs=(output,), state=state, run=settings(prune=True)), FakeModel())
    assert (outcome.num_pruned, outcome.num_gone) == (0, 0)


def test_the_texts_that_make_flags_are_those_that_media_say() -> None:
    sources = Path(inspect.getfile(qwen35mm_preprocess)).parent.glob("*.py")
    said = "".join(path.read_text("utf-8") for path in sources)
    assert [text for text in MEDIUM_FLAGS if f'"{text}"' not in said] == []
