"""What a run remembers: through kills, several threads, names that are no text, full disks; by one run at a time."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from qwen35mm.captioning.items import Failed, Unreadable
from qwen35mm.captioning.manifest.listings import Listings
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.manifest.tables import MIGRATIONS, OLDEST
from qwen35mm.captioning.outputs.base import OutputSettings
from qwen35mm.captioning.outputs.jsonl import JsonLines
from qwen35mm.captioning.records import Caption
from qwen35mm.errors import CaptioningError, OutputError
from tests.captioning.kills import needs_fork

ODD_NAME = os.fsdecode(b"odd\n\xff.png")
CAPTION = Caption(
    text="a “cat”\n猫",
    kind="video",
    width=640,
    height=480,
    prompt="What?",
    model="tiny",
    data={"a": [1, None, "\u2028"]},
    duration_s=0.1 + 0.2,
    flags=("truncated", "missing: cat"),
    num_attempts=2,
    num_prompt_tokens=100,
    num_generated_tokens=20,
    seconds=1.5,
    shared_from=ODD_NAME,
)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".qwen35mm" / "manifest.sqlite"


def reopened(manifest: Manifest, path: Path) -> Manifest:
    """What a later run finds; the fixture closes this one again, which does no harm."""
    manifest.close()
    return Manifest.open(path)


def test_a_caption_survives(manifest: Manifest, path: Path) -> None:
    assert manifest.caption(key(1)) is None
    manifest.finish(key(1), CAPTION, name="cats/\udcff.jpg", similarity=(1 << 192) - 1)
    manifest.finish(key(2), CAPTION, similarity=0)
    manifest.finish(key(3), CAPTION)
    with closing(reopened(manifest, path)) as manifest:
        assert manifest.caption(key(1)) == CAPTION
        assert list(manifest.similarities()) == [((1 << 192) - 1, key(1), "cats/\udcff.jpg"), (0, key(2), "")]


def test_beginnings_are_counted_until_the_end(manifest: Manifest, path: Path) -> None:
    assert manifest.begin(key(1)) == 1
    with closing(reopened(manifest, path)) as manifest:
        assert manifest.begin(key(1)) == 2
        assert manifest.begin(key(2)) == 1
        manifest.finish(key(1), CAPTION)
        assert manifest.begin(key(1)) == 1


def test_failures(manifest: Manifest, tmp_path: Path) -> None:
    odd = Unreadable(ODD_NAME, "damaged", "It is cut off.\nReplace it.", Path(f"/media/{ODD_NAME}"))
    second, third = Unreadable("b.png", "unreadable", "second"), Unreadable("c.png", "words", "third")
    for each, work in ((odd, key(1)), (Unreadable("b.png", "damaged", "first"), None), (second, None), (third, key(2))):
        manifest.fail(each, work, Failed(each.kind, each.message))
    assert list(manifest.failures()) == [odd, second, third]
    assert manifest.failure(key(1)) == Failed(odd.kind, odd.message)
    assert manifest.failure(key(3)) is None

    shown = tmp_path / "failures.jsonl"
    listings = Listings(manifest, shown, tmp_path / "problems.jsonl", tmp_path / "skipped.jsonl")
    listings.write()
    rows = [json.loads(line) for line in shown.read_text("utf-8").splitlines()]
    assert rows[0] == {
        "name": "odd\n\\xff.png",
        "path": "/media/odd\n\\xff.png",
        "kind": "damaged",
        "message": "It is cut off.\nReplace it.",
    }
    assert [row["name"] for row in rows[1:]] == ["b.png", "c.png"]

    manifest.finish(key(1), CAPTION)
    manifest.forget_failure("b.png")
    assert [failure.name for failure in manifest.failures()] == ["c.png"]
    manifest.forget_failure("c.png")
    for _ in range(2):
        listings.write()
        assert not shown.exists()


def test_a_manifest_is_borrowed_while_a_run_writes_to_it(
    manifest: Manifest, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        manifest.finish(key(number), CAPTION)
    copy = shutil.copyfile

    def between(source: Path, target: Path) -> None:
        copy(source, target)
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()

    monkeypatch.setattr(shutil, "copyfile", between)
    with Manifest.borrowed(path) as borrowed:
        assert all(borrowed.caption(key(number)) == CAPTION for number in range(50))
        manifest.finish(key(50), CAPTION)
    manifest.close()
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_more_failures_than_are_read_at_once(manifest: Manifest) -> None:
    for number in range(1203):
        manifest.fail(Unreadable(f"{number}.png", "", ""), None, Failed("damaged", ""))
    found = []
    for failure in manifest.failures():  # nothing is locked meanwhile
        manifest.forget_failure(failure.name)
        found.append(failure.name)
    assert found == [f"{number}.png" for number in range(1203)]


def test_digests_belong_to_a_file_as_it_was(manifest: Manifest, path: Path, tmp_path: Path) -> None:
    file = tmp_path / ODD_NAME
    file.write_bytes(b"one")
    assert manifest.digest(file, file.stat()) is None
    manifest.remember_digest(file, file.stat(), key(1))
    with closing(reopened(manifest, path)) as manifest:
        assert manifest.digest(file, file.stat()) == key(1)
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
        assert manifest.digest(file, file.stat()) is None


def test_places_move_with_the_folder(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    manifest = Manifest.open(before / ".qwen35mm" / "manifest.sqlite")
    (before / "a.png").write_bytes(b"one")
    manifest.remember_digest(before / "a.png", (before / "a.png").stat(), key(1))
    assert manifest.path_of(manifest.place(tmp_path / "elsewhere" / ODD_NAME)) == tmp_path / "elsewhere" / ODD_NAME
    manifest.close()
    before.rename(after)
    manifest = Manifest.open(after / ".qwen35mm" / "manifest.sqlite")
    assert manifest.digest(after / "a.png", (after / "a.png").stat()) == key(1)
    manifest.close()


@needs_fork
def test_one_run_at_a_time_and_no_lock_outlives_a_kill(path: Path) -> None:
    """Not even where a child of the killed run lives on."""
    reading, writing = os.pipe()
    other = os.fork()
    if other == 0:
        try:
            os.setpgid(0, 0)
            manifest = Manifest.open(path)
            os.fork()
            os.write(writing, b"open")
            time.sleep(600)
            manifest.close()
        finally:
            os._exit(1)
    assert os.read(reading, 4) == b"open"
    try:
        with pytest.raises(CaptioningError, match=f"process {other}"):
            Manifest.open(path)
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        manifest = Manifest.open(path)
    finally:
        os.killpg(other, signal.SIGKILL)
    with pytest.raises(CaptioningError, match=f"process {os.getpid()}"):
        Manifest.open(path)
    manifest.close()
    Manifest.open(path).close()
    assert list(path.parent.glob("*.lock")) == []


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (1, "older version.*choose another folder, or move it away to start fresh"),
        (OLDEST - 1, "older version.*choose another folder, or move it away to start fresh"),
        (OLDEST + len(MIGRATIONS), "newer version.*update the program"),
    ],
)
def test_a_manifest_of_another_version_is_refused_and_left_unchanged(path: Path, version: int, words: str) -> None:
    with closing(Manifest.open(path)) as manifest:
        manifest.finish(key(1), CAPTION)
    set_version(path, version)
    content = path.read_bytes()
    with pytest.raises(CaptioningError, match=words):
        Manifest.open(path)
    with pytest.raises(CaptioningError, match=words), Manifest.borrowed(path):
        pass
    assert path.read_bytes() == content
    set_version(path, OLDEST + len(MIGRATIONS) - 1)
    with closing(Manifest.open(path)) as manifest:
        assert manifest.caption(key(1)) == CAPTION


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA user_version={version}")


def test_what_is_no_manifest_is_refused_in_words(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database at all" * 1000)
    with pytest.raises(CaptioningError, match="damaged"):
        Manifest.open(path)
    shutil.rmtree(path.parent)
    path.parent.write_text("a file where the folder should be")
    with pytest.raises(CaptioningError, match="folder"):
        Manifest.open(path)


def test_a_full_disk_is_said(manifest: Manifest, path: Path) -> None:
    manifest.finish(key(1), CAPTION)
    with manifest.reading() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages}")
    large = dataclasses.replace(CAPTION, text="x" * 1_000_000)
    with pytest.raises(OutputError, match="full") as error:
        manifest.finish(key(2), large)
    assert error.value.errno == errno.ENOSPC
    with closing(reopened(manifest, path)) as manifest:
        assert manifest.caption(key(1)) == CAPTION


def test_finishing_is_durable(manifest: Manifest) -> None:
    """SQLite is asked to wait for the disk where it is promised, and only there."""
    seen: list[str] = []
    with manifest.reading() as connection:
        connection.set_trace_callback(seen.append)
    manifest.begin(key(1))
    assert [line for line in seen if "synchronous" in line] == ["PRAGMA synchronous=NORMAL"]
    seen.clear()
    manifest.finish(key(1), CAPTION)
    assert [line for line in seen if "synchronous" in line] == ["PRAGMA synchronous=FULL"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_that_cannot_lock_files_is_refused_for_the_manifest_and_said_for_an_output(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    fcntl = pytest.importorskip("fcntl")

    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            return real(descriptor, operation)
        raise OSError(number, os.strerror(number))

    with closing(Manifest.open(path)) as manifest:
        monkeypatch.setattr(fcntl, "flock", flock)
        with closing(JsonLines(manifest, path.parent / "a.jsonl", OutputSettings())):
            assert "can't lock files" in caplog.text
    with pytest.raises(CaptioningError, match=r"can't lock files .*--state-dir"):
        Manifest.open(path)
    monkeypatch.undo()
    Manifest.open(path).close()
