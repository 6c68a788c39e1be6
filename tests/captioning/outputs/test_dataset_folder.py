"""A dataset folder: media beside their lines, under names that fit their content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.outputs import Wants
from tests.captioning.outputs.helpers import (
    HARD_NAMES,
    captions_of,
    expected,
    lines_of,
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


def test_media_are_linked_where_the_disk_can(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = records_of(tmp_path, ["a.png", "b.png"])
    run(tmp_path, [first], f"dataset:{out}")
    assert (out / "a.png").samefile(tmp_path / "a.png")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    run(tmp_path, [first, second], f"dataset:{out}")
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
