"""What all files of records have in common: whose record is there, and which takes whose place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.outputs import Mode, Wants
from qwen35mm.captioning.records import Record
from qwen35mm.errors import CaptioningError, OutputError
from tests.captioning.outputs.helpers import (
    HARD_NAMES,
    captions_of,
    expected,
    kept,
    leftovers,
    moved,
    picture,
    put,
    record,
    records_of,
    rows_of,
    run,
)

KINDS = ("jsonl", "dataset", "parquet", "webdataset")


@pytest.fixture(params=KINDS)
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}:{tmp_path / 'out'}"


def test_a_record_says_all_that_is_known(tmp_path: Path, spec: str) -> None:
    records = records_of(tmp_path / "media", HARD_NAMES)
    run(tmp_path, records, spec)
    for row, each in zip(rows_of(spec), records, strict=True):
        if spec.startswith("parquet"):
            row = {key: value for key, value in row.items() if value is not None}
            row["metadata"] = json.loads(row["metadata"])
        known = each.to_dict()
        if spec.startswith("dataset"):
            known.pop("path")
            row.pop("file_name")
        assert row == known


def test_a_new_caption_replaces_the_old_one(tmp_path: Path, spec: str) -> None:
    names = [f"{number}.png" for number in range(8)]
    old, new = records_of(tmp_path, names), records_of(tmp_path, names, "second")
    mixed = [old[0], new[1], *old[2:6], new[6], new[7]]
    # A shard that shrank shrinks again, and goes.
    for records in (old, mixed, [new[0], *mixed[1:]], new, old):
        run(tmp_path, records, spec)
        rows = rows_of(spec)
        assert captions_of(rows) == expected(records)
        if spec.startswith(("jsonl", "dataset")):
            assert [row["name"] for row in rows] == names, "in the old order"


def test_a_renamed_medium_takes_its_records_place(tmp_path: Path, spec: str) -> None:
    records = records_of(tmp_path, ["a.png", "b.png", "c.png"])
    run(tmp_path, records, spec)
    renamed = moved(records[1], tmp_path, "z.png")
    copy = record(put(tmp_path, "copy.png", 0), records[0].caption.text, "first")
    assert copy.key == records[0].key
    run(tmp_path, [records[0], renamed, copy], spec)
    names = {row["name"] for row in rows_of(spec)}
    assert names == {"a.png", "z.png", "c.png", "copy.png"}
    if spec.startswith("jsonl"):
        assert [row["name"] for row in rows_of(spec)] == ["a.png", "z.png", "c.png", "copy.png"]


@pytest.mark.parametrize("records_per_shard", [2, 10])
def test_a_renamed_folder_with_duplicates(tmp_path: Path, spec: str, records_per_shard: int) -> None:
    """The twins were one work, so each new name could take the place of either old one."""
    for folder in ("old", "new"):
        twins = [record(put(tmp_path, f"{folder}/{name}.png", 5), "same") for name in ("a1", "a2")]
        run(tmp_path, twins, spec, records_per_shard=records_per_shard)
        assert captions_of(rows_of(spec)) == expected(twins)
        if folder == "old":
            (tmp_path / "old").rename(tmp_path / "new")
    assert run(tmp_path, twins, spec, records_per_shard=records_per_shard) == [Wants.DONE] * 2


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


@pytest.mark.parametrize("kind", ["dataset", "webdataset"])
def test_a_medium_that_changed_or_is_gone_fails_alone(tmp_path: Path, kind: str) -> None:
    spec, records = f"{kind}:{tmp_path / 'out'}", records_of(tmp_path, [f"{number}.png" for number in range(3)])
    for change in (lambda path: path.write_bytes(picture(99)), Path.unlink):
        change(tmp_path / "1.png")
        run(tmp_path, [records[0]], spec)
        with pytest.raises(CaptioningError, match=r"1\.png") as error:
            run(tmp_path, [records[1], records[2]], spec)
        assert not isinstance(error.value, OutputError)
        run(tmp_path, [], spec)
        assert captions_of(rows_of(spec)) == expected(records[:1])
        assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize("mode", ["skip", "overwrite", "append"])
@pytest.mark.parametrize(
    ("kind", "theirs"), [("jsonl", "out"), ("parquet", "out/000000.parquet"), ("webdataset", "out/000000.tar")]
)
def test_what_nobody_knows_is_refused_moved_aside_or_kept(tmp_path: Path, kind: str, theirs: str, mode: Mode) -> None:
    records, spec = records_of(tmp_path, [f"{number}.png" for number in range(4)]), f"{kind}:{tmp_path / 'out'}"
    run(tmp_path / "elsewhere", records[:2], spec)
    before = (tmp_path / theirs).read_bytes()
    if mode == "skip":
        with pytest.raises(CaptioningError, match="written by this run"):
            run(tmp_path, records[2:], spec)
        assert (tmp_path / theirs).read_bytes() == before
        return
    for _ in range(2):
        run(tmp_path, records[2:], spec, mode=mode)
    assert captions_of(rows_of(spec)) == expected(records[2:] if mode == "overwrite" else records)
    aside = [path.read_bytes() for path in kept(tmp_path)]
    assert aside == ([before] if mode == "overwrite" else [])


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
