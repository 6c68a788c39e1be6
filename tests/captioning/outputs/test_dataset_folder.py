"""A dataset folder: media beside their lines, under names that fit their content."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.outputs import Wants
from qwen35mm.captioning.outputs.dataset_folder import DatasetFolder
from qwen35mm.captioning.records import Record
from qwen35mm.errors import CaptioningError
from tests.captioning.outputs.helpers import (
    HARD_NAMES,
    captions_of,
    expected,
    kept,
    lines_of,
    moved,
    picture,
    put,
    record,
    records_of,
    rows_of,
    run,
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def files(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} - {"README.md"}


def test_each_medium_has_a_name_of_its_own(tmp_path: Path, out: Path) -> None:
    records = records_of(tmp_path / "media", HARD_NAMES)
    run(tmp_path, records, f"dataset:{out}")
    assert captions_of(rows_of(f"dataset:{out}")) == expected(records)
    assert all(list(row)[:2] == ["file_name", "text"] for row in lines_of(out / "metadata.jsonl")), "as readers expect"
    names = files(out)
    assert len({name.casefold() for name in names}) == len(HARD_NAMES) + 1
    assert all(name.isprintable() and name.endswith((".png", ".jsonl")) for name in names), "they are PNGs"
    assert {"a.png", "A.JPG.png", "cats/a.png", "cats/b.tar.png"} <= names


def test_media_are_linked_where_that_is_asked_for_and_can_be(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = records_of(tmp_path, ["a.png", "b.png"])
    run(tmp_path, [first], f"dataset:{out}", link_media=True)
    assert (out / "a.png").samefile(tmp_path / "a.png")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    run(tmp_path, [first, second], f"dataset:{out}", link_media=True)
    assert not (out / "b.png").samefile(tmp_path / "b.png")
    assert (out / "b.png").read_bytes() == picture(1)


def test_a_linked_name_is_copied_and_not_linked(tmp_path: Path, out: Path) -> None:
    put(tmp_path, "real.png", 1)
    (tmp_path / "link.png").symlink_to("real.png")
    item = Item("link.png", tmp_path / "link.png", "image", tmp_path / "link.png")
    run(tmp_path, [record(item, "text")], f"dataset:{out}")
    assert not (out / "link.png").is_symlink()
    assert (out / "link.png").read_bytes() == picture(1)


def test_a_changed_medium_replaces_the_old_one(tmp_path: Path, out: Path) -> None:
    run(tmp_path, [record(put(tmp_path, "a.png", 1), "one")], f"dataset:{out}")
    (tmp_path / "a.png").unlink()
    new = record(put(tmp_path, "a.png", 2), "two")
    run(tmp_path, [new], f"dataset:{out}")
    assert captions_of(rows_of(f"dataset:{out}")) == {"a.png": "two"}
    assert (out / "a.png").read_bytes() == picture(2)


def test_a_medium_that_was_taken_out_is_put_back(tmp_path: Path, out: Path) -> None:
    made = record(put(tmp_path, "a.png", 1), "one")
    run(tmp_path, [made], f"dataset:{out}")
    (out / "a.png").unlink()
    assert run(tmp_path, [made], f"dataset:{out}") == [Wants.CAPTION]
    assert captions_of(rows_of(f"dataset:{out}")) == {"a.png": "one"}


def test_a_file_of_somebody_else_stays(tmp_path: Path, out: Path) -> None:
    out.mkdir()
    (out / "a.png").write_text("mine")
    run(tmp_path, [record(put(tmp_path, "a.png", 1), "one")], f"dataset:{out}")
    assert (out / "a.png").read_text() == "mine"
    assert len(files(out)) == 3


def test_a_copy_is_a_file_of_its_own(tmp_path: Path, out: Path) -> None:
    made = record(put(tmp_path, "a.png", 1), "one")
    run(tmp_path, [made], f"dataset:{out}")
    (out / "a.png").write_bytes(b"edited in place")
    assert (tmp_path / "a.png").read_bytes() == picture(1)


def test_a_disk_that_can_share_bytes_does(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    asked = []

    def share(to: int, request: int, source: int) -> int:
        asked.append(request)
        return os.write(to, os.pread(source, 1 << 20, 0))

    monkeypatch.setattr(fcntl, "ioctl", share)
    first, second = records_of(tmp_path, ["a.png", "b.png"])
    run(tmp_path, [first], f"dataset:{out}")
    assert (asked, (out / "a.png").read_bytes()) == ([0x40049409], picture(0))
    # What was shared is checked like any other copy.
    (tmp_path / "b.png").write_bytes(picture(7))
    with pytest.raises(CaptioningError, match="was changed after"):
        run(tmp_path, [second], f"dataset:{out}")
    assert not (out / "b.png").exists()


def test_a_crop_in_the_folder_stays_whatever_comes(tmp_path: Path, out: Path) -> None:
    item = put(tmp_path, "a.png", 1)
    run(tmp_path, [record(item, "one")], f"dataset:{out}")
    (out / "a.png").write_bytes(b"a crop")
    # Another caption, another picture under this name, and its end.
    run(tmp_path, [record(item, "two")], f"dataset:{out}")
    new = record(put(tmp_path, "a.png", 2), "three")
    run(tmp_path, [new], f"dataset:{out}")
    assert [(row["file_name"], row["text"]) for row in lines_of(out / "metadata.jsonl")] == [("a.png", "three")]
    assert (out / "a.png").read_bytes() == b"a crop"
    run(tmp_path, [moved(new, tmp_path, "b.png")], f"dataset:{out}")
    assert [(row["file_name"], row["text"]) for row in lines_of(out / "metadata.jsonl")] == [("b.png", "three")]
    (crop,) = kept(tmp_path)
    assert (crop.read_bytes(), (out / "b.png").read_bytes()) == (b"a crop", picture(2))
    # Taken away, it makes room for the original.
    (out / "b.png").unlink()
    crop.unlink()
    run(tmp_path, [Record(put(tmp_path, "b.png", 2), new.key, new.content, new.caption)], f"dataset:{out}")
    assert (out / "b.png").read_bytes() == picture(2)


def clip(folder: Path, name: str, number: int) -> Record:
    """A video to the output, which doesn't decode it."""
    made = record(put(folder, name, number), f"clip {number}")
    item = replace(made.item, kind="video")
    return replace(made, item=item, caption=replace(made.caption, kind="video"))


def names(out: Path) -> list[str]:
    rows_of(f"dataset:{out}")
    return [row["file_name"] for row in lines_of(out / "metadata.jsonl")]


def test_a_second_kind_of_media_gets_a_folder_of_its_own(tmp_path: Path, out: Path) -> None:
    pictures = records_of(tmp_path / "media", ["a.png", "cats/b.png"])
    clips = [clip(tmp_path / "media", name, number) for number, name in enumerate(("a.mp4", "cats/c.mp4"), 7)]
    run(tmp_path, pictures, f"dataset:{out}")
    assert names(out) == ["a.png", "cats/b.png"]
    for _ in range(2):
        run(tmp_path, [*pictures, *clips], f"dataset:{out}")
        assert names(out) == ["a.png", "cats/b.png", "videos/a.png", "videos/cats/c.png"]
    run(
        tmp_path,
        [record(put(tmp_path / "media", "d.png", 20), "d"), clip(tmp_path / "media", "e.mp4", 21)],
        f"dataset:{out}",
    )
    assert names(out)[4:] == ["d.png", "videos/e.png"]


def test_a_folder_of_an_earlier_version_goes_on_as_it_is(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has pictures and clips at its top: no medium is moved or written again, and new ones join them."""
    media = tmp_path / "media"
    both = [*records_of(media, ["a.png", "videos/b.png"]), clip(media, "c.mp4", 7), clip(media, "videos/d.mp4", 8)]
    with monkeypatch.context() as patch:
        patch.setattr(DatasetFolder, "_folder_of", lambda *_: "")
        run(tmp_path, both, f"dataset:{out}")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.png")}
    assert names(out) == ["a.png", "videos/b.png", "c.png", "videos/d.png"]
    new = [record(put(media, "e.png", 20), "e"), clip(media, "f.mp4", 21)]
    assert run(tmp_path, [*both, *new], f"dataset:{out}") == [Wants.DONE] * 4 + [Wants.CAPTION] * 2
    assert names(out) == ["a.png", "videos/b.png", "c.png", "videos/d.png", "e.png", "f.png"]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_caption_that_is_named_kind_makes_no_picture_a_video(tmp_path: Path, out: Path) -> None:
    media = tmp_path / "media"
    first = record(put(media, "a.png", 1), "a")
    run(tmp_path, [replace(first, caption=replace(first.caption, others={"kind": "video"}))], f"dataset:{out}")
    run(tmp_path, [clip(media, "c.mp4", 7)], f"dataset:{out}")
    assert names(out) == ["a.png", "videos/c.png"]
