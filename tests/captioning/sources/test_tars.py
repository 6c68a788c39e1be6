"""WebDataset tars, made with the standard library."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from qwen35mm.captioning.items import FileSlice, Unreadable
from qwen35mm.captioning.sources.scan import ScanOptions, scan
from qwen35mm_preprocess import MediaLimits
from tests.captioning.sources.media_tree import ALL, JPEG, MOVING_GIF, MP4, PNG, items, names, scanned


def write_tar(path: Path, *members: tuple[str, bytes], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        add(tar, *members)
    return path


def add(tar: tarfile.TarFile, *members: tuple[str, bytes]) -> None:
    for name, data in members:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def test_media_are_read_by_offset_and_chosen_by_their_names_in_the_tar(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "train.tar", ("a/0.jpg", JPEG), ("a/1.png", PNG), ("a/2.mp4", MP4), ("3.gif", MOVING_GIF)
    )
    found = items(path)
    assert [each.name for each in found] == [f"train.tar/{name}" for name in ("a/0.jpg", "a/1.png", "a/2.mp4", "3.gif")]
    assert [each.kind for each in found] == ["image", "image", "video", "video"]
    assert [each.read() for each in found] == [JPEG, PNG, MP4, MOVING_GIF]
    assert all(isinstance(each.source, FileSlice) and each.path is None for each in found)
    options = ScanOptions(include=("a/*",), exclude=("*.png",))
    assert scanned(path, options=options) == ["train.tar/a/0.jpg", "train.tar/a/2.mp4"]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_lies_beside_a_medium_is_its_metadata(tmp_path: Path, format: int) -> None:
    path = write_tar(
        tmp_path / "x.tar",
        ("0.json", b'{"id": 7, "tags": ["a"]}'),
        ("0.seg.png", PNG),
        ("0.jpg", JPEG),
        ("0.txt", "é\n".encode()),
        ("0.cls", b"3"),
        ("1.jpg", JPEG),
        ("2.jpg", JPEG),
        ("2.json", b"[1]"),
        ("3.jpg", JPEG),
        ("3.json", b"{broken"),
        ("f.x/4.jpg", JPEG),
        ("f.x/4.txt", b"BMW"),
        format=format,
    )
    found = {each.name: dict(each.metadata) for each in items(path)}
    both = {"id": 7, "tags": ["a"], "txt": "é"}
    assert found == {
        "x.tar/0.seg.png": both,
        "x.tar/0.jpg": both,
        "x.tar/1.jpg": {},
        "x.tar/2.jpg": {"json": [1]},
        "x.tar/3.jpg": {},
        "x.tar/f.x/4.jpg": {"txt": "BMW"},
    }


def test_members_that_are_no_media(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (
            ("folder.png", tarfile.DIRTYPE),
            ("link.png", tarfile.SYMTYPE),
            ("pipe.png", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.png"
            tar.addfile(info)
        add(tar, ("._a.png", PNG), ("a.npy", b"x"), ("b.png", b""), ("c.png", b"text"), ("noext", PNG))
    assert scanned(path) == ["!x.tar/b.png", "!x.tar/c.png", "x.tar/noext"]


def test_a_member_over_the_limit(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", ("a.png", PNG + b"\0" * 5000), ("b.png", PNG))
    options = ScanOptions(limits=MediaLimits(max_image_bytes=4000, max_video_bytes=4000))
    large, small = scan([path], options)
    assert isinstance(large, Unreadable)
    assert (large.kind, small.name) == ("too large", "x.tar/b.png")


def test_names_stay_below_the_tar_and_are_their_own(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "x.tar", ("/etc/a.png", PNG), ("../../b.png", PNG), ("./c.png", PNG), ("etc/a.png", JPEG)
    )
    found = scanned(path)
    assert found[:3] == ["x.tar/etc/a.png", "x.tar/b.png", "x.tar/c.png"]
    assert len(set(found)) == 4


def test_a_range_of_tars(tmp_path: Path) -> None:
    for number in range(8, 12):
        write_tar(tmp_path / f"{number:03d}.tar", ("0.jpg", JPEG))
    found = scanned(f"{tmp_path}/{{008..011}}.tar")
    assert found == ["008.tar/0.jpg", "009.tar/0.jpg", "010.tar/0.jpg", "011.tar/0.jpg"]


def test_a_tar_is_known_by_its_content(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "shard", ("0.jpg", JPEG))
    assert scanned(path) == ["shard/0.jpg"]
    # In a folder it is passed over: it may be what an earlier run wrote.
    assert scanned(tmp_path) == []


def test_a_compressed_tar_is_refused_in_words(tmp_path: Path) -> None:
    data = write_tar(tmp_path / "x.tar", ("0.jpg", JPEG)).read_bytes()
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(data))
    (found,) = scan([tmp_path / "x.tar.gz"], ALL)
    assert isinstance(found, Unreadable)
    assert (found.name, found.kind) == ("x.tar.gz", "unsupported")
    assert "Uncompress it first" in found.message


def test_a_tar_that_is_cut_off_gives_what_is_whole(tmp_path: Path) -> None:
    members = [(f"{number}.png", PNG + b"\0" * 600) for number in range(4)]
    data = write_tar(tmp_path / "x.tar", *members).read_bytes()
    size = 512 + 1024
    for kept in (*range(1, 3 * size, 97), size, size + 512, 2 * size - 1, 2 * size):
        (tmp_path / "x.tar").write_bytes(data[:kept])
        *items, last = scan([tmp_path / "x.tar"], ALL)
        whole = sum(number * size + 512 + len(PNG) + 600 <= kept for number in range(4))
        assert isinstance(last, Unreadable), kept
        assert (last.name, last.kind) == ("x.tar", "damaged")
        assert names(items) == [f"x.tar/{number}.png" for number in range(whole)], kept


def test_a_tar_that_is_damaged_in_the_middle_says_so(tmp_path: Path) -> None:
    data = bytearray(write_tar(tmp_path / "x.tar", *((f"{number}.png", PNG) for number in range(3))).read_bytes())
    data[1024 + 100] ^= 0xFF
    (tmp_path / "x.tar").write_bytes(data)
    assert scanned(tmp_path / "x.tar") == ["x.tar/0.png", "!x.tar"]


def test_a_sparse_member(tmp_path: Path) -> None:
    """GNU tar's own form (type S): a map of what isn't a hole in the header, then just that."""
    info = tarfile.TarInfo("a.png")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 512
    header = with_fields(info, {386: b"00000000000\x0000000001000\0", 483: b"00000002000\0"})
    (tmp_path / "x.tar").write_bytes(header + bytes(512) + bytes(1024))
    (found,) = scan([tmp_path / "x.tar"], ALL)
    assert isinstance(found, Unreadable)
    assert (found.name, found.kind) == ("x.tar/a.png", "unsupported")


def with_fields(info: tarfile.TarInfo, fields: dict[int, bytes]) -> bytes:
    """A header with other bytes at these places."""
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    for at, field in fields.items():
        header[at : at + len(field)] = field
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


def test_a_member_of_a_negative_size(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "x.tar", ("a.png", PNG)).read_bytes()[:1024]
    negative = b"\xff" + (2**88 - 512).to_bytes(11, "big")
    (tmp_path / "x.tar").write_bytes(whole + with_fields(tarfile.TarInfo("b.png"), {124: negative}) + bytes(2048))
    assert scanned(tmp_path / "x.tar") == ["x.tar/a.png", "!x.tar"]


@pytest.mark.parametrize("holes", ["x,y", "1", ""])
def test_a_map_of_holes_that_cannot_be_one(tmp_path: Path, holes: str) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, ("a.png", PNG))
        info = tarfile.TarInfo("b.png")
        info.pax_headers = {"GNU.sparse.map": holes}
        tar.addfile(info)
    found = scanned(tmp_path / "x.tar")
    assert found[0] == "x.tar/a.png"
    assert found[1:] in (["!x.tar"], ["!x.tar/b.png"])


@pytest.mark.parametrize("data", [b"text", b"\0" * 100, PNG])
def test_what_is_only_called_a_tar(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    assert scanned(tmp_path / "x.tar") == ["!x.tar"]


def test_memory_is_flat(tmp_path: Path) -> None:
    def peak(num_samples: int) -> int:
        samples = [(f"{number:06d}.{suffix}", data) for number in range(num_samples) for suffix, data in sample]
        path = write_tar(tmp_path / f"{num_samples}.tar", *samples)
        tracemalloc.start()
        try:
            assert sum(1 for _ in scan([path], ALL)) == num_samples
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    sample = [("jpg", JPEG), ("json", json.dumps({"text": "x" * 500}).encode())]
    # The names that were given are held, in up to 200 bytes each; a member of the tar would be kilobytes. What Python
    # itself keeps after a first time is not ours.
    assert min(peak(300), peak(300)) - peak(100) < 200 * 250
