"""Broken media are set aside with their text files, once, whatever is killed, and come back as they were."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from qwen35mm.captioning.aside import SetAside
from qwen35mm.captioning.items import Failed, Item
from qwen35mm.captioning.job import Job, carry_out, take_back
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.media import workers
from qwen35mm.captioning.media.splits import parse_split
from qwen35mm.captioning.outputs import OutputSettings
from qwen35mm.captioning.preview import Preview
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.run import Run
from qwen35mm.captioning.sources.scan import ScanOptions
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.errors import CaptioningError, EngineError
from tests.captioning.fake_model import Asked, FakeModel, picture, seen_digest
from tests.captioning.kills import full_at, killed_at, needs_fork
from tests.captioning.runs import failures, interrupted, job, listed, run, texts
from tests.captioning.test_parts import make_video

pytestmark = pytest.mark.usefixtures("media_in_process")

DAMAGED = 60
JOURNAL = "set-aside.jsonl"


def damage(path: Path, *beside: str, num_bytes: int = DAMAGED) -> Path:
    """A picture that ends early, with text files beside it."""
    picture(90).save(path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    for name in beside:
        (path.parent / name).write_bytes(os.fsencode(f"{name}, mine"))
    return path


def files(folder: Path) -> dict[str, bytes]:
    """What is in a folder besides the run's own state."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and ".qwen35mm" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def aside(folder: Path, to: Path, **options: Any) -> Job:
    return job(folder, aside=to, **options)


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "broken"


async def test_broken_media_go_with_their_texts_and_come_back(folder: Path, to: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    damage(folder / "more" / "bad.png", "bad.txt", "bad.json", "bad.long.txt", "bad.png.caption", "bad.npz")
    damage(folder / f"{odd}.png", f"{odd}.txt", num_bytes=61)
    (folder / "empty.jpg").write_bytes(b"")
    before = files(folder)
    one = aside(folder, to)
    outcome = await run(one, FakeModel())
    assert (outcome.exit_code, outcome.counts.num_captioned, outcome.counts.num_failed) == (0, 6, 3)
    assert outcome.set_aside is not None
    assert {each.name for each in outcome.set_aside.moved} == {"more/bad.png", f"{odd}.png", "empty.jpg"}
    moved = {f"more/bad{each}" for each in (".png", ".txt", ".json", ".long.txt", ".png.caption")}
    moved |= {f"{odd}.png", f"{odd}.txt", "empty.jpg"}
    assert files(to) == {name: before[name] for name in moved}
    assert failures(folder) == []
    assert {(row["name"], row["kind"]) for row in listed(folder / ".qwen35mm" / JOURNAL) if "name" in row} == {
        ("more/bad.png", "damaged"),
        (f"{odd}.png", "damaged"),
        ("empty.jpg", "unreadable"),
    }
    again = await run(one, FakeModel())
    assert (again.exit_code, again.counts.num_present, again.counts.num_failed) == (0, 6, 0)
    back = take_back(one)
    assert (back.num, back.kept, to.exists()) == (3, [], False)
    captions = {name: data for name, data in files(folder).items() if name not in before}
    assert {name: data for name, data in files(folder).items() if name in before} == before
    assert len(captions) == 6
    with pytest.raises(CaptioningError, match="nothing to take back"):
        take_back(one)


async def test_a_medium_that_was_captioned_goes_with_all_its_captions(tmp_path: Path, to: Path) -> None:
    """Several captions, parts of a video, and text files in a folder of their own."""
    media, captions = tmp_path / "media", tmp_path / "captions"
    make_video(media / "clips" / "long.mp4", (1, 2, 3))
    picture(1).save(media / "still.png")
    prompts = PromptSet([Question("Short?", name="short"), Question("Long?", name="long")])
    options: dict[str, Any] = {"split": parse_split("scenes"), "output_settings": OutputSettings(folder=captions)}
    one = Job([str(media)], prompts, outputs=job(media).outputs, aside=to, **options)
    await run(one, FakeModel())
    before, written = files(media), files(captions)
    assert len(written) == 8
    video = media / "clips" / "long.mp4"
    video.write_bytes(video.read_bytes()[:300])
    outcome = await run(one, FakeModel())
    assert (outcome.exit_code, sorted(files(media))) == (0, ["still.png"])
    parts = [f"clips/long.{n:04}{each}" for n in (1, 2, 3) for each in (".long.txt", ".txt")]
    assert sorted(files(to)) == [*parts, "clips/long.mp4"]
    assert sorted(files(captions)) == ["still.long.txt", "still.txt"]
    take_back(one)
    assert files(captions) == written
    assert sorted(files(media)) == sorted(before)


async def test_media_that_keep_a_persons_text_are_decoded_once(
    folder: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the option they aren't read at all."""
    for number in range(3):
        (folder / f"{number}.txt").write_text("mine")
    damage(folder / "bad.png", "bad.txt", num_bytes=DAMAGED)
    for path in folder.glob("*.png"):
        os.utime(path, (1e9, 1e9))
    outcome = await run(job(folder), FakeModel())
    assert (outcome.exit_code, outcome.counts.num_kept, outcome.broken) == (0, 4, [])
    outcome = await run(aside(folder, to), FakeModel())
    assert (outcome.exit_code, outcome.counts.num_kept, sorted(files(to))) == (0, 3, ["bad.png", "bad.txt"])
    monkeypatch.setattr(workers, "prepare", None)
    assert (await run(aside(folder, to), FakeModel())).counts.num_kept == 3


async def test_texts_of_other_media_stay(folder: Path, to: Path) -> None:
    """`a.b.txt` is that of `a.b.png`, and a text that two media share stays with the one that is whole."""
    damage(folder / "a.png", "a.txt", "a.b.txt", "c.txt", "ab.txt")
    damage(folder / "c.jpg")
    for name in ("a.b.png", "c.png"):
        picture(7).save(folder / name)
    outcome = await run(aside(folder, to), FakeModel())
    assert outcome.exit_code == 0
    assert sorted(files(to)) == ["a.png", "a.txt", "c.jpg"]
    assert {"a.b.txt", "c.txt", "ab.txt"} <= set(files(folder))


async def test_a_name_that_is_taken_gets_a_number_that_its_texts_share(folder: Path, to: Path) -> None:
    to.mkdir()
    (to / "bad.txt").write_text("of another medium")
    damage(folder / "bad.png", "bad.txt")
    other = folder.parent / "other"
    other.mkdir()
    damage(other / "bad.png", "bad.txt")
    both = Job([str(folder), str(other)], job(folder).prompts, outputs=job(folder).outputs, aside=to)
    await run(both, FakeModel())
    assert sorted(files(to)) == ["bad-2.png", "bad-2.txt", "bad.txt", "other/bad.png", "other/bad.txt"]
    assert (to / "bad.txt").read_text() == "of another medium"
    # Something else has the old name now: that stays, and so does what was set aside.
    picture(50).save(folder / "bad.png")
    back = take_back(both)
    assert (back.num, [path.name for path, _ in back.kept]) == (1, ["bad-2.png"])
    assert sorted(files(to)) == ["bad-2.png", "bad.txt"]
    (folder / "bad.png").unlink()
    assert (take_back(both).num, (folder / "bad.png").stat().st_size) == (1, DAMAGED)


async def test_a_folder_in_the_source_is_not_scanned(folder: Path) -> None:
    damage(folder / "bad.png")
    inside = folder / "broken"
    assert (await run(aside(folder, inside), FakeModel())).exit_code == 0
    for one in (aside(folder, inside), job(folder)):
        outcome = await run(one, FakeModel())
        assert (outcome.exit_code, outcome.counts.num_found) == (0, 6)
    with pytest.raises(CaptioningError, match="--set-aside moves media out"):
        await run(aside(inside, inside), FakeModel())


async def test_what_is_no_fault_of_the_medium_stays(folder: Path, to: Path) -> None:
    """A server's failure, an unusable answer, a limit, and what was interrupted."""

    def answer(asked: Asked) -> str:
        if asked.digest == refused:
            raise EngineError("It failed.")
        return "" if asked.digest == empty else "Fine."

    refused, empty = (seen_digest(folder / f"{n}.png") for n in range(2))
    style = CaptionStyle(max_attempts=1)
    outcome = await run(aside(folder, to, style=style), FakeModel(answer))
    assert (outcome.exit_code, outcome.counts.num_failed, outcome.set_aside) == (3, 2, SetAside())
    await run(job(folder, "{metadata.none}", aside=to), FakeModel())
    assert len(failures(folder)) == 6
    bad = damage(folder / "bad.png")
    runs: list[Run] = []
    model = FakeModel(waits=lambda: not (runs and runs[-1].stopped))

    def has_failed(run: Run) -> bool:
        runs.append(run)
        return run.counts.num_failed > 0

    outcome = await interrupted(aside(folder, to), model, has_failed)
    assert (outcome.exit_code, outcome.set_aside, bad.exists(), to.exists()) == (130, None, True, False)
    assert [each.name for each in outcome.broken] == ["bad.png"]


async def test_where_nothing_can_be_read_nothing_is_moved(tmp_path: Path, to: Path) -> None:
    """Then the disk, or a missing codec, is more likely to be the cause."""
    media = tmp_path / "media"
    media.mkdir()
    for number in range(2):
        damage(media / f"{number}.png", num_bytes=DAMAGED + number)
    outcome = await run(aside(media, to), FakeModel())
    assert (outcome.exit_code, outcome.set_aside, len(files(media)), to.exists()) == (4, None, 2, False)


async def test_containers_are_refused_before_anything_is_done(folder: Path, to: Path) -> None:
    tars = folder.parent / "tars" / "below"
    tars.mkdir(parents=True)
    with tarfile.open(tars / "a.tar", "w") as tar:
        tar.add(folder / "0.png", "0.png")
    for source in (tars / "a.tar", tars.parent):
        model = FakeModel()
        with pytest.raises(CaptioningError, match=r"'a\.tar' holds media"):
            await run(aside(source, to), model)
        assert model.asked == []
    assert (await run(aside(tars.parent, to, scan=ScanOptions(exclude=("a.tar",))), FakeModel())).exit_code == 3


@pytest.mark.parametrize("where", ["set", "captions", "clips", "media/.qwen35mm", "media/0.png/x"])
def test_a_folder_that_the_run_writes_to_or_cannot_is_refused(folder: Path, where: str) -> None:
    above = folder.parent
    captions = OutputSettings(folder=above / "captions") if where == "captions" else OutputSettings()
    one = aside(
        folder,
        above / where,
        outputs=(f"dataset:{above / 'set'}",) if where != "clips" else ("sidecar",),
        clips=above / "clips" if where == "clips" else None,
        split=parse_split("scenes") if where == "clips" else None,
        output_settings=captions,
    )
    with pytest.raises(CaptioningError, match=r"a folder of its own|no folder that can be written to"):
        one.check()


@pytest.mark.parametrize("of", ["bad.png", "bad.txt"])
async def test_a_read_only_folder_keeps_its_media_whole(
    folder: Path, to: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    damage(folder / "bad.png", "bad.txt")
    before = files(folder)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == folder / of:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        outcome = await run(aside(folder, to), FakeModel())
    assert outcome.set_aside is not None
    assert [(each.name, reason) for each, reason in outcome.set_aside.refused] == [("bad.png", "Permission denied")]
    assert (outcome.exit_code, [row["name"] for row in failures(folder)]) == (3, ["bad.png"])
    assert {name: data for name, data in files(folder).items() if name in before} == before
    assert (to.exists(), (folder / ".qwen35mm" / JOURNAL).exists()) == (False, False)
    assert (await run(aside(folder, to), FakeModel())).exit_code == 0
    assert sorted(files(to)) == ["bad.png", "bad.txt"]


def _on_another_disk(monkeypatch: pytest.MonkeyPatch, to: Path) -> None:
    """`to` is on another disk than everything else."""
    link, replace = os.link, Path.replace

    def check(path: Any, target: Any) -> None:
        if Path(path).is_relative_to(to) != Path(target).is_relative_to(to):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def link_here(path: Any, target: Any, **options: Any) -> None:
        check(path, target)
        link(path, target, **options)

    def replace_here(path: Path, target: Path) -> Path:
        check(path, target)
        return replace(path, target)

    monkeypatch.setattr(os, "link", link_here)
    monkeypatch.setattr(Path, "replace", replace_here)


async def test_another_disk_gets_a_copy(folder: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = damage(folder / "bad.png", "bad.txt")
    bad.chmod(0o600)
    os.utime(bad, (1e9, 1e9))
    before = files(folder)
    _on_another_disk(monkeypatch, to)
    await run(aside(folder, to), FakeModel())
    assert sorted(files(to)) == ["bad.png", "bad.txt"]
    status = (to / "bad.png").stat()
    assert (status.st_mtime, status.st_mode & 0o777) == (1e9, 0o600)
    assert (take_back(aside(folder, to)).num, files(to)) == (1, {})
    assert {name: data for name, data in files(folder).items() if name in before} == before


async def test_links_are_moved_and_not_what_they_lead_to(folder: Path, to: Path) -> None:
    target = damage(folder.parent / "target.png")
    (folder / "bad.png").symlink_to("../target.png")
    await run(aside(folder, to), FakeModel())
    assert ((to / "bad.png").readlink(), target.exists()) == (Path("../target.png"), True)
    take_back(aside(folder, to))
    assert (folder / "bad.png").samefile(target)


class Kills:
    """A folder with broken media, that a run or a way back is killed in."""

    def __init__(self, begun: Path) -> None:
        self.media, self.to = begun.parent / "now" / "media", begun.parent / "now" / "broken"
        self._begun = begun
        folder = begun / "media"
        make_video(folder / "long.mp4", (1, 2))
        picture(2).save(folder / "still.png")
        self._one = self._job(folder, begun / "broken")
        asyncio.run(carry_out(self._one, FakeModel().captioner()))
        damage(folder / "bad.png", "bad.txt", "bad.json")
        video = folder / "long.mp4"
        video.write_bytes(video.read_bytes()[:300])
        self.before = files(folder)
        self.broken = {name for name in self.before if name.startswith(("bad.", "long."))}
        assert len(self.broken) == 8

    def _job(self, media: Path, to: Path) -> Job:
        prompts = PromptSet([Question("Short?", name="short"), Question("Long?", name="long")])
        return Job([str(media)], prompts, outputs=job(media).outputs, aside=to, split=parse_split("scenes"))

    @property
    def one(self) -> Job:
        return self._job(self.media, self.to)

    def reset(self) -> None:
        shutil.rmtree(self.media.parent, ignore_errors=True)
        shutil.copytree(self._begun, self.media.parent)

    def go(self) -> None:
        assert asyncio.run(carry_out(self.one, FakeModel().captioner())).exit_code in (0, 5)

    def check_whole(self) -> None:
        """Each file is there once, under one of its places."""
        here, there = files(self.media), files(self.to)
        for name, data in self.before.items():
            assert (here.get(name) or there.get(name)) == data

    def check_aside(self) -> None:
        assert {name: self.before[name] for name in self.broken} == files(self.to)
        assert set(files(self.media)) == set(self.before) - self.broken
        self.check_nothing_left()

    def check_back(self) -> None:
        assert (files(self.media), self.to.exists()) == (self.before, False)
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        assert [path for path in self.media.parent.rglob("*") if path.name.startswith(".qwen35mm-")] == []


@pytest.fixture
def kills(tmp_path: Path) -> Kills:
    return Kills(tmp_path / "begun")


# The run is asked again for what failed, so its first steps are those of any run.
STEPS = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
DISKS = pytest.mark.parametrize("is_another_disk", [False, True])


@needs_fork
@STEPS
@DISKS
def test_killed_while_media_are_set_aside(
    kills: Kills, monkeypatch: pytest.MonkeyPatch, stride: int, is_another_disk: bool
) -> None:
    if is_another_disk:
        _on_another_disk(monkeypatch, kills.to)
    num_half = 0
    for step in range(0, 1000, stride):
        kills.reset()
        was_killed = killed_at(step, kills.go, torn_bytes=step % 2 * 5)
        kills.check_whole()
        num_half += 0 < len(files(kills.to)) < len(kills.broken)
        kills.go()
        kills.check_aside()
        assert take_back(kills.one).kept == []
        kills.check_back()
        if not was_killed:
            break
    assert num_half > 3, "it was killed between two files"


@needs_fork
@STEPS
@DISKS
def test_killed_while_media_are_taken_back(
    kills: Kills, monkeypatch: pytest.MonkeyPatch, stride: int, is_another_disk: bool
) -> None:
    if is_another_disk:
        _on_another_disk(monkeypatch, kills.to)
    num_half = 0
    for step in range(0, 1000, stride):
        kills.reset()
        kills.go()
        was_killed = killed_at(step, lambda: take_back(kills.one), torn_bytes=step % 2 * 5)
        kills.check_whole()
        num_half += 0 < len(files(kills.to)) < len(kills.broken)
        if (kills.media / ".qwen35mm" / JOURNAL).exists():
            assert was_killed
            assert take_back(kills.one).kept == []
        kills.check_back()
        if not was_killed:
            break
    assert num_half > 3, "it was killed between two files"


def test_a_full_disk_loses_nothing(kills: Kills, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another disk, files are copied."""
    _on_another_disk(monkeypatch, kills.to)
    for step in range(0, 1000, 7):
        kills.reset()
        is_over = not full_at(step, kills.go)
        kills.check_whole()
        kills.go()
        kills.check_aside()
        if is_over:
            break


async def test_a_medium_that_was_repaired_after_a_kill_stays(folder: Path, to: Path) -> None:
    bad = damage(folder / "bad.png", "bad.txt")
    one = aside(folder, to)
    await run(one, FakeModel())
    journal = folder / ".qwen35mm" / JOURNAL
    line = journal.read_bytes().splitlines(keepends=True)[0]
    take_back(one)
    # As a kill leaves it before the first file is moved.
    journal.write_bytes(line)
    picture(90).save(bad)
    assert (await run(one, FakeModel())).exit_code == 0
    assert (bad.exists(), (folder / "bad.txt").exists(), to.exists(), journal.exists()) == (True, True, False, False)


async def test_clips_that_are_set_aside_are_not_cut_out_again(tmp_path: Path, to: Path) -> None:
    media, clips = tmp_path / "media", tmp_path / "clips"
    make_video(media / "long.mp4", (1, 2, 3))
    one = aside(media, to, split=parse_split("scenes"), clips=clips)
    await run(one, FakeModel())
    second = clips / "long.0002.mp4"
    second.write_bytes(second.read_bytes()[:300])
    for _ in range(2):
        assert (await run(one, FakeModel())).exit_code == 0
        assert sorted(files(to)) == ["long.0002.mp4", "long.0002.txt"]
        assert len(texts(clips)) == 2
    take_back(one)
    assert (second.stat().st_size, len(texts(clips))) == (300, 3)


async def _set_one_aside(folder: Path, to: Path) -> tuple[Job, Path]:
    damage(folder / "bad.png", "bad.txt")
    one = aside(folder, to)
    assert (await run(one, FakeModel())).exit_code == 0
    return one, folder / ".qwen35mm" / JOURNAL


@pytest.mark.parametrize("has_mount_point", [False, True])
@pytest.mark.parametrize("is_killed", [False, True])
async def test_media_on_a_disk_that_is_not_mounted_are_not_forgotten(
    folder: Path, to: Path, has_mount_point: bool, is_killed: bool
) -> None:
    one, journal = await _set_one_aside(folder, to)
    if is_killed:
        journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    away = to.rename(to.with_name("away"))
    if has_mount_point:
        to.mkdir()
    back = take_back(one)
    assert (back.num, [path.name for path, _ in back.kept]) == (0, ["bad.png", "bad.txt"])
    assert {reason for _, reason in back.kept} == {"its folder isn't there: is its disk mounted?"}
    assert to.exists() == has_mount_point
    if has_mount_point:
        to.rmdir()
    away.rename(to)
    back = take_back(one)
    assert (back.num, back.kept, (folder / "bad.txt").exists(), journal.exists()) == (1, [], True, False)


async def test_a_folder_that_a_kill_left_empty_goes(folder: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, journal = await _set_one_aside(folder, to)
    with monkeypatch.context() as killed:
        killed.setattr("qwen35mm.captioning.aside._remove_empty", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            take_back(one)
    assert (files(to), to.exists(), journal.exists()) == ({}, True, True)
    assert take_back(one).kept == []
    assert (to.exists(), journal.exists()) == (False, False)


async def test_what_a_person_deleted_from_the_folder_is_forgotten(folder: Path, to: Path) -> None:
    one, journal = await _set_one_aside(folder, to)
    (to / "bad.png").unlink()
    back = take_back(one)
    assert (back.num, back.kept, (folder / "bad.txt").exists(), journal.exists()) == (0, [], True, False)


@pytest.mark.parametrize("is_copied", [False, True])
async def test_texts_stay_with_a_medium_that_came_after_a_kill(folder: Path, to: Path, is_copied: bool) -> None:
    """The kill came between the medium and its text, or between the copy of the text and its removal."""
    one, journal = await _set_one_aside(folder, to)
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    (shutil.copy2 if is_copied else shutil.move)(to / "bad.txt", folder / "bad.txt")
    picture(91).save(folder / "bad.png")
    outcome = await run(one, FakeModel())
    assert (outcome.exit_code, (folder / "bad.txt").read_text(), sorted(files(to))) == (0, "bad.txt, mine", ["bad.png"])
    assert [path.name for path, _ in take_back(one).kept] == ["bad.png"]


@pytest.mark.parametrize("num_bytes", [0, 5, 15])
async def test_a_torn_end_of_a_move_loses_nothing(folder: Path, to: Path, num_bytes: int) -> None:
    one, journal = await _set_one_aside(folder, to)
    line, end = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(line + end[:num_bytes])
    back = take_back(one)
    assert (back.num, (folder / "bad.txt").exists(), to.exists()) == (1, True, False)


async def test_a_clip_that_was_deleted_from_the_folder_is_cut_out_again(tmp_path: Path, to: Path) -> None:
    media, clips = tmp_path / "media", tmp_path / "clips"
    make_video(media / "long.mp4", (1, 2, 3))
    one = aside(media, to, split=parse_split("scenes"), clips=clips)
    await run(one, FakeModel())
    second = clips / "long.0002.mp4"
    second.write_bytes(second.read_bytes()[:300])
    await run(one, FakeModel())
    (to / second.name).unlink()
    await run(one, FakeModel())
    assert second.stat().st_size > 300


@pytest.mark.parametrize("kind", ["crash", "unsupported"])
async def test_failures_that_an_earlier_version_called_so_move_nothing(folder: Path, to: Path, kind: str) -> None:
    """It gave these kinds to media on which the program died, and to those too large for a budget, too."""
    await run(job(folder), FakeModel(lambda asked: ""), "old")
    outcome = await run(job(folder), FakeModel(lambda asked: ""))
    assert outcome.counts.num_failed > 0
    with closing(Manifest.open(folder / ".qwen35mm" / "captions.sqlite")) as manifest:
        manifest.change("UPDATE failures SET kind = ?", kind)
    outcome = await run(aside(folder, to), FakeModel())
    assert (outcome.exit_code, outcome.counts.num_failed_before, to.exists()) == (0, 0, False)
    assert len(texts(folder)) == 6


@pytest.mark.parametrize("function", ["inspect", "prepare", "find_parts", "cut_out"])
@pytest.mark.parametrize("is_lasting", [False, True])
async def test_a_medium_whose_decoder_died_is_decoded_once_more_and_alone(
    tmp_path: Path, to: Path, monkeypatch: pytest.MonkeyPatch, function: str, is_lasting: bool
) -> None:
    """The kernel may have ended the decoder, for the memory that all of them took."""
    media, clips = tmp_path / "media", tmp_path / "clips"
    make_video(media / "long.mp4", (1, 2, 3))
    for number in range(3):
        picture(number).save(media / f"{number}.png")
    whole = getattr(workers.MediaWorkers, function)
    num_at_work = 0
    deaths: dict[tuple[str, object], list[int]] = {}

    async def dying(self: Any, item: Item, *arguments: Any, **options: Any) -> Any:
        nonlocal num_at_work
        num_at_work += 1
        try:
            await asyncio.sleep(0)
            of = deaths.setdefault((item.name, arguments[0] if function == "cut_out" else None), [])
            if item.name.startswith(("long.mp4", "0.png")) and (is_lasting or not of):
                of.append(num_at_work)
                return Failed("crash", "The decoder broke down.")
            return await whole(self, item, *arguments, **options)
        finally:
            num_at_work -= 1

    monkeypatch.setattr(workers.MediaWorkers, function, dying)
    split = parse_split("scenes")
    outcome = await run(aside(media, to, split=split, clips=clips if function == "cut_out" else None), FakeModel())
    assert outcome.exit_code == 0
    assert (files(to) != {}) == is_lasting
    assert outcome.counts.num_found == outcome.counts.num_over
    numbers = [each for each in deaths.values() if each]
    assert numbers
    if is_lasting:
        assert all(len(each) == 2 for each in numbers)
        if function != "cut_out":
            assert {each[1] for each in numbers} == {1}
    else:
        assert (outcome.counts.num_captioned, outcome.counts.num_failed) == (6, 0)


async def test_shards_leave_out_and_take_back_what_others_set_aside(folder: Path) -> None:
    for number in range(4):
        damage(folder / f"bad{number}.png", f"bad{number}.txt", num_bytes=DAMAGED + number)
    before = files(folder)
    inside = folder / "broken"
    for number in (1, 2):
        assert (await run(aside(folder, inside, scan=ScanOptions(shard=(number, 2))), FakeModel())).exit_code == 0
    state = folder / ".qwen35mm"
    journals = [state / f"set-aside-{number}-of-2.jsonl" for number in (1, 2)]
    assert all(journal.exists() for journal in journals)
    assert len(files(inside)) == 8
    outcome = await run(job(folder), FakeModel())
    assert (outcome.exit_code, outcome.counts.num_found) == (0, 6)
    preview = Preview(job(folder), 6)
    preview.look()
    preview.close()
    assert (preview.sample.num.total(), preview.sample.num_unreadable) == (6, 0)
    first = take_back(aside(folder, inside, scan=ScanOptions(shard=(1, 2))))
    assert [journal.exists() for journal in journals] == [False, True]
    rest = take_back(job(folder))
    assert (first.num + rest.num, rest.kept, inside.exists()) == (4, [], False)
    assert {name: data for name, data in files(folder).items() if name in before} == before
