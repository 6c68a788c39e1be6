"""Parquet files and saved datasets, written by pyarrow as the `datasets` library lays them out."""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import tracemalloc
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.sources.scan import ScanOptions, scan
from qwen35mm.errors import CaptioningError, MissingExtraError
from tests.captioning.sources.media_tree import ALL, JPEG, MP4, PNG, PSD, items, lock, names, scanned, write

# How the `datasets` library stores an image.
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def table(media: Sequence[Any], kind: pa.DataType = IMAGE, **columns: Any) -> pa.Table:
    return pa.table({"image": pa.array(media, kind), **columns})


def write_parquet(path: Path, data: pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(data, path, **options)
    return path


def save_to_disk(folder: Path, *shards: pa.Table) -> None:
    """`Dataset.save_to_disk`: arrow streams, and `state.json` with their names."""
    folder.mkdir(parents=True)
    files = [f"data-{index:05d}-of-{len(shards):05d}.arrow" for index in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        with pa.OSFile(str(folder / file), "wb") as target, pa.ipc.new_stream(target, shard.schema) as stream:
            stream.write_table(shard, max_chunksize=20)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": file} for file in files]}), "utf-8")
    (folder / "dataset_info.json").write_text("{}", "utf-8")


def test_a_parquet_file(tmp_path: Path) -> None:
    media = [{"bytes": PNG, "path": None}, {"bytes": JPEG, "path": "cats/a.jpg"}, {"bytes": MP4, "path": ""}]
    path = write_parquet(tmp_path / "train.parquet", table(media, label=[1, 2, None]))
    found = items(path)
    assert [each.name for each in found] == [f"train.parquet/{n}" for n in ("000000", "000001-a.jpg", "000002")]
    assert [each.read() for each in found] == [PNG, JPEG, MP4]
    assert [each.kind for each in found] == ["image", "image", "video"]
    assert [each.metadata for each in found] == [{"label": 1}, {"label": 2}, {}]
    assert all(each.path is None for each in found)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_a_column_of_bytes(tmp_path: Path, kind: pa.DataType) -> None:
    path = write_parquet(tmp_path / "x.parquet", table([PNG, JPEG], kind))
    assert [each.read() for each in items(path)] == [PNG, JPEG]


def test_a_column_of_paths(tmp_path: Path) -> None:
    write(tmp_path, "set/images/a.png", "set/data/b.png")
    whole = str(tmp_path / "set" / "images" / "a.png")
    paths = ["images/a.png", "b.png", whole, "gone.png", "https://host/c.png", None]
    write_parquet(tmp_path / "set" / "data" / "x.parquet", table(paths, pa.string()))
    found = list(scan([tmp_path / "set"], ALL))
    assert [each.path for each in found if isinstance(each, Item)] == [
        tmp_path / "set" / "images" / "a.png",
        tmp_path / "set" / "data" / "b.png",
        tmp_path / "set" / "images" / "a.png",
    ]
    assert {each.name: each.kind for each in found if isinstance(each, Unreadable)} == {
        "data/x.parquet/000003-gone.png": "unreadable",
        "data/x.parquet/000004-c.png": "unsupported",
        "data/x.parquet/000005": "unreadable",
    }


def test_rows_name_no_files_outside_of_the_dataset(tmp_path: Path) -> None:
    write(tmp_path, "secret.png", "set-not/b.png", "set/in/a.png")
    (tmp_path / "set" / "in" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "set" / "folder").symlink_to(tmp_path, target_is_directory=True)
    paths = [
        str(tmp_path / "secret.png"),
        "../secret.png",
        "../../secret.png",
        "in/../../secret.png",
        "../set-not/b.png",
    ]
    paths += ["in/link.png", "folder/secret.png", "in/../../set/in/a.png", "in/a.png"]
    for media in (table(paths, pa.string()), table([{"bytes": None, "path": path} for path in paths])):
        for place, source in (
            ("set/x.parquet", "set"),
            ("set/data/x.parquet", "set"),
            ("set/x.parquet", "set/x.parquet"),
        ):
            path = write_parquet(tmp_path / place, media)
            found = list(scan([tmp_path / source], ScanOptions(image_column="image")))
            bad = [each for each in found if isinstance(each, Unreadable)]
            assert len(bad) >= 7, place
            assert {each.kind for each in bad} <= {"unsupported", "unreadable"}
            assert sum("outside of the dataset" in each.message for each in bad) >= 6
            good = {os.path.realpath(each.path) for each in found if isinstance(each, Item) and each.path is not None}
            assert good == {os.path.realpath(tmp_path / "set" / "in" / "a.png")}
            path.unlink()


def test_a_dataset_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    """Its files are links to blobs."""
    write(tmp_path, "blobs/0a", "blobs-not/0b")
    root = tmp_path / "snapshots" / "rev"
    write_parquet(root / "x.parquet", table(["a.png", "b.png"], pa.string()))
    (root / "a.png").symlink_to(Path("..", "..", "blobs", "0a"))
    (root / "b.png").symlink_to(Path("..", "..", "blobs-not", "0b"))
    good, bad = scan([root / "x.parquet"], ALL)
    assert isinstance(good, Item)
    assert isinstance(bad, Unreadable)


@pytest.mark.parametrize("name", ["../other/data-00000-of-00001.arrow", "{}/other/data-00000-of-00001.arrow"])
def test_a_saved_dataset_names_no_shards_outside(tmp_path: Path, name: str) -> None:
    for folder in ("set", "other"):
        save_to_disk(tmp_path / folder, table([{"bytes": PNG}]))
    state = {"_data_files": [{"filename": name.format(tmp_path)}]}
    (tmp_path / "set" / "state.json").write_text(json.dumps(state), "utf-8")
    with pytest.raises(CaptioningError, match="'set' names a shard outside of the dataset"):
        scan([tmp_path / "set"], ALL)


def test_metadata_is_json(tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 29)
    columns: dict[str, Any] = {
        "text": ["é"],
        "list": [[1, 2]],
        "dict": [{"a": 1.5, "b": None}],
        "nan": [math.inf],
        "day": [day],
        "price": [Decimal("1.50")],
        "flag": [True],
        "raw": [b"\xff"],
        "inner": [{"bytes": b"\xff", "n": 1}],
    }
    (found,) = items(write_parquet(tmp_path / "x.parquet", table([{"bytes": PNG}], **columns)))
    expected = {
        "text": "é",
        "list": [1, 2],
        "dict": {"a": 1.5, "b": None},
        "nan": "inf",
        "day": "2024-02-29",
        "price": "1.50",
        "flag": True,
    }
    assert found.metadata == expected
    json.dumps(found.metadata, allow_nan=False)


def test_rows_that_hold_no_medium(tmp_path: Path) -> None:
    media = [{"bytes": PNG}, None, {"bytes": b""}, {"bytes": b"text"}, {"bytes": PSD}, {"bytes": JPEG}]
    path = write_parquet(tmp_path / "x.parquet", table(media))
    found = {each.name[-1]: each.kind for each in scan([path], ALL)}
    kinds = {"1": "unreadable", "2": "unreadable", "3": "unsupported", "4": "unsupported"}
    assert found == {"0": "image", **kinds, "5": "image"}


def test_the_column_is_found_where_there_is_one(tmp_path: Path) -> None:
    sound = pa.array([{"bytes": b"RIFF\0\0\0\0WAVE", "path": "a.wav"}], IMAGE)
    file_name = pa.array(["a.png"])
    path = write_parquet(tmp_path / "x.parquet", table([{"bytes": PNG}], sound=sound, file_name=file_name))
    (found,) = items(path)
    assert found.metadata == {"file_name": "a.png"}


def test_several_columns_are_asked_for(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", table([{"bytes": PNG}], after=pa.array([{"bytes": JPEG}], IMAGE)))
    with pytest.raises(CaptioningError, match="several columns with media: image, after"):
        scan([path], ALL)
    assert items(path, options=ScanOptions(image_column="after"))[0].read() == JPEG
    with pytest.raises(CaptioningError, match=r"no column 'before'\. Its columns are image, after"):
        scan([path], ScanOptions(image_column="before"))


def test_a_parquet_file_without_media(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", pa.table({"text": ["a"]}))
    with pytest.raises(CaptioningError, match="no column with images or videos"):
        scan([path], ALL)
    # In a folder it is one more file that is no medium.
    assert scanned(tmp_path) == []


def test_a_saved_dataset(tmp_path: Path) -> None:
    row = {"bytes": PNG, "path": None}
    save_to_disk(tmp_path / "set", table([row] * 45, n=list(range(45))), table([row], n=[45]))
    found = items(tmp_path / "set")
    assert [each.metadata["n"] for each in found] == list(range(46))
    assert found[0].name == "data-00000-of-00002.arrow/000000"
    assert found[45].name == "data-00001-of-00002.arrow/000000"


def test_a_saved_dataset_with_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, table([{"bytes": PNG}]))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}', "utf-8")
    first, second = (f"{split}/data-00000-of-00001.arrow/000000" for split in ("train", "test"))
    assert scanned(tmp_path) == [first, second]
    assert scanned(tmp_path, options=ScanOptions(exclude=("train",))) == [second]


@pytest.mark.parametrize("below", ["", "data"])
def test_a_folder_of_parquet_files(tmp_path: Path, below: str) -> None:
    write(tmp_path, "README.md", data=b"---\n")
    shards = [write_parquet(tmp_path / below / f"train-{index}.parquet", table([{"bytes": PNG}])) for index in (1, 0)]
    found = [f"{shard.relative_to(tmp_path).as_posix()}/000000" for shard in reversed(shards)]
    assert scanned(tmp_path) == found
    assert scanned(shards[0], tmp_path) == [f"{shards[0].name}/000000", found[0]]


def test_media_beside_a_parquet_file_make_a_folder_of_media(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    write_parquet(tmp_path / "captions.parquet", table([{"bytes": PNG}]))
    assert scanned(tmp_path) == ["a.png"]


def test_damaged_shards(tmp_path: Path) -> None:
    row = {"bytes": PNG, "path": None}
    for index in range(4):
        write_parquet(tmp_path / f"{index}.parquet", table([row]))
    write(tmp_path, "0.parquet", data=b"PAR1 and no more")
    whole = (tmp_path / "1.parquet").read_bytes()
    write(tmp_path, "1.parquet", data=whole[: len(whole) // 2])
    write_parquet(tmp_path / "2.parquet", pa.table({"other": [1]}))
    assert scanned(tmp_path) == ["!0.parquet", "!1.parquet", "!2.parquet", "3.parquet/000000"]
    assert scanned(tmp_path / "0.parquet") == ["!0.parquet"]


def test_an_arrow_stream_that_is_cut_off_gives_what_is_whole(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "set", table([{"bytes": PNG}] * 60))
    path = tmp_path / "set" / "data-00000-of-00001.arrow"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    found = scanned(tmp_path / "set")
    assert found == [f"{path.name}/{index:06d}" for index in range(len(found) - 1)] + [f"!{path.name}"]
    assert len(found) in (21, 41)
    path.unlink()
    assert scanned(tmp_path / "set") == [f"!{path.name}"]


def not_utf8(*values: bytes) -> pa.Array:
    """A column of text whose bytes nobody has checked, as other programs write it."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


@pytest.mark.parametrize("column", [None, "image"])
def test_values_that_python_has_no_words_for(tmp_path: Path, column: str | None) -> None:
    row = {"bytes": PNG, "path": None}
    texts = not_utf8(*[b"fine"] * 16, b"caf\xe9")
    write_parquet(tmp_path / "set" / "a.parquet", table([row] * 17, text=texts))
    far = pa.array([2**60], pa.timestamp("ms"))
    write_parquet(tmp_path / "set" / "b.parquet", table([row], day=far))
    write_parquet(tmp_path / "set" / "c.parquet", table([row]))
    *items, first, second, last = scan([tmp_path / "set"], ScanOptions(image_column=column))
    assert len(items) == 16
    assert names([first, second, last]) == ["!a.parquet", "!b.parquet", "c.parquet/000000"]
    for each, words in ((first, "UTF-8"), (second, "9999")):
        assert isinstance(each, Unreadable)
        assert (each.kind, words in each.message) == ("damaged", True)
    (only,) = scan([tmp_path / "set" / "b.parquet"], ScanOptions(image_column=column))
    assert isinstance(only, Unreadable)
    assert "9999" in only.message


def test_a_shard_whose_name_is_not_utf8(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    write_parquet(tmp_path / "x.parquet", table([{"bytes": PNG}])).rename(tmp_path / os.fsdecode(b"caf\xe9.parquet"))
    write(tmp_path, "list.txt", data=b"caf\xe9.parquet\na.png\n")
    bad, good = scan([f"@{tmp_path}/list.txt"], ALL)
    assert isinstance(bad, Unreadable)
    assert (bad.kind, "Rename it" in bad.message) == ("damaged", True)
    assert good.name == "a.png"


def test_paths_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ["data:image/png;base64," + "QUJD/" * 2000, "x" * 9000, "nul\0.png", "locked/b.png", "a.png"]
    write(tmp_path, "a.png")
    path = write_parquet(tmp_path / "x.parquet", table(paths, pa.string()))
    lock(monkeypatch, "locked")
    found = list(scan([path], ScanOptions(image_column="image")))
    kinds = [each.kind for each in found]
    assert kinds == ["unsupported", "unreadable", "unreadable", "unreadable", "image"]
    assert found[0].name == "x.parquet/000000"


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "x.parquet", table([{"bytes": PNG}]))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for source in (path, tmp_path):
        with pytest.raises(MissingExtraError, match=r"qwen35mm\[datasets\]"):
            scan([source], ALL)


def test_a_list_goes_on_after_a_dataset_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    write_parquet(tmp_path / "sub" / "x.parquet", pa.table({"text": ["a"]}))
    write_parquet(tmp_path / "sub" / "y.parquet", table([{"bytes": PNG}]))
    write(tmp_path, "list.txt", data=b"sub/x.parquet\nsub/y.parquet\na.png\n")
    assert scanned(f"@{tmp_path}/list.txt") == ["!sub/x.parquet", "sub/y.parquet/000000", "a.png"]


def test_rows_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """One row group of 64 MB in pages of 4; what Python and Arrow hold of it stays below."""
    data = PNG + b"\0" * 2**20
    path = write_parquet(
        tmp_path / "x.parquet",
        table([{"bytes": data}] * 64),
        use_dictionary=False,
        write_batch_size=4,
        compression="none",
    )
    before = pa.total_allocated_bytes()
    most = num_rows = 0
    tracemalloc.start()
    try:
        for _ in scan([path], ALL):
            num_rows += 1
            most = max(most, pa.total_allocated_bytes() - before)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_rows == 64
    assert most + peak < 56 * 2**20, (most, peak)
