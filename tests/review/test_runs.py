"""Runs that change many captions: what is written, what is taken back, and what a kill leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.captioning.outputs import OutputSettings
from qwen35mm.errors import CaptioningError
from qwen35mm.review.changes import Undone
from qwen35mm.review.collection import Changed, Collection, Search
from qwen35mm.review.edits import adding_tags, removing_tags, replacing_text
from qwen35mm.review.folder import Folder
from qwen35mm.review.journal import Journal
from qwen35mm.review.records import RecordsFile
from tests.captioning.fake_model import FakeModel
from tests.captioning.kills import full_at, killed_at, needs_fork, stops
from tests.captioning.runs import job, listed, run, texts

pytestmark = pytest.mark.usefixtures("media_in_process")

EDIT = replacing_text("model", "person")


async def captioned(folder: Path, *outputs: str) -> None:
    await run(job(folder, outputs=outputs or ("sidecar",)), FakeModel(answer=lambda _: "By a model."))


def change(reviewed: Collection[Any], edit: Any = EDIT) -> Changed:
    return reviewed.carry_out(reviewed.plan(reviewed.look(), edit))


def undo_last(reviewed: Collection[Any]) -> Undone[str]:
    return reviewed.undo_run(reviewed.runs()[0])


async def test_a_run_is_one_step_back_and_a_later_caption_run_keeps_it(folder: Path) -> None:
    await captioned(folder)
    (folder / "1.txt").write_bytes(b"\xef\xbb\xbfTheirs, by a model.\r\n\r\n")
    (folder / "2.txt").unlink()
    before = {path.name: path.read_bytes() for path in folder.rglob("*.txt")}
    with closing(Folder(folder, suffix=".txt")) as reviewed:
        plan = reviewed.plan(reviewed.look(), EDIT)
        assert texts(folder)["0.txt"] == "By a model.\n", "planning writes nothing"
        assert (len(plan.changes), plan.num_captions) == (5, 5)
        assert reviewed.carry_out(plan) == Changed(5, [])
        assert set(texts(folder).values()) == {"By a person.\n", "Theirs, by a person.\n"}
        assert reviewed.counts()["changes"] == 1
    model = FakeModel()
    await run(job(folder, "Another question?"), model)
    assert len(model.asked) == 1, "only the one without a text"
    assert texts(folder)["0.txt"] == "By a person.\n"
    (folder / "2.txt").unlink()
    # The program that did it has ended.
    with closing(Folder(folder, suffix=".txt")) as reviewed:
        reviewed.look()
        assert [each.label for each in reviewed.runs()] == ["replace 'model' by 'person'"]
        assert len(undo_last(reviewed).places) == 5
        assert reviewed.runs() == []
    assert {path.name: path.read_bytes() for path in folder.rglob("*.txt")} == before


async def test_a_text_that_was_changed_since_stays(folder: Path) -> None:
    await captioned(folder)
    with closing(Folder(folder, suffix=".txt")) as reviewed:
        plan = reviewed.plan(reviewed.look(), EDIT)
        (folder / "0.txt").write_text("Changed after the preview by a model.")
        changed = reviewed.carry_out(plan)
        assert (changed.num, [name for name, _ in changed.refused]) == (5, ["0.png"])
        (folder / "1.txt").write_text("Changed since.")
        (folder / "2.txt").unlink()
        (folder / "more" / "4.png").unlink()
        reviewed.look()
        assert undo_last(reviewed) == Undone(["3.png", "more/4.png", "more/5.png"], ["1.png", "2.png"], True)
    assert list(texts(folder).values()) == [
        "Changed after the preview by a model.",
        "Changed since.",
        *["By a model.\n"] * 3,
    ]
    # What the journal had of them is still there.
    (kept,) = (folder / ".qwen35mm" / "edits").glob("*.undone")
    assert json.loads(kept.read_text().splitlines()[1])["before"] == "By a model.\n"


async def test_records_are_changed_and_taken_back(folder: Path) -> None:
    path, rows = folder.parent / "all.jsonl", folder.parent / "set"
    await captioned(folder, f"jsonl:{path}", f"dataset:{rows}")
    for file, field, close in ((path, "caption", None), (rows / "metadata.jsonl", "text", [folder])):
        before = listed(file)
        with closing(RecordsFile(file, near=close or [])) as reviewed:
            assert change(reviewed) == Changed(6, [])
        assert [line[field] for line in listed(file)] == ["By a person."] * 6
        if file == path:
            assert listed(file)[0]["flags"] == ["edited"]
            model = FakeModel()
            await run(job(folder, "Another?", outputs=[f"jsonl:{path}"]), model)
            assert (model.asked, listed(file)[0]["caption"]) == ([], "By a person.")
        with closing(RecordsFile(file, near=close or [])) as reviewed:
            assert len(undo_last(reviewed).places) == 6
        assert listed(file) == before


async def test_many_captions_are_accepted_at_once(folder: Path) -> None:
    path = folder.parent / "all.jsonl"
    await captioned(folder, "sidecar", f"jsonl:{path}")
    (folder / "5.txt").write_text("x")
    for opened in (lambda: Folder(folder, suffix=".txt"), lambda: RecordsFile(path)):
        with closing(opened()) as reviewed:
            first, *others = reviewed.look()
            reviewed.accept(first, reviewed.describe([first])[0]["digest"], True)
            assert reviewed.accept_many([first, *others[:3]], True) == Changed(4, [])
            assert reviewed.counts()["accepted"] == 4
            # Somebody has changed one since it was seen.
            if isinstance(reviewed, Folder):
                reviewed.describe(others)
                (folder / "more" / "4.txt").write_text("Another.")
                assert [name for name, _ in reviewed.accept_many(others, True).refused] == ["more/4.png"]
                assert reviewed.counts()["accepted"] == 5
                assert reviewed.undo() == Undone([5], [], True)
            assert reviewed.undo() == Undone(others[:3], [], True)
            assert reviewed.find(Search(show="accepted"))["numbers"] == [first]
            assert reviewed.accept_many([first], False) == Changed(1, [])
        with closing(opened()) as reviewed:
            reviewed.look()
            assert undo_last(reviewed).places == ["0.png"]
            assert reviewed.find(Search(show="accepted"))["numbers"] == [first]


async def test_a_caption_that_has_to_stay_json_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder.parent / "all.jsonl"
    await captioned(folder, f"jsonl:{path}")
    with closing(RecordsFile(path)) as reviewed:
        edit = reviewed._output.edit  # pyright: ignore[reportPrivateUsage]

        def refuse(owner: bytes, text: str | None) -> None:
            if owner.startswith(b"0.png"):
                raise ValueError
            edit(owner, text)

        monkeypatch.setattr(reviewed._output, "edit", refuse)  # pyright: ignore[reportPrivateUsage]
        changed = change(reviewed)
    assert (changed.num, [name for name, _ in changed.refused]) == (5, ["0.png"])
    assert "has to stay JSON" in str(changed.refused[0][1])


def test_nothing_is_written_before_it_is_begun(folder: Path) -> None:
    (folder / "0.txt").write_text("By a model.")
    with closing(Folder(folder, suffix=".txt", for_page=False)) as one, closing(Folder(folder, suffix=".txt")):
        assert len(one.plan(one.look(), EDIT).changes) == 1
        with pytest.raises(CaptioningError, match=r"The review page \(process \d+\) has these captions open"):
            one.begin()
    shutil.rmtree(folder / ".qwen35mm")
    with closing(Folder(folder, suffix=".txt", for_page=False)) as one:
        one.plan(one.look(), EDIT)
        assert one.runs() == []
    assert not (folder / ".qwen35mm").exists()


async def test_a_folder_that_moved_takes_its_journal_along_and_two_captions_have_one_each(folder: Path) -> None:
    await captioned(folder)
    await run(job(folder, outputs=["sidecar:.caption"]), FakeModel(answer=lambda _: "By a model."))
    for suffix, tag in ((".txt", "x"), (".caption", "y")):
        with closing(Folder(folder, suffix=suffix)) as reviewed:
            change(reviewed, adding_tags([tag]))
    moved = folder.rename(folder.with_name("moved"))
    with closing(Folder(moved, suffix=".txt")) as reviewed:
        reviewed.look()
        assert [each.label for each in reviewed.runs()] == ["add x"]
        assert len(undo_last(reviewed).places) == 6
    assert set(texts(moved).values()) == {"By a model.\n"}
    assert (moved / "0.caption").read_text() == "y, By a model.\n"


def test_later_forms_of_the_journal_are_refused(tmp_path: Path) -> None:
    run = Journal(tmp_path, "x").begin("add a")
    run.path.write_text(run.path.read_text().replace('"form": 1', '"form": 2'))
    with pytest.raises(CaptioningError, match="later version"):
        Journal(tmp_path, "x").runs()


class Runs:
    """A person changes all captions of a folder and of a file of records, and takes the second change back."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder.parent / "all.jsonl"
        self._begun = folder.parent / "begun"
        shutil.copytree(folder, self._begun)
        self._lines = self._path.read_bytes()

    def _opened(self) -> Iterator[Collection[Any]]:
        """Each after the one before was closed."""
        yield Folder(self._folder, suffix=".txt")
        yield RecordsFile(self._path)

    def reset(self) -> None:
        shutil.rmtree(self._folder)
        shutil.copytree(self._begun, self._folder)
        self._path.write_bytes(self._lines)

    def go(self) -> None:
        for reviewed in self._opened():
            with closing(reviewed):
                change(reviewed)
                change(reviewed, removing_tags(["By a person."]))
                undo_last(reviewed)

    def check(self) -> None:
        """Every caption has a text of some moment, and taking back all runs gives the first."""
        for reviewed in self._opened():
            with closing(reviewed):
                found = [item["text"] for item in reviewed.describe(reviewed.look())]
                assert set(found) <= {"By a model.", "By a person.", ""}
                while reviewed.runs():
                    assert undo_last(reviewed).kept == []
                assert [item["text"] for item in reviewed.describe(reviewed.look())] == ["By a model."] * 6
        assert [line["caption"] for line in listed(self._path)] == ["By a model."] * 6
        assert set(texts(self._folder).values()) == {"By a model.\n"}
        assert list(self._folder.rglob(".qwen35mm-writing-*")) == []


@needs_fork
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
async def test_killed_and_full_at_every_step(folder: Path, stride: int) -> None:
    path = folder.parent / "all.jsonl"
    await run(
        job(folder, outputs=["sidecar", f"jsonl:{path}"], output_settings=OutputSettings()),
        FakeModel(answer=lambda _: "By a model."),
    )
    runs = Runs(folder)
    for stopped in (killed_at, full_at):
        for step, torn_bytes in stops(stride):
            runs.reset()
            was_stopped = (
                killed_at(step, runs.go, torn_bytes=torn_bytes) if stopped is killed_at else full_at(step, runs.go)
            )
            runs.check()
            if not was_stopped:
                break
        assert step > 20, "the steps were counted"
