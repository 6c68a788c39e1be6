"""Which record takes the place of which, when commands differ in source, folder and output of records."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.outputs import Wants
from qwen35mm.captioning.records import Record
from tests.captioning.outputs.helpers import captions_of, picture, put, record, rows_of, run

KINDS = ("jsonl", "dataset", "parquet", "webdataset")


@pytest.fixture(params=KINDS)
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}:{tmp_path / 'out'}"


def test_two_commands_may_give_one_name_to_two_files(tmp_path: Path, spec: str) -> None:
    photo, clip = (
        record(put(tmp_path / name, "001.png", number), name) for number, name in enumerate(("photo", "clip"))
    )
    for each in (photo, clip):
        run(tmp_path, [each], spec)
    for each in (photo, clip):
        assert run(tmp_path, [each], spec) == [Wants.DONE]
    assert sorted(row["caption"] for row in rows_of(spec)) == ["clip", "photo"]
    # Both are gone, and one comes back under another roof, with another caption.
    for name in ("photo", "clip"):
        (tmp_path / name / "001.png").unlink()
    other = record(put(tmp_path / "other", "001.png", 7), "other")
    run(tmp_path, [other], spec)
    assert "other" in {row["caption"] for row in rows_of(spec)}
    assert len(rows_of(spec)) == 2, "in the place of one that is gone"


def test_a_copy_takes_no_place_from_another_folder(tmp_path: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`caption photos`, and then `cd photos; caption .`, where the first run's relative paths name nothing."""

    def typed(folder: str, name: str) -> Record:
        (tmp_path / "photos" / name).write_bytes(picture(3))
        path = Path(folder) / name
        return record(Item(name, path, "image", path), "same")

    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    run(tmp_path, [typed("photos", name) for name in ("a.png", "b.png")], spec)
    monkeypatch.chdir(tmp_path / "photos")
    wanted = run(tmp_path, [typed("", name) for name in ("a.png", "b.png", "c.png")], spec)
    assert wanted == [Wants.DONE, Wants.DONE, Wants.CAPTION]
    assert set(captions_of(rows_of(spec))) == {"a.png", "b.png", "c.png"}


def test_lines_that_are_written_again_name_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, places = f"jsonl:{tmp_path / 'all.jsonl'}", (tmp_path, tmp_path / "elsewhere")
    places[1].mkdir()
    put(tmp_path, "photos/a.png", 1)
    path = Path("photos/a.png")
    monkeypatch.chdir(tmp_path)
    run(tmp_path, [record(Item("a.png", path, "image", path), "text")], spec)
    for place, shown in zip(places, ("photos/a.png", str(tmp_path / path)), strict=True):
        monkeypatch.chdir(place)
        (tmp_path / "all.jsonl").unlink()
        run(tmp_path, [], spec)
        assert [row["path"] for row in rows_of(spec)] == [shown]
