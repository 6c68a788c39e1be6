"""A whole run, with a model that says what the test wants."""

from __future__ import annotations

import errno
import os
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from qwen35mm.captioning.job import carry_out, default_workers, look_over
from qwen35mm.captioning.manifest import files
from qwen35mm.captioning.outputs import OutputSettings, parse_output
from qwen35mm.captioning.outputs.sidecar import Sidecars
from qwen35mm.captioning.records import Record
from qwen35mm.captioning.requests import CaptionRequest, CaptionStyle
from qwen35mm.captioning.run import Run
from qwen35mm.captioning.texts.words import Words
from qwen35mm.errors import CaptioningError, EngineError, OutputError
from tests.captioning.fake_model import Asked, FakeModel, picture, seen_digest
from tests.captioning.runs import failures, job, listed, run, settings, texts
from tests.forked import PATIENCE_S

pytestmark = pytest.mark.usefixtures("media_in_process")


async def test_everything_gets_its_caption_once_and_a_second_run_asks_nothing(folder: Path) -> None:
    model, one = FakeModel(), job(folder, outputs=("sidecar", f"jsonl:{folder}/all.jsonl"), run=settings())
    # However long the second one takes to be read.
    model.waits = lambda: model.most_at_once < 2
    outcome = await run(one, model)
    assert (outcome.exit_code, outcome.counts.num_captioned, outcome.stopped) == (0, 6, None)
    assert sorted(texts(folder)) == ["0.txt", "1.txt", "2.txt", "3.txt", "more/4.txt", "more/5.txt"]
    lines = listed(folder / "all.jsonl")
    by_name = {line["name"]: line["caption"] for line in lines}
    assert len(lines) == len(set(by_name.values())) == 6
    assert {name.replace(".png", ".txt"): f"{text}\n" for name, text in by_name.items()} == texts(folder)
    assert model.most_at_once == 2
    again = FakeModel()
    outcome = await run(one, again)
    assert (outcome.counts.num_present, again.asked, outcome.exit_code) == (6, [], 0)


async def test_another_prompt_or_model_is_new_work_and_a_renamed_file_is_not(folder: Path) -> None:
    await run(job(folder), FakeModel())
    before = texts(folder)
    (folder / "0.txt").unlink()
    (folder / "0.png").rename(folder / "renamed.png")
    model = FakeModel()
    outcome = await run(job(folder), model)
    assert (outcome.counts.num_recalled, outcome.counts.num_present, model.asked) == (1, 5, [])
    assert texts(folder)["renamed.txt"] == before["0.txt"]
    for changed, identity in ((job(folder, "Something else?"), "fake"), (job(folder), "other")):
        again = FakeModel(lambda asked: f"Now {asked.question}")
        outcome = await run(changed, again, identity=identity)
        assert (outcome.counts.num_captioned, len(again.asked)) == (6, 6)
        assert set(texts(folder).values()) == {f"Now {changed.prompts.questions[0].text}\n"}


async def test_what_the_same_model_has_done_elsewhere_is_not_done_again(folder: Path) -> None:
    outputs = ("sidecar", f"jsonl:{folder}/all.jsonl")
    there, here = FakeModel().captioner("there"), FakeModel()
    await carry_out(job(folder, outputs=outputs), there)
    files = {path: path.read_bytes() for path in folder.rglob("*.*") if ".qwen35mm" not in path.parts}
    captioner = replace(here.captioner("here"), others=[there.describe()])
    outcome = await carry_out(job(folder, outputs=outputs), captioner)
    assert (outcome.counts.num_present, here.asked) == (6, [])
    picture(50).save(folder / "new.png")
    await carry_out(job(folder, outputs=outputs), captioner)
    # Without the others, only the new one is known.
    outcome = await carry_out(job(folder, outputs=outputs), here.captioner("here"))
    assert (outcome.counts.num_present, outcome.counts.num_captioned, len(here.asked)) == (1, 6, 7)
    assert all(path.read_bytes() == content for path, content in files.items() if path.suffix != ".jsonl")


async def test_a_persons_text_stays(folder: Path) -> None:
    (folder / "1.txt").write_text("mine")
    await run(job(folder), FakeModel())
    (folder / "2.txt").write_text("edited by hand")
    model = FakeModel()
    outcome = await run(job(folder, "Something else?"), model)
    assert (outcome.counts.num_kept, outcome.counts.num_captioned) == (2, 4)
    assert (texts(folder)["1.txt"], texts(folder)["2.txt"]) == ("mine", "edited by hand")
    one = job(folder, "{sidecar|nothing} more?", output_settings=OutputSettings("overwrite"))
    await run(one, model := FakeModel())
    assert sorted(asked.question for asked in model.asked)[:2] == ["edited by hand more?", "mine more?"]
    await run(one, again := FakeModel())
    assert again.asked == [], "what we wrote ourselves is nobody's text to begin from"


@pytest.mark.parametrize("outputs", [("sidecar:.caption",), ("jsonl:all.jsonl",)])
async def test_a_prompt_gets_the_text_beside_a_medium_wherever_captions_go(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "1.txt").write_text("my tags")
    captions = OutputSettings(folder=tmp_path / "captions")
    for number in range(2):
        model = FakeModel()
        await run(job(folder, f"{number} {{sidecar|none}}", outputs=outputs, output_settings=captions), model)
        questions = sorted(asked.question for asked in model.asked)
        assert questions == [f"{number} my tags", *[f"{number} none"] * 5]


async def test_the_next_caption_is_asked_for_while_an_output_waits_for_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_next, write, wait_for_slot = threading.Event(), Sidecars.write, Run._wait_for_slot
    waited: list[bool] = []
    ready: list[CaptionRequest] = []

    async def counted(self: Run, request: CaptionRequest, *args: Any) -> None:
        ready.append(request)
        await wait_for_slot(self, request, *args)

    def slow(self: Sidecars, record: Record) -> None:
        waited.append(asked_next.wait(PATIENCE_S))
        write(self, record)

    def answer(asked: Asked) -> str:
        if len(model.asked) == 2:
            asked_next.set()
        return "A picture."

    def next_is_on_its_way() -> bool:
        return len(ready) < min(6, len(model.asked) + 1)

    monkeypatch.setattr(Sidecars, "write", slow)
    monkeypatch.setattr(Run, "_wait_for_slot", counted)
    # A reply ends when the next medium is there: what prepares it takes turns with what writes, on one thread.
    model = FakeModel(answer, waits=next_is_on_its_way)
    outcome = await run(job(folder, run=settings(slots=1)), model)
    assert (outcome.exit_code, waited) == (0, [True] * 6)


async def test_the_same_bytes_are_asked_once(folder: Path) -> None:
    for number in range(8):
        (folder / f"copy-{number}.png").write_bytes((folder / "0.png").read_bytes())
    model = FakeModel(delay_s=0.01)
    outcome = await run(job(folder), model)
    assert len(model.asked) == 6
    assert (outcome.counts.num_captioned, outcome.counts.num_shared + outcome.counts.num_recalled) == (6, 8)
    assert len(texts(folder)) == 14
    named = FakeModel()
    await run(job(folder, "What is {name}?"), named)
    assert len(named.asked) == 14


@pytest.mark.parametrize("embed_media", [False, True])
async def test_the_runs_own_rows_are_no_source(folder: Path, embed_media: bool) -> None:
    """In a folder of folders, parquet files in `data` look like a dataset."""
    for number in range(4):
        (folder / f"{number}.png").rename(folder / "more" / f"{number}.png")
    one = job(folder, outputs=(f"parquet:{folder}/data",), output_settings=OutputSettings(embed_media=embed_media))
    assert (await run(one, FakeModel())).counts.num_captioned == 6
    picture(7).save(folder / "more" / "new.png")
    counts = (await run(one, FakeModel())).counts
    assert (counts.num_captioned, counts.num_present) == (1, 6)


@pytest.mark.parametrize("kind", ["dataset", "parquet"])
async def test_a_source_is_no_output(folder: Path, kind: str) -> None:
    """Each run would add a copy of every picture, and the next one caption the copies."""
    (folder.parent / "link").symlink_to(folder)
    (folder.parent / "list.txt").write_text("media\n")
    one = job(folder, outputs=(f"{kind}:{folder.parent}/link",))
    with pytest.raises(CaptioningError, match="'media' is an output"):
        await run(one, FakeModel())
    with pytest.raises(CaptioningError, match="'media' is an output"):
        one.check()
    outcome = await run(replace(one, sources=[f"@{folder.parent}/list.txt"]), FakeModel())
    assert (outcome.counts.num_found, outcome.counts.num_failed) == (1, 1)


async def test_near_duplicates_share_a_caption_where_that_is_asked_for(folder: Path) -> None:
    picture(0).resize((96, 64)).save(folder / "larger.jpg", quality=90)
    one = job(folder, run=settings(slots=1, max_distance=6))
    model = FakeModel()
    outcome = await run(replace(one, outputs=[parse_output(f"jsonl:{folder}/all.jsonl")]), model)
    assert (outcome.counts.num_captioned, outcome.counts.num_shared) == (6, 1)
    lines = {line["name"]: line for line in listed(folder / "all.jsonl")}
    assert lines["larger.jpg"]["caption"] == lines["0.png"]["caption"]
    assert lines["larger.jpg"]["shared_from"] == "0.png"
    assert (lines["larger.jpg"]["width"], lines["larger.jpg"]["height"]) == (96, 64), "its own size"
    assert lines["larger.jpg"]["num_generated_tokens"] == 0, "the model wrote nothing for it"
    (folder / "smaller.webp").write_bytes((folder / "larger.jpg").read_bytes() + b"\0")
    again = FakeModel()
    await run(replace(one, outputs=[parse_output(f"jsonl:{folder}/all.jsonl")]), again)
    assert again.asked == []


async def test_failures_stop_nothing_and_are_listed(folder: Path) -> None:
    odd = os.fsdecode(b"caf\xe9.png")
    for name, num_bytes in (("broken.png", 60), (odd, 61)):
        (folder / name).write_bytes((folder / "0.png").read_bytes()[:num_bytes])
    (folder / "empty.jpg").write_bytes(b"")

    def answer(asked: Asked) -> str:
        if asked.digest == refused:
            raise EngineError("It failed.")
        return "Fine."

    refused = seen_digest(folder / "0.png")
    outcome = await run(job(folder), FakeModel(answer))
    assert (outcome.counts.num_captioned, outcome.counts.num_failed, outcome.exit_code) == (5, 4, 3)
    found = {failure["name"]: failure for failure in failures(folder)}
    assert {name: failure["kind"] for name, failure in found.items()} == {
        "0.png": "engine",
        "broken.png": "damaged",
        "caf\\xe9.png": "damaged",
        "empty.jpg": "unreadable",
    }
    assert found["broken.png"]["path"] == str(folder / "broken.png")
    assert all(name in found[name]["message"] for name in ("broken.png", "caf\\xe9.png"))

    again = FakeModel()
    outcome = await run(job(folder), again)
    assert (len(again.asked), outcome.counts.num_captioned) == (1, 1), "what may pass is tried again"
    for seed, name in enumerate(("broken.png", odd, "empty.jpg"), 97):
        picture(seed).save(folder / name)
    assert (await run(job(folder), FakeModel())).exit_code == 0
    assert failures(folder) == []


async def test_a_lasting_failure_is_tried_again_only_where_that_is_asked_for(folder: Path) -> None:
    style = CaptionStyle(max_attempts=2)
    outcome = await run(job(folder, style=style), FakeModel(lambda _: ""))
    assert (outcome.counts.num_failed, outcome.exit_code) == (6, 4)
    model = FakeModel()
    outcome = await run(job(folder, style=style), model)
    assert (outcome.counts.num_failed_before, model.asked, outcome.exit_code) == (6, [], 4)
    outcome = await run(job(folder, style=style, run=settings(retry_failed=True)), model)
    assert (outcome.counts.num_captioned, outcome.exit_code) == (6, 0)


@pytest.mark.parametrize("outputs", [("sidecar", "jsonl:{}"), ("jsonl:{}", "sidecar")])
async def test_what_one_output_cant_take_goes_to_the_others(folder: Path, outputs: tuple[str, ...]) -> None:
    """The text beside a picture is in another encoding, and nothing lies beside the members of a tar."""
    (folder / "0.txt").write_bytes(b"caf\xe9")
    with tarfile.open(folder.parent / "more.tar", "w") as tar:
        tar.add(folder / "0.png", "inside.png")
    lines = folder.parent / "all.jsonl"
    one = job(folder, outputs=[text.format(lines) for text in outputs], output_settings=OutputSettings("append"))
    one = replace(one, sources=[*one.sources, str(folder.parent / "more.tar")])
    for num_done in (5, 0):
        outcome = await run(one, FakeModel())
        assert (outcome.counts.num_failed, outcome.counts.num_done, outcome.exit_code) == (2, num_done, 3)
        assert {failure["name"] for failure in failures(folder)} == {"0.png", "more.tar/inside.png"}
        assert len(listed(lines)) == 7
    assert (await look_over(one, FakeModel().captioner())).num_known == 7


async def test_flags_reach_the_record(folder: Path) -> None:
    style = CaptionStyle(words=Words(required=("blue",)), max_attempts=2)
    one = job(folder, style=style, outputs=(f"jsonl:{folder}/all.jsonl",))
    outcome = await run(one, FakeModel(lambda _: "green"))
    lines = listed(folder / "all.jsonl")
    assert [(line["caption"], line["flags"]) for line in lines] == [("green", ["missing: blue"])] * 6
    assert outcome.counts.num_retries == 6


async def test_a_limit_ends_the_run_and_the_next_goes_on(folder: Path) -> None:
    for done in (2, 4, 6):
        outcome = await run(job(folder, run=settings(limit=2)), FakeModel())
        assert outcome.counts.num_captioned == 2
        assert outcome.exit_code == 0
        assert len(texts(folder)) == done


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
async def test_a_disk_that_takes_nothing_ends_the_run_cleanly(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    create = files.create

    def failing(path: Path) -> BinaryIO:
        # What the run tells of itself lies elsewhere.
        if len(texts(folder)) == 3 and ".qwen35mm" not in path.parts:
            raise OSError(number, os.strerror(number))
        return create(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "create", failing)
        outcome = await run(job(folder, run=settings()), FakeModel())
    assert isinstance(outcome.stopped, OutputError)
    assert (outcome.exit_code, len(texts(folder))) == (5, 3)
    model = FakeModel()
    outcome = await run(job(folder), model)
    assert outcome.exit_code == 0
    assert len(texts(folder)) == 6
    assert len(model.asked) <= 3, "what was captioned is in the manifest"


async def test_a_server_that_is_gone_ends_the_run(folder: Path) -> None:
    for seed in range(100, 108):
        picture(seed).save(folder / f"{seed}.png")

    def gone(_: Asked) -> str:
        raise EngineError("Nobody answers.")

    model = FakeModel(gone)
    outcome = await run(job(folder, run=settings(slots=1)), model)
    assert isinstance(outcome.stopped, EngineError)
    assert (outcome.exit_code, len(model.asked)) == (5, 10)


async def test_an_item_on_which_the_program_dies_is_let_off(folder: Path) -> None:
    class Died(BaseException):
        pass

    def die(asked: Asked) -> str:
        if asked.digest == deadly:
            raise Died
        return "Fine."

    deadly = seen_digest(folder / "3.png")
    for number in range(6):
        with pytest.raises(Died):
            await run(job(folder, run=settings(slots=1)), FakeModel(die))
        # Three times it may have been chance; then it waits until everything else is done.
        assert len(texts(folder)) == (3 if number < 3 else 5)
    outcome = await run(job(folder), FakeModel(die))
    assert (outcome.counts.num_failed, outcome.exit_code) == (1, 3)
    assert failures(folder)[0]["kind"] == "deadly"


async def test_a_dry_run_says_what_would_be_done_and_writes_nothing(folder: Path) -> None:
    (folder / "1.txt").write_text("mine")
    (folder / "broken.png").write_bytes(b"")
    before = sorted(path for path in folder.rglob("*"))
    model = FakeModel()
    found = await look_over(job(folder), model.captioner())
    assert (found.num_to_caption, found.num_kept, found.num_unreadable, found.num_tried) == (5, 1, 1, 3)
    assert found.num_media_tokens > 0
    assert found.remaining_s is not None
    assert sorted(path for path in folder.rglob("*")) == before
    await run(job(folder, run=settings(limit=2)), model)
    state = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = await look_over(job(folder), model.captioner())
    assert (found.num_to_caption, found.num_known) == (3, 2)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == state


async def test_where_a_source_takes_no_manifest_it_lies_beside_the_first_output(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))
    out = tmp_path / "out"
    one = job(folder, outputs=(f"jsonl:{out}/all.jsonl",))
    assert one.state_folder == out / ".qwen35mm"
    (folder / "broken.png").write_bytes(b"")
    await run(one, FakeModel())
    assert [failure["name"] for failure in listed(out / ".qwen35mm" / "failures.jsonl")] == ["broken.png"]
    assert not (folder / ".qwen35mm").exists()
    model = FakeModel()
    for path in (folder, out):
        path.rename(tmp_path / f"moved-{path.name}")
    folder, out = tmp_path / "moved-media", tmp_path / "moved-out"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))
    await run(job(folder, outputs=(f"jsonl:{out}/all.jsonl",)), model)
    assert model.asked == []
    assert {line["path"] for line in listed(out / "all.jsonl")} == {str(path) for path in folder.rglob("?.png")}
    # Text files are where their media are, or nowhere.
    assert job(folder).state_folder == folder / ".qwen35mm"


def test_media_workers_grow_with_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers in ((1, 1), (8, 4), (64, 16)):
        monkeypatch.setattr("qwen35mm.captioning.job.usable_cores", lambda cores=cores: cores)
        assert default_workers() == workers
