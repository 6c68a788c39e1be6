"""Runs at the edges: work that shards share, nothing to do, text that was read, names that are shared."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35mm.captioning.job import look_over
from qwen35mm.captioning.outputs import OutputSettings
from qwen35mm.captioning.progress import Counts
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.sources.scan import ScanOptions
from qwen35mm.captioning.texts.presets import preset_question
from qwen35mm.captioning.texts.prompts import PromptSet
from qwen35mm.errors import CaptioningError
from tests.captioning.fake_model import FakeModel, picture
from tests.captioning.runs import job, listed, run, settings, texts

pytestmark = pytest.mark.usefixtures("media_in_process")


async def test_only_what_is_read_off_a_picture_is_left_as_it_is(folder: Path) -> None:
    prompts = PromptSet([preset_question("ocr"), preset_question("short")])
    one = replace(job(folder, outputs=(f"jsonl:{folder}/a.jsonl",), run=settings()), prompts=prompts)
    await run(one, FakeModel(lambda asked: '"Tags: 100% cotton"'))
    lines = listed(folder / "a.jsonl")
    assert {line["caption"] for line in lines if "Write out" in line["prompt"]} == {'"Tags: 100% cotton"'}
    assert {line["caption"] for line in lines if "one sentence" in line["prompt"]} == {"100% cotton"}
    # Nothing of it is done again.
    model = FakeModel()
    assert (await run(one, model)).counts.num_present == 6
    # Text that was cleaned, or isn't any more, is other work.
    await run(replace(one, style=CaptionStyle(cleans=False)), model)
    assert 0 < len(model.asked) < 6


async def test_two_media_with_one_name_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    picture(9).save(folder / "0.jpg")
    await run(job(folder), FakeModel())
    assert "The caption of 0.png is in 0.png.txt" in caplog.text
    caplog.clear()
    (folder / "0.jpg").rename(folder / "other.jpg")
    (folder / "0.png").rename(folder / "another.png")
    await run(job(folder), FakeModel())
    assert "Most trainers" not in caplog.text


async def test_shards_that_a_run_wrote_below_its_source_are_no_source(folder: Path) -> None:
    shards = folder / "shards"
    both = ("sidecar", f"webdataset:{shards}")
    for outputs_of_it in (both, both, ("sidecar",)):
        outcome = await run(job(folder, outputs=outputs_of_it, run=settings()), FakeModel())
        assert outcome.counts.num_found == 6
    assert [path.name for path in shards.glob("*.tar")] == ["000000.tar"]
    with pytest.raises(CaptioningError, match="can't be its source"):
        await run(job(shards, outputs=(f"webdataset:{shards}",)), FakeModel())
    # Without a word of it in the manifest, and named itself, it is one.
    outcome = await run(job(shards, outputs=(f"jsonl:{folder}/a.jsonl",), run=settings()), FakeModel())
    assert outcome.counts.num_found == 6


async def test_without_anything_to_caption_the_exit_code_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no picture")
    outcome = await run(job(tmp_path), FakeModel())
    assert (outcome.exit_code, outcome.stopped, outcome.num_failures) == (3, None, 0)


async def test_shards_share_the_work(folder: Path) -> None:
    models = [FakeModel() for _ in range(3)]
    for number, model in enumerate(models, 1):
        await run(job(folder, scan=ScanOptions(shard=(number, 3))), model)
    assert sum(len(model.asked) for model in models) == 6
    assert len(texts(folder)) == 6


async def test_other_shards_do_nothing_again(folder: Path) -> None:
    for path in folder.rglob("*.png"):
        os.utime(path, (1, 1))
    (folder / "broken.png").write_bytes(b"")
    for number in range(1, 5):
        await run(job(folder, scan=ScanOptions(shard=(number, 4))), FakeModel())
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.txt")}
    total, model = Counts(), FakeModel()
    for number in range(1, 6):
        found = await look_over(job(folder, scan=ScanOptions(shard=(number, 5))), model.captioner())
        outcome = await run(job(folder, scan=ScanOptions(shard=(number, 5))), model)
        assert found.num_known == outcome.counts.num_present
        total.num_present += outcome.counts.num_present
        total.num_failed += outcome.counts.num_failed
    assert (model.asked, total.num_present, total.num_failed) == ([], 6, 1)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.txt")} == written
    # And all in one, with another prompt, knows that the texts are ours, and which are not.
    (folder / "0.txt").write_text("mine")
    outcome = await run(job(folder, "Something else?"), FakeModel(lambda asked: "Else."))
    assert (outcome.counts.num_captioned, outcome.counts.num_kept) == (5, 1)
    # What was written since is known when the work is dealt out as before.
    for number in range(1, 5):
        outcome = await run(job(folder, "Something else?", scan=ScanOptions(shard=(number, 4))), model)
        total.num_present += outcome.counts.num_present
    assert (model.asked, total.num_present) == ([], 11)


async def test_an_edited_improvement_stays_when_the_run_resumes(folder: Path) -> None:
    """The edit would be the next prompt's `{sidecar}`, and so another question."""
    (folder / "0.png").with_suffix(".txt").write_text("mine")
    improving = job(folder, "Better: {sidecar|none}", output_settings=OutputSettings("overwrite"))
    await run(improving, FakeModel(answer=lambda _: "Made by a model."))
    edits = {"0.txt": "Mine again.", "1.txt": "Mine, where nothing was."}
    for name, text in edits.items():
        (folder / name).write_text(text)
    outcome = await run(improving, FakeModel(answer=lambda _: "Made by a model."))
    assert (outcome.counts.num_kept, outcome.counts.num_captioned) == (2, 0)
    assert {name: (folder / name).read_text() for name in edits} == edits
