"""Files, folders and lists as items: their order, their names, and what is wrong around them."""

from __future__ import annotations

import io
import os
import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.sources import folders
from qwen35mm.captioning.sources import scan as scan_module
from qwen35mm.captioning.sources.candidates import Candidate
from qwen35mm.captioning.sources.names import shard_of
from qwen35mm.captioning.sources.scan import ScanOptions, scan
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess import MediaLimits
from tests.captioning.sources.media_tree import (
    ALL,
    GIF,
    HEIC,
    JPEG,
    MOVING_GIF,
    MP4,
    PNG,
    PSD,
    lock,
    names,
    scanned,
    unreadable,
    write,
)


def test_a_folder_is_sorted_files_first(tmp_path: Path) -> None:
    write(tmp_path, "z.png", "a.png", "c/b.png", "c/a/x.png", "b/y.png")
    assert scanned(tmp_path) == ["a.png", "z.png", "b/y.png", "c/b.png", "c/a/x.png"]
    assert scanned(tmp_path, options=ScanOptions(recursive=False)) == ["a.png", "z.png"]
    assert scanned(tmp_path, options=ScanOptions(include=("b*.png",))) == ["c/b.png"]
    assert scanned(tmp_path, options=ScanOptions(exclude=("c", "a.*"))) == ["z.png", "b/y.png"]


def test_items_say_where_and_what_they_are(tmp_path: Path) -> None:
    write(tmp_path, "cats/a.jpg", data=JPEG)
    (found,) = scan([tmp_path], ALL)
    path = tmp_path / "cats" / "a.jpg"
    assert found == Item("cats/a.jpg", path, "image", path)
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.jpg", PNG, "image"),
        ("noextension", JPEG, "image"),
        ("a.txt", PNG, "image"),
        ("a.png", MP4, "video"),
        ("still.gif", GIF, "image"),
        ("moving.gif", MOVING_GIF, "video"),
        # What is no medium is passed over.
        ("a.txt", b"BMW on a wide road", None),
        ("b.caption", b"The wide road", None),
        ("empty.txt", b"", None),
        ("notes", b"no suffix", None),
        (".hidden.png", PNG, None),
        (".qwen35mm/a.png", PNG, None),
        ("captions.jsonl", b"{}\n", None),
        ("sound.wav", b"RIFF\0\0\0\0WAVEfmt ", None),
        # What should be a medium is Unreadable.
        ("a.png", b"", "unreadable"),
        ("a.png", b"a text", "unsupported"),
        ("a.mp4", b"#EXTM3U\n", "unsupported"),
        ("a.heic", PSD, "unsupported"),
        ("a.jxl", PSD, "unsupported"),
        ("renamed.bin", HEIC, "image"),
        ("a.gif", b"GIF89a", "damaged"),
        ("large.png", PNG * 100, "too large"),
    ],
)
def test_the_kind_is_by_content(tmp_path: Path, name: str, data: bytes, kind: str | None) -> None:
    write(tmp_path, name, data=data)
    found = list(scan([tmp_path], ScanOptions(limits=MediaLimits(max_image_bytes=5000, max_video_bytes=5000))))
    assert [(each.name, each.kind) for each in found] == ([] if kind is None else [(name, kind)])
    assert all(isinstance(each, Item) == (kind in ("image", "video")) for each in found)


def test_a_named_file_that_is_no_medium_is_always_unreadable(tmp_path: Path) -> None:
    write(tmp_path, "notes.txt", data=b"text")
    write(tmp_path, ".hidden.png")
    os.mkfifo(tmp_path / "pipe.parquet")
    assert scanned(tmp_path / "notes.txt") == ["!notes.txt"]
    assert scanned(tmp_path, tmp_path / "notes.txt") == ["!notes.txt"]
    assert scanned(tmp_path / ".hidden.png") == [".hidden.png"]
    assert scanned(tmp_path / "pipe.parquet") == ["!pipe.parquet"]


def test_pipes_and_broken_links_are_never_opened(tmp_path: Path) -> None:
    for name in ("pipe", "pipe.png", "metadata.jsonl"):
        os.mkfifo(tmp_path / name)
    for name, target in (("gone.png", "nowhere"), ("gone", "nowhere"), ("self.png", "self.png"), ("self", "self")):
        (tmp_path / name).symlink_to(target)
    # A link that leads to itself can't be followed, so nobody knows what it should be.
    assert unreadable(tmp_path) == dict.fromkeys(["gone.png", "pipe.png", "self", "self.png"], "unreadable")


def test_each_real_folder_once(tmp_path: Path) -> None:
    write(tmp_path, "b/x.png", "b/c/y.png")
    (tmp_path / "b" / "c" / "up").symlink_to(tmp_path)
    (tmp_path / "z").symlink_to("b")
    (tmp_path / "x.png").symlink_to("b/x.png")
    assert scanned(tmp_path) == ["x.png", "b/x.png", "b/c/y.png"]


def test_strange_names(tmp_path: Path) -> None:
    strange = ["a\nb.png", os.fsdecode(b"\xff\xfe.png"), "# no comment.png", " .png", "*.png", "'\".png"]
    write(tmp_path, *strange)
    assert scanned(tmp_path) == sorted(strange)
    write(tmp_path, os.fsdecode(b"\xff.mp4"), data=b"text")
    (message,) = (each.message for each in scan([tmp_path], ALL) if isinstance(each, Unreadable))
    message.encode()


def test_what_may_not_be_read_is_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.png", "locked.png", "locked", "locked.txt", "z.png", "b/2.png", "c/3.png")
    lock(monkeypatch, "locked.png", "locked", "locked.txt", "b")
    assert scanned(tmp_path) == ["a.png", "!locked", "!locked.png", "z.png", "!b", "c/3.png"]
    assert unreadable(tmp_path / "b") == {"b": "unreadable"}


def test_what_is_unreadable_has_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "in/e.jpg", "in/metadata.jsonl", "x.tar.gz", "y.tar", data=b"nothing")
    write(tmp_path, "list.txt", data=b"gone.png\n")
    sources = ("in", "x.tar.gz", "y.tar", "@list.txt")
    monkeypatch.chdir(tmp_path)
    found = [each for each in scan(sources, ALL) if isinstance(each, Unreadable)]
    expected = ["in/e.jpg", "x.tar.gz", "y.tar", "gone.png"]
    assert [str(each.path) for each in found] == expected


def test_files_that_vanish_before_they_are_opened(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "b.png", "c", "d/e.png", "f.png")
    found = scan([tmp_path], ALL)
    assert next(found).name == "a.png"
    for name in ("b.png", "c", "d/e.png"):
        (tmp_path / name).unlink()
    (tmp_path / "d").rmdir()
    assert names(found) == ["!b.png", "f.png", "!d"]


def test_a_source_that_is_missing_is_said_first(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    for missing in (tmp_path / "nothing", f"@{tmp_path}/list.txt", f"@{tmp_path}", f"{tmp_path}/{{0..1}}.tar"):
        with pytest.raises(CaptioningError, match="There is no"):
            scan([tmp_path, missing], ALL)
    with pytest.raises(CaptioningError, match="an ascending range"):
        scan([f"{tmp_path}/{{3..1}}.tar"], ALL)


def test_a_file_that_is_reached_twice_comes_once(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "b/c.png")
    write(tmp_path, "list.txt", data=b"b/c.png\na.png\n./b/../a.png\nb\n")
    # A file that is named itself belongs to its own source, so it comes in that one's turn.
    assert scanned(tmp_path, tmp_path / "a.png", tmp_path / "b") == ["b/c.png", "a.png"]
    assert scanned(tmp_path / "b", tmp_path) == ["c.png", "a.png"]
    assert scanned(f"@{tmp_path}/list.txt") == ["b/c.png", "a.png"]


def test_names_are_their_own_among_all_sources(tmp_path: Path) -> None:
    write(tmp_path, "one/a.png", "one/x/a.png", "two/a.png", "two/b.png", "other/two/a.png")
    sources = [tmp_path / "one", tmp_path / "two", tmp_path / "other" / "two"]
    assert scanned(*sources) == ["a.png", "x/a.png", "two/a.png", "b.png", "other/two/a.png"]
    # A further source leaves the names of those before it as they are.
    assert scanned(*sources[:2]) == ["a.png", "x/a.png", "two/a.png", "b.png"]
    assert scanned(*(source / "a.png" for source in sources)) == ["a.png", "two/a.png", "other/two/a.png"]


def test_a_file_list(tmp_path: Path) -> None:
    write(tmp_path / "in", "a.png", "cats/b.png", "cats/c.png", os.fsdecode(b"\xff.png"), "d.png ")
    write(tmp_path, "out.png")
    lines = [
        b"\xef\xbb\xbf# a comment",
        b"",
        b"a.png\r",
        b"  ",
        b"cats",
        b"\xff.png",
        b"d.png ",
        b"gone.png",
        b"nul\0byte.png",
        os.fsencode(tmp_path / "out.png"),
        b"../in/cats/b.png",
    ]
    write(tmp_path / "in", "list.txt", data=b"\n".join(lines))
    outside = str(tmp_path / "out.png").lstrip("/")
    expected = ["a.png", "cats/b.png", "cats/c.png", "\udcff.png", "d.png ", "!gone.png", "!nul\0byte.png", outside]
    assert scanned(f"@{tmp_path}/in/list.txt") == expected


def test_standard_input_is_a_list_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.png", "b/c.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"b/c.png\na.png")))
    assert scanned("@-") == ["b/c.png", "a.png"]
    # A path isn't a list, whatever its name.
    write(tmp_path, "@-")
    assert scanned(Path("@-")) == ["@-"]


def test_shards_part_the_items(tmp_path: Path) -> None:
    write(tmp_path, *(f"{number % 7}/{number:03d}.png" for number in range(300)))
    write(tmp_path, *(f"{number % 7}/{number:03d}.JPG" for number in range(0, 300, 3)), data=b"text")
    shards = [scanned(tmp_path, options=ScanOptions(shard=(index, 3))) for index in (1, 2, 3)]
    assert sorted(name for shard in shards for name in shard) == sorted(scanned(tmp_path))
    assert all(90 < len(shard) < 180 for shard in shards), [len(shard) for shard in shards]


def test_names_that_could_share_a_caption_share_a_shard() -> None:
    for number in range(50):
        stem = f"cats/{number}"
        assert len({shard_of(f"{stem}/{name}", 8) for name in ("a.jpg", "a.png", "A.JPG", "a", "a.Mp4")}) == 1
    assert 1 <= shard_of("\udcff.png", 3) <= 3


@pytest.mark.parametrize("shard", [(0, 2), (3, 2), (1, 0)])
def test_a_shard_that_cannot_be(shard: tuple[int, int]) -> None:
    with pytest.raises(CaptioningError, match="shard from 1/n"):
        ScanOptions(shard=shard)


def test_what_nobody_expected_ends_one_source_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "one/a.png", "one/b.png", "two/c.png", "d.png")
    write(tmp_path, "list.txt", data=b"one\ntwo\n")
    real = scan_module.probe

    def probe(candidate: Candidate, name: str, limits: MediaLimits) -> Any:
        if name.endswith("b.png"):
            raise ArithmeticError("a form that no reader knows")
        return real(candidate, name, limits)

    monkeypatch.setattr(scan_module, "probe", probe)
    assert scanned(tmp_path / "one", tmp_path / "d.png") == ["a.png", "!one", "d.png"]
    assert scanned(f"@{tmp_path}/list.txt") == ["one/a.png", "!one", "two/c.png"]
    assert unreadable(tmp_path / "one") == {"one": "damaged"}


def test_a_list_that_may_not_be_read_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "list.txt", data=b"a.png\n")
    lock(monkeypatch, "list.txt")
    with pytest.raises(CaptioningError, match="permissions"):
        scan([f"@{tmp_path}/list.txt"], ALL)


def test_a_large_tree_is_listed_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_folders, per_folder = 10, 100
    for folder in range(num_folders):
        write(tmp_path, *(f"{folder:02d}/{number:05d}.png" for number in range(per_folder)))
    listed: list[str] = []
    real = os.scandir

    def scandir(path: Path) -> object:
        listed.append(path.name)
        return real(path)

    monkeypatch.setattr(folders.os, "scandir", scandir)

    def peak() -> int:
        found = scan([tmp_path], ALL)
        listed.clear()
        tracemalloc.start()
        try:
            assert next(found).name == "00/00000.png"
            assert listed == [tmp_path.name, "00"]
            assert 1 + sum(1 for _ in found) == num_folders * per_folder
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # What Python itself keeps after a first time is not ours.
    assert min(peak(), peak()) < 2**17, "of all names, some 250 kB"
