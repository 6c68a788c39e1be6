"""Zips, and folders of zips and tars, made with the standard library; img2dataset's folders as it writes them."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.captioning.items import FileSlice, Unreadable
from qwen35mm.captioning.sources.scan import ScanOptions, scan
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess import MediaLimits
from tests.captioning.sources.media_tree import ALL, JPEG, MP4, PNG, items, scanned, unreadable, write
from tests.captioning.sources.test_tars import write_tar

STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


def write_zip(path: Path, *members: tuple[str, bytes], how: int = DEFLATED) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("how", [STORED, DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_media_are_read_whatever_they_are_packed_with(tmp_path: Path, how: int) -> None:
    members = [
        ("b/1.png", PNG),
        ("a.jpg", JPEG),
        ("c", MP4),
        ("notes.txt", b"text"),
        ("b/.hidden.png", PNG),
        ("d/", b""),
    ]
    found = items(write_zip(tmp_path / "photos.zip", *members, how=how))
    assert [each.name for each in found] == ["photos.zip/a.jpg", "photos.zip/b/1.png", "photos.zip/c"]
    assert [each.read() for each in found] == [JPEG, PNG, MP4]
    assert {type(each.source) for each in found} == {FileSlice if how == STORED else bytes}


def test_what_lies_beside_a_medium_is_its_metadata(tmp_path: Path) -> None:
    members = [("a.jpg", JPEG), ("a.json", b'{"id": 7}'), ("a.txt", "é\n".encode()), ("b.jpg", JPEG), ("b.json", b"{")]
    found = items(write_zip(tmp_path / "x.zip", *members))
    assert [dict(each.metadata) for each in found] == [{"id": 7, "txt": "é"}, {}]


def test_names_stay_below_the_zip(tmp_path: Path) -> None:
    found = items(write_zip(tmp_path / "x.zip", ("../../etc/a.png", PNG), ("/b.png", PNG)))
    assert [each.name for each in found] == ["x.zip/b.png", "x.zip/etc/a.png"]


@pytest.mark.parametrize("how", [STORED, DEFLATED])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_each_of_equal_names_is_an_item(tmp_path: Path, how: int) -> None:
    members = [("./a.png", PNG), ("a.png", PNG + b"2"), ("a.png", PNG + b"3")]
    found = items(write_zip(tmp_path / "x.zip", *members, how=how))
    assert [each.read() for each in found] == [data for _, data in members]
    assert len({each.name for each in found}) == 3


def test_one_that_is_too_large_is_not_unpacked(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", ("a.png", PNG + bytes(10**6)), ("b.png", PNG))
    options = ScanOptions(limits=MediaLimits(max_image_bytes=1000, max_video_bytes=1000))
    large, small = scan([path], options)
    assert isinstance(large, Unreadable)
    assert (large.name, large.kind) == ("x.zip/a.png", "too large")
    assert small.name == "x.zip/b.png"


def test_an_encrypted_or_damaged_member_is_its_own_failure(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.zip", ("a.png", PNG * 9), ("b.png", PNG * 9), ("c.png", PNG))
    data = bytearray(path.read_bytes())
    # The second member's first compressed bytes; the third's flags, in the central directory.
    with zipfile.ZipFile(path) as archive:
        begin = archive.getinfo("b.png").header_offset + 30 + len("b.png")
    data[begin : begin + 20] = b"\xff" * 20
    entry = data.rindex(b"PK\x01\x02")
    struct.pack_into("<H", data, entry + 8, 1)
    path.write_bytes(data)
    assert [(each.name, getattr(each, "kind", "")) for each in scan([path], ALL)] == [
        ("x.zip/a.png", "image"),
        ("x.zip/b.png", "damaged"),
        ("x.zip/c.png", "unsupported"),
    ]


@given(data=st.data())
def test_hostile_bytes_end_in_words(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_zip(tmp_path_factory.mktemp("zips") / "x.zip", ("a.png", PNG), ("a.json", b"{}"), ("b", JPEG))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    for each in scan([path], ALL):
        if isinstance(each, Unreadable):
            assert "could not be looked at" not in each.message


def test_folders_of_tars_and_zips(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    write_tar(tmp_path / "train" / "0.tar", ("a.jpg", JPEG), ("a.jpg", JPEG), ("b.png", PNG))
    write_tar(tmp_path / "train" / "broken.tar", ("a.jpg", JPEG)).write_bytes(b"no tar")
    write_zip(tmp_path / "train" / "1.zip", ("a.jpg", JPEG), ("c/d.png", PNG))
    os.mkfifo(tmp_path / "train" / "pipe.tar")
    first, again, second, *rest = [each.name for each in scan([tmp_path], ALL)]
    assert (first, second) == ("train/0.tar/a.jpg", "train/0.tar/b.png")
    assert again.endswith("train/0.tar/a.jpg")
    assert again != first
    assert rest == ["train/1.zip/a.jpg", "train/1.zip/c/d.png", "train/broken.tar"]
    assert [each.kind for each in scan([tmp_path], ALL) if isinstance(each, Unreadable)] == ["damaged"]
    assert scanned(tmp_path, options=ScanOptions(include=("*.png",))) == [
        "train/0.tar/b.png",
        "train/1.zip/c/d.png",
        "!train/broken.tar",
    ]
    options = ScanOptions(include=("train/1.zip/c",), exclude=("broken.tar",))
    assert scanned(tmp_path, options=options) == ["train/1.zip/c/d.png"]
    assert not unreadable(tmp_path, options=ScanOptions(exclude=("broken.tar",)))


def test_beside_pictures_an_archive_is_a_backup(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    write_zip(tmp_path / "backup.zip", ("a.png", PNG))
    write_tar(tmp_path / "backup.tar", ("a.png", PNG))
    assert scanned(tmp_path) == ["a.png"]


def test_office_documents_are_no_archives(tmp_path: Path) -> None:
    write_zip(tmp_path / "letter.docx", ("word/media/image1.png", PNG))
    assert scanned(tmp_path) == []


def img2dataset(root: Path, *, tars: bool) -> None:
    """As img2dataset 1.45 writes a shard: `files`, or `webdataset`."""
    rows = [
        {
            "url": f"https://example.org/{key}.jpg",
            "caption": f"Picture {key}",
            "key": f"00000000{key}",
            "status": status,
        }
        for key, status in enumerate(("success", "failed_to_download", "success"))
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / "00000.parquet")
    (root / "00000_stats.json").write_text('{"count": 3, "successes": 2}')
    parts = [
        (f"{row['key']}.{suffix}", data)
        for row in rows
        if row["status"] == "success"
        for suffix, data in (("jpg", JPEG), ("txt", row["caption"].encode()), ("json", json.dumps(row).encode()))
    ]
    if tars:
        write_tar(root / "00000.tar", *parts)
    else:
        (root / "00000").mkdir()
        for name, data in parts:
            (root / "00000" / name).write_bytes(data)


@pytest.mark.parametrize("tars", [False, True])
def test_what_img2dataset_downloaded(tmp_path: Path, tars: bool) -> None:
    img2dataset(tmp_path, tars=tars)
    found = items(tmp_path)
    shard = "00000.tar" if tars else "00000"
    assert [each.name for each in found] == [f"{shard}/000000000.jpg", f"{shard}/000000002.jpg"]
    assert [each.metadata["caption"] for each in found] == ["Picture 0", "Picture 2"]
    assert not unreadable(tmp_path)
    with pytest.raises(CaptioningError, match="download them first"):
        scanned(tmp_path / "00000.parquet")


def test_a_shard_of_img2dataset_that_is_named_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    img2dataset(tmp_path, tars=False)
    shard = tmp_path / "00000"
    assert [each.metadata["caption"] for each in items(shard)] == ["Picture 0", "Picture 2"]
    assert [each.metadata["caption"] for each in items(shard / "000000002.jpg")] == ["Picture 2"]
    monkeypatch.chdir(shard)
    assert [each.metadata["caption"] for each in items(Path())] == ["Picture 0", "Picture 2"]
    (tmp_path / "00000_stats.json").unlink()
    assert [each.metadata for each in items(shard)] == [{}, {}], "other programs' JSON isn't read"
