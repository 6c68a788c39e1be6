"""Which failures are listed and for how long, and what a stop leaves behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.ledger import Ledger
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs import OutputSettings
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.run import Run
from qwen35mm.errors import OutputError, RefusedError
from tests.captioning.fake_model import Asked, FakeModel, picture, seen_digest
from tests.captioning.runs import failures, interrupted, job, run, settings, texts

pytestmark = pytest.mark.usefixtures("media_in_process")


async def test_failures_of_what_is_gone_or_written_by_hand_are_forgotten(folder: Path) -> None:
    (folder / "bad.png").write_bytes((folder / "0.png").read_bytes()[:60])
    (folder / "odd.png").write_bytes((folder / "1.png").read_bytes()[:60])
    assert (await run(job(folder), FakeModel())).exit_code == 3
    (folder / "bad.png").unlink()
    await run(job(folder, run=settings(limit=1), outputs=("sidecar", f"jsonl:{folder}/all.jsonl")), FakeModel())
    outcome = await run(job(folder), FakeModel())
    assert ([failure["name"] for failure in failures(folder)], outcome.exit_code) == (["odd.png"], 3)
    (folder / "odd.txt").write_text("mine")
    outcome = await run(job(folder), FakeModel())
    assert (failures(folder), outcome.exit_code) == ([], 0)


async def test_failures_of_other_sources_stay(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "bad.png").write_bytes((folder / "0.png").read_bytes()[:60])
    captions = OutputSettings(folder=tmp_path / "captions")
    await run(job(other, output_settings=captions), FakeModel())
    assert (await run(job(folder, output_settings=captions), FakeModel())).num_failures == 1
    (other / "bad.png").unlink()
    assert (await run(job(folder, output_settings=captions), FakeModel())).exit_code == 0


async def test_a_file_that_changes_without_looking_changed_fails_once(folder: Path) -> None:
    path = folder / "0.png"
    whole = path.read_bytes()
    an_hour_ago = path.stat().st_mtime_ns - 3600 * 10**9
    for number, last in enumerate((b"A", b"B")):
        with path.open("r+b") as file:  # the bytes behind its end don't matter to a PNG
            file.write(whole + last)
        os.utime(path, ns=(an_hour_ago, an_hour_ago))
        outcome = await run(job(folder, f"{number}?"), FakeModel())
        assert outcome.counts.num_failed == number
    assert failures(folder)[0]["kind"] == "changed"
    assert (await run(job(folder, "1?"), FakeModel())).exit_code == 0


async def test_a_new_files_digest_is_not_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # However long the run takes to come to it, the file is new.
    monkeypatch.setattr("qwen35mm.captioning.manifest.manifest.SETTLED_S", 3600.0)
    await run(job(folder), FakeModel())
    path = folder / "0.png"
    status = path.stat()
    picture(99).save(folder / "other.png")
    data = (folder / "other.png").read_bytes()[: status.st_size].ljust(status.st_size, b"\0")
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    outcome = await run(job(folder, "Again?"), FakeModel())
    assert "changed" not in {failure["kind"] for failure in failures(folder)}
    assert outcome.counts.num_captioned >= 5


async def test_what_a_server_refuses_blocks_nothing(folder: Path) -> None:
    for seed in range(100, 112):
        picture(seed).save(folder / f"{seed}.png")
    refused = {seen_digest(path) for path in folder.glob("1??.png")}

    def answer(asked: Asked) -> str:
        if asked.digest in refused:
            raise RefusedError("The server refused the request with 400.")
        return "Fine."

    outcome = await run(job(folder, run=settings(slots=1)), FakeModel(answer))
    assert (outcome.counts.num_captioned, outcome.counts.num_failed, outcome.exit_code) == (6, 12, 3)
    assert {failure["kind"] for failure in failures(folder)} == {"refused"}
    model = FakeModel()
    await run(job(folder), model)
    assert model.asked == []
    assert (await run(job(folder, run=settings(retry_failed=True)), model)).exit_code == 0


async def test_what_failed_is_listed_under_each_name_it_has_now(folder: Path) -> None:
    style = CaptionStyle(max_attempts=1)
    await run(job(folder, style=style), FakeModel(lambda _: ""))
    (folder / "0.png").rename(folder / "renamed.png")
    (folder / "copy.png").write_bytes((folder / "1.png").read_bytes())
    outcome = await run(job(folder, style=style), FakeModel())
    assert outcome.counts.num_failed_before == outcome.num_failures == 7
    names = [failure["name"] for failure in failures(folder)]
    assert sorted(names) == ["1.png", "2.png", "3.png", "copy.png", "more/4.png", "more/5.png", "renamed.png"]


@pytest.mark.parametrize("at", ["manifest.listings.Listings.failed", "outputs.Sidecars.finish"])
async def test_a_disk_that_is_full_at_the_end_is_said_and_keeps_no_output_from_its_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def full(*_: Any) -> None:
        raise OutputError("The disk is full.", errno.ENOSPC)

    monkeypatch.setattr(f"qwen35mm.captioning.{at}", full)
    outcome = await run(job(folder, outputs=("sidecar", f"webdataset:{tmp_path}/tars")), FakeModel())
    assert (isinstance(outcome.stopped, OutputError), outcome.exit_code) == (True, 5)
    assert [path.name for path in (tmp_path / "tars").iterdir()] == ["000000.tar"]


async def test_a_bug_leaves_no_look_running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = 0, 0

    async def needs(self: Ledger, item: Item) -> Any:
        nonlocal began, ended
        began += 1
        if began == 2:
            raise AssertionError("a bug")
        try:
            await asyncio.sleep(1000)
        finally:
            ended += 1

    monkeypatch.setattr(Ledger, "needs", needs)
    with pytest.raises(AssertionError, match="a bug"):
        await run(job(folder, run=settings()), FakeModel())
    assert ended == began - 1 > 0


async def test_an_interruption_finishes_what_is_at_work(folder: Path) -> None:
    runs: list[Run] = []
    model = FakeModel(waits=lambda: not (runs and runs[-1].stopped))

    def both_at_work(run: Run) -> bool:
        runs.append(run)
        return model.num_at_once == 2

    outcome = await interrupted(job(folder, run=settings()), model, both_at_work)
    assert (outcome.exit_code, outcome.stopped) == (130, "interrupted")
    assert outcome.counts.num_captioned == len(texts(folder)) == len(model.asked) == 2
    assert outcome.counts.num_found == outcome.counts.num_over
    assert model.num_left == 0
    assert (await run(job(folder), FakeModel())).counts.num_captioned == 4


async def test_a_second_interruption_leaves_what_is_at_work(folder: Path) -> None:
    model = FakeModel(delay_s=1000.0)
    outcome = await interrupted(job(folder, run=settings()), model, lambda _: model.num_at_once == 2, times=2)
    assert (outcome.exit_code, model.num_left, texts(folder)) == (130, 2, {})


async def test_a_limit_that_was_reached_can_be_interrupted(folder: Path) -> None:
    model = FakeModel(delay_s=1000.0)
    one = job(folder, run=settings(limit=3))
    outcome = await interrupted(one, model, lambda run: run.stopped == "limit", times=2)
    assert outcome.exit_code == 130


async def test_a_deliberate_stop_is_no_death(folder: Path) -> None:
    for _ in range(4):
        model = FakeModel(delay_s=1000.0)
        await interrupted(job(folder, run=settings(slots=1)), model, lambda _, model=model: bool(model.asked), times=2)
        assert len(model.asked) == 1
    assert (await run(job(folder), FakeModel())).exit_code == 0


async def test_what_fails_when_nobody_waits_any_more_prints_nothing(
    manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    ledger, begun, cancelled = Ledger(manifest, (), cast(Any, None), cast(Any, None)), Event(), Event()

    def fails() -> None:
        begun.set()
        cancelled.wait(10)
        raise OutputError("The disk is full.", errno.ENOSPC)

    task = asyncio.create_task(ledger.do(fails))
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    cancelled.set()
    # In the same thread, and so behind it.
    await ledger.do(list)
    # It holds the frame that holds what has failed.
    del task
    gc.collect()
    await ledger.close(complete=False)
    assert caplog.text == ""
