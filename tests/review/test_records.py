"""Going through a file of records: what is in it then, what a later run makes of it, and what is refused."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import asset_path
from qwen35mm.captioning.job import Job, Outcome
from qwen35mm.captioning.outputs import OutputSettings
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.texts.json_schema import JsonSchema
from qwen35mm.errors import CaptioningError, NotFoundError, OutputError, StorageError
from qwen35mm.review.changes import ChangedError, Undone
from qwen35mm.review.collection import Search
from qwen35mm.review.records import RecordsFile
from tests.captioning.fake_model import FakeModel, picture
from tests.captioning.kills import full_at, killed_at, needs_fork, stops
from tests.captioning.runs import job, listed, run, settings

pytestmark = pytest.mark.usefixtures("media_in_process")


@pytest.fixture
def path(folder: Path) -> Path:
    return folder.parent / "captions.jsonl"


def job_of(folder: Path, *questions: str, **options: Any) -> Job:
    return job(folder, *questions, outputs=[f"jsonl:{folder.parent / 'captions.jsonl'}"], **options)


async def captioned(folder: Path, *questions: str, says: str = "Made by a model.", **options: Any) -> Outcome:
    model = FakeModel(answer=lambda _: says, finish_reason="length")
    return await run(job_of(folder, *questions, **options), model)


def look(reviewed: RecordsFile) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in reviewed.describe(reviewed.look())}


def found(reviewed: RecordsFile, **search: Any) -> list[str]:
    return [item["name"] for item in reviewed.describe(reviewed.find(Search(**search))["numbers"])]


def edit(path: Path, **texts: str) -> None:
    """Saves texts by their media's stems."""
    with closing(RecordsFile(path)) as reviewed:
        for name, item in look(reviewed).items():
            if (text := texts.get(f"_{Path(name).stem}")) is not None:
                reviewed.save(item["number"], text, item["digest"], "")


def captions(path: Path) -> dict[str, str]:
    """Caption by name; every name once."""
    lines = listed(path)
    assert len({line["name"] for line in lines}) == len(lines), "an item twice"
    return {line["name"]: line["caption"] for line in lines}


def asides(path: Path) -> list[Path]:
    return [found for found in path.parent.rglob(f".qwen35mm/backups/**/{path.name}") if found.is_file()]


async def test_what_a_person_writes_is_in_the_file_and_stays_whatever_runs_later(folder: Path, path: Path) -> None:
    await captioned(folder)
    before = listed(path)
    edit(path, _0="Written by a person, é.", _5="Another.")
    after = listed(path)
    assert [line["name"] for line in after] == [line["name"] for line in before], "in the old order"
    assert after[0] == before[0] | {"caption": "Written by a person, é.", "flags": ["edited"]}
    assert after[1:5] == before[1:5]
    outcome = await captioned(folder)
    assert (outcome.counts.num_kept, outcome.counts.num_captioned) == (2, 0)
    outcome = await captioned(folder, "Another question?", says="Made again.")
    assert (outcome.counts.num_kept, outcome.counts.num_captioned) == (2, 4)
    theirs = {"0.png": "Written by a person, é.", "more/5.png": "Another."}
    assert captions(path) == dict.fromkeys(captions(path), "Made again.") | theirs
    assert (outcome.flagged, asides(path)) == ({"truncated": 4}, [])
    # Also where another output wants a caption of all of them, and where the lines are to stand behind others.
    text_files = job(folder, "A third?", outputs=["sidecar", f"jsonl:{path}"])
    await run(text_files, FakeModel(answer=lambda _: "A third."))
    await captioned(folder, "A fourth?", says="A fourth.", output_settings=OutputSettings("append"))
    assert captions(path) == dict.fromkeys(captions(path), "A fourth.") | theirs


async def test_overwriting_keeps_the_file_as_it_was(folder: Path, path: Path) -> None:
    await captioned(folder)
    edit(path, _0="Mine.", _1="Mine, too.")
    edited = path.read_bytes()
    await captioned(folder, output_settings=OutputSettings("overwrite"))
    assert set(captions(path).values()) == {"Made by a model."}
    assert [aside.read_bytes() for aside in asides(path)] == [edited]
    outcome = await captioned(folder, output_settings=OutputSettings("overwrite"))
    assert (outcome.counts.num_present, len(asides(path))) == (6, 1)
    # What a person makes of it then stays when the run resumes, also under another name.
    edit(path, _0="Mine again.", _1="Mine, too, again.")
    (folder / "1.png").rename(folder / "one.png")
    await captioned(folder, output_settings=OutputSettings("overwrite"))
    assert (captions(path)["0.png"], captions(path)["one.png"]) == ("Mine again.", "Mine, too, again.")
    assert len(asides(path)) == 1


async def test_an_edit_goes_along_with_a_renamed_file_and_isnt_pruned(folder: Path, path: Path) -> None:
    await captioned(folder)
    edit(path, _0="Mine.", _1="Mine, too.")
    (folder / "0.png").rename(folder / "renamed.png")
    (folder / "1.png").unlink()
    await captioned(folder, run=settings(prune=True))
    expected = dict.fromkeys(["2.png", "3.png", "more/4.png", "more/5.png"], "Made by a model.")
    assert captions(path) == expected | {"renamed.png": "Mine.", "1.png": "Mine, too."}
    # With another prompt it isn't known for the same, and nothing of a person goes for that.
    (folder / "renamed.png").rename(folder / "0.png")
    await captioned(folder, "Another question?", says="Made again.")
    assert captions(path) | {"renamed.png": "Mine.", "0.png": "Made again."} == captions(path)


async def test_changes_are_taken_back_and_what_was_accepted_is_remembered(folder: Path, path: Path) -> None:
    await captioned(folder)
    before = path.read_bytes()
    with closing(RecordsFile(path)) as reviewed:
        first, second, *_ = look(reviewed).values()
        reviewed.accept(second["number"], second["digest"], True)
        reviewed.accept(first["number"], first["digest"], True)
        digest = first["digest"]
        # What is being written is saved again and again, and is one change.
        for text in ("New", "New text", "New text."):
            digest = reviewed.save(first["number"], text, digest, "writing")["digest"]
        with pytest.raises(ChangedError, match=r"captions\.jsonl was changed meanwhile"):
            reviewed.save(first["number"], "From another page.", first["digest"], "")
        assert (look(reviewed)["0.png"]["accepted"], reviewed.counts()["changes"]) == (False, 3)
        assert [line["caption"] for line in listed(path)][-1] == "New text.", "it is on the disk at once"
        assert reviewed.undo() == Undone([first["number"]])
        item = look(reviewed)["0.png"]
        assert (item["text"], item["accepted"], item["flags"]) == ("Made by a model.", True, ["truncated"])
        reviewed.undo()
    assert path.read_bytes() == before, "nothing is left of it"
    with closing(RecordsFile(path)) as reviewed:
        reviewed.look()
        assert found(reviewed, show="accepted") == ["1.png"]
    await captioned(folder, "Another question?", says="Made again.")
    with closing(RecordsFile(path)) as reviewed:
        assert found(reviewed, show="accepted") == [], "it was another text that was accepted"


async def test_items_are_found(folder: Path, path: Path) -> None:
    await captioned(folder)
    edit(path, _0="A Grüner Ball", _1="")
    with closing(RecordsFile(path)) as reviewed:
        assert found(reviewed, words="ball grüner") == ["0.png"]
        assert found(reviewed, show="empty") == ["1.png"]
        assert reviewed.find(Search())["flags"] == {"edited": 2, "truncated": 4}
        assert found(reviewed, flag="edited", min_chars=1) == ["0.png"]
        item = look(reviewed)["more/4.png"]
        assert (item["file"], item["prompt"], item["model"]) == ("captions.jsonl", "Describe it.", "Fake-1B")
        assert reviewed.medium(item["number"])[1] == folder / "more" / "4.png"
        (folder / "more" / "4.png").unlink()
        with pytest.raises(NotFoundError):
            reviewed.medium(item["number"])


async def test_one_at_a_time_writes_the_file(folder: Path, path: Path) -> None:
    await captioned(folder)
    for for_page, holder in ((True, "The review page"), (False, "Another run")):
        with closing(RecordsFile(path, for_page=for_page)):
            with pytest.raises(CaptioningError, match=rf"{holder} \(process \d+\)"):
                await captioned(folder)
            with pytest.raises(CaptioningError, match=rf"{holder} \(process \d+\)"):
                RecordsFile(path)

    async def begun(_: object) -> None:
        with pytest.raises(CaptioningError, match=r"Another run \(process \d+\)"):
            RecordsFile(path)

    outcome = await run(job_of(folder), FakeModel(), begun=begun)
    assert outcome.exit_code == 0


async def test_what_somebody_else_did_to_the_file_meanwhile_is_moved_aside(folder: Path, path: Path) -> None:
    await captioned(folder)
    with closing(RecordsFile(path)) as reviewed:
        for number, change in enumerate((lambda content: content + b'{"name": "mine"}\n', lambda _: b"mine", None)):
            item = look(reviewed)[f"{number}.png"]
            reviewed.save(item["number"], "First", item["digest"], "")
            changed = None if change is None else change(path.read_bytes())
            if changed is None:
                path.unlink()
            else:
                # As an editor does that writes beside and renames.
                path.with_suffix(".new").write_bytes(changed)
                path.with_suffix(".new").replace(path)
            item = look(reviewed)[f"{number}.png"]
            reviewed.save(item["number"], f"Text {number}.", item["digest"], "")
            if changed is not None:
                assert changed in [aside.read_bytes() for aside in asides(path)]
    assert len(asides(path)) == 2
    assert captions(path) == dict.fromkeys(captions(path), "Made by a model.") | {
        f"{number}.png": f"Text {number}." for number in range(3)
    }


async def test_json_stays_json(folder: Path, path: Path) -> None:
    style = CaptionStyle(schema=JsonSchema.read('{"type": "object"}'))
    await captioned(folder, says='{"shape": "circle"}', style=style)
    edit(path, _0='{"shape": "star", "é": [1]}')
    assert listed(path)[0]["data"] == {"shape": "star", "é": [1]}
    before = path.read_bytes()
    with pytest.raises(StorageError, match="has to stay JSON"):
        edit(path, _1="A star.")
    assert path.read_bytes() == before


async def test_the_manifest_is_found_beside_the_file_and_by_the_media(
    folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await captioned(folder)
    edit(path, _0="Above its media.")
    monkeypatch.chdir(path.parent)
    edit(Path("captions.jsonl"), _1="By a short name.")
    path.with_name("link.jsonl").symlink_to(path)
    edit(path.with_name("link.jsonl"), _2="By a link.")
    beside, far = folder.parent / "beside.jsonl", folder.parent / "far.jsonl"
    elsewhere = folder.parent / "runs" / "state"
    for target, state in ((beside, folder.parent / ".qwen35mm"), (far, elsewhere)):
        await run(job(folder, outputs=[f"jsonl:{target}"], state=state), FakeModel())
    edit(beside, _3="Beside it.")
    with pytest.raises(CaptioningError, match=r"No manifest .* knows far\.jsonl.*--state-dir"):
        RecordsFile(far)
    with closing(RecordsFile(far, state=elsewhere)) as reviewed:
        assert found(reviewed, flag="edited") == []
    with closing(RecordsFile(path)) as reviewed:
        assert found(reviewed, flag="edited") == ["0.png", "1.png", "2.png"]
    # A file that nobody's run wrote.
    other = folder / "other.jsonl"
    other.write_text('{"path": 3}\n[]\n\nno JSON\n{"path": "0.png", "caption": "?"}\n')
    with pytest.raises(CaptioningError, match=r"No manifest .* knows other\.jsonl"):
        RecordsFile(other)


async def test_a_dataset_folders_rows_are_edited_in_both_of_their_files(folder: Path) -> None:
    target = folder.parent / "set"
    shutil.copy(asset_path("samples") / "moves-right.mp4", folder / "clip.mp4")
    one = job(folder, outputs=[f"dataset:{target}"])
    await run(one, FakeModel())
    picture(9).resize((24, 16)).save(target / "images" / "0.png")
    with closing(RecordsFile(target / "metadata.jsonl", near=[folder])) as reviewed:
        items = look(reviewed)
        assert (reviewed.title, items["clip.mp4"]["file"], items["clip.mp4"]["kind"]) == ("set", "set", "video")
        assert reviewed.medium(items["0.png"]["number"])[1] == target / "images" / "0.png", "as somebody has cropped it"
        for name in ("0.png", "clip.mp4"):
            reviewed.save(items[name]["number"], f"Mine: {name}.", items[name]["digest"], "")
    outcome = await run(one, FakeModel())
    assert (outcome.counts.num_kept, outcome.counts.num_captioned) == (2, 0)
    for file, number in (("metadata.jsonl", 7), ("images.jsonl", 6), ("videos.jsonl", 1)):
        rows = {Path(row["file_name"]).name: row for row in listed(target / file)}
        assert len(rows) == len(listed(target / file)) == number
        for name in {"0.png", "clip.mp4"} & set(rows):
            assert (rows[name]["text"], rows[name]["flags"]) == (f"Mine: {name}.", '["edited"]')
    # A medium that was taken out of the folder is put there again, with the person's words.
    (target / "images" / "0.png").unlink()
    await run(one, FakeModel())
    assert (target / "images" / "0.png").read_bytes() == (folder / "0.png").read_bytes()
    texts = {row["file_name"]: row["text"] for row in listed(target / "metadata.jsonl")}
    assert texts["images/0.png"] == "Mine: 0.png."


async def test_media_in_a_tar_have_captions_to_edit_and_cant_be_shown(folder: Path, path: Path) -> None:
    with tarfile.open(folder.parent / "all.tar", "w") as tar:
        tar.add(folder / "0.png", "0.png")
    await run(job(folder.parent / "all.tar", outputs=[f"jsonl:{path}"]), FakeModel())
    edit(path, _0="Mine.")
    assert captions(path) == {"all.tar/0.png": "Mine."}
    with closing(RecordsFile(path)) as reviewed:
        (item,) = look(reviewed).values()
        assert item["version"] == ""
        with pytest.raises(StorageError, match="lies in another file"):
            reviewed.medium(item["number"])


class Sessions:
    """A person at the page: edits, one text in steps, accepts and takes back; then it ends."""

    def __init__(self, folder: Path, path: Path) -> None:
        self._path, self._state = path, folder / ".qwen35mm"
        self._begun = folder.parent / "begun"
        shutil.copytree(self._state, self._begun)
        self._lines = path.read_bytes()
        self.model = captions(path)

    def reset(self) -> None:
        shutil.rmtree(self._state)
        shutil.copytree(self._begun, self._state)
        self._path.write_bytes(self._lines)

    def go(self) -> None:
        with closing(RecordsFile(self._path)) as reviewed:
            first, second, third, *_ = look(reviewed).values()
            digest = first["digest"]
            for text in ("Mi", "Mine."):
                digest = reviewed.save(first["number"], text, digest, "writing")["digest"]
            reviewed.accept(first["number"], digest, True)
            reviewed.save(second["number"], "Wrong.", second["digest"], "")
            reviewed.undo()
            reviewed.save(third["number"], "Mine, too.", third["digest"], "")

    def check(self) -> None:
        """Whatever was done of it: each record once, with a text that it had; the manifest says the same."""
        with closing(RecordsFile(self._path)) as reviewed:
            known = {name: item["text"] for name, item in look(reviewed).items()}
        assert captions(self._path) == known
        assert asides(self._path) == []
        may_be = {"0.png": ("Mi", "Mine."), "1.png": ("Wrong.",), "2.png": ("Mine, too.",)}
        for name, text in known.items():
            assert text in (self.model[name], *may_be.get(name, ()))


@needs_fork
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
async def test_killed_and_full_at_every_step(folder: Path, path: Path, stride: int) -> None:
    await captioned(folder)
    sessions = Sessions(folder, path)
    for stopped in (killed_at, full_at):
        for step, torn_bytes in stops(stride):
            sessions.reset()
            was_stopped = (
                killed_at(step, sessions.go, torn_bytes=torn_bytes)
                if stopped is killed_at
                else full_at(step, sessions.go)
            )
            sessions.check()
            if not was_stopped:
                break
        assert step > 20, "the steps were counted"
    assert captions(path) == sessions.model | {"0.png": "Mine.", "2.png": "Mine, too."}


async def test_a_full_disk_is_said_and_what_was_written_is_shown_as_it_will_be(
    folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await captioned(folder)
    with closing(RecordsFile(path)) as reviewed:
        first = look(reviewed)["0.png"]

        def full(_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr("qwen35mm.captioning.outputs.jsonl.sync", full)
            with pytest.raises(OutputError, match="disk is full"):
                reviewed.save(first["number"], "Mine.", first["digest"], "")
        first = look(reviewed)["0.png"]
        reviewed.save(first["number"], "Mine, at last.", first["digest"], "")
    assert captions(path)["0.png"] == "Mine, at last."
