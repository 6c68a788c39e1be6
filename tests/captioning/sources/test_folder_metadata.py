"""What `metadata.jsonl` and `metadata.csv` say of the media in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.sources import folder_metadata
from qwen35mm.captioning.sources.scan import scan
from tests.captioning.sources.media_tree import ALL, names, write


def test_metadata_of_an_imagefolder(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path, "a.png", "in/b.png", "in/own/c.png", "none.png")
    write(tmp_path, "metadata.jsonl", data=b'{"file_name": "in/b.png", "who": "B", "n": [1]}\n{"file_name": "a.png"}\n')
    write(
        tmp_path,
        "in/own/metadata.csv",
        data=b'\xef\xbb\xbffile_name,text\r\nx.png,x\r\nc.png,"two\r\nlines, \xc3\xa9"\r\n',
    )
    found = {each.name: each.metadata for each in scan([tmp_path], ALL, manifest) if isinstance(each, Item)}
    assert found == {
        "a.png": {},
        "in/b.png": {"who": "B", "n": [1]},
        "in/own/c.png": {"text": "two\r\nlines, é"},
        "none.png": {},
    }


def test_bad_rows_of_metadata_are_said_once(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path, "a.png")
    rows = b'{"file_name": "a.png", "n": 1}\nnot json\n[]\n{"file_name": 3}\n\n{"file_name": "a.png", "n": 2}'
    write(tmp_path, "metadata.jsonl", data=rows)
    bad, item = scan([tmp_path], ALL, manifest)
    assert isinstance(bad, Unreadable)
    assert (bad.name, bad.kind) == ("metadata.jsonl", "damaged")
    assert "3 rows" in bad.message
    assert isinstance(item, Item)
    assert item.metadata == {"n": 1}


def test_metadata_with_half_of_a_surrogate_pair(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path, "a.png")
    write(tmp_path, "metadata.jsonl", data=b'{"file_name": "\\ud83d.png"}\n{"file_name": "a.png", "n": 1}\n')
    (found,) = scan([tmp_path], ALL, manifest)
    assert isinstance(found, Item)
    assert found.metadata == {"n": 1}


def test_metadata_that_names_no_files_is_something_else(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path, "a.png")
    write(tmp_path, "metadata.jsonl", data=b'{"image": "a.png"}\nnot json\n')
    write(tmp_path, "metadata.csv", data=b"")
    assert names(scan([tmp_path], ALL, manifest)) == ["a.png"]


@pytest.mark.parametrize("data", [b"file_name,text\ra.png,hello\r", b"file_name," + b"x" * 200_000 + b"\n"])
def test_metadata_whose_first_line_cannot_be_read(tmp_path: Path, manifest: Manifest, data: bytes) -> None:
    write(tmp_path, "a.png", "sub/b.png")
    write(tmp_path, "metadata.csv", data=data)
    found = list(scan([tmp_path], ALL, manifest))
    assert names(found) == ["!metadata.csv", "a.png", "sub/b.png"]
    assert isinstance(found[0], Unreadable)
    assert found[0].kind == "damaged"


def test_a_bad_row_has_the_path_of_its_file(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "in/e.png")
    write(tmp_path, "in/metadata.jsonl", data=b'{"file_name": "e.png"}\nnot json')
    monkeypatch.chdir(tmp_path)
    assert [str(each.path) for each in scan(["in"], ALL, manifest)] == ["in/metadata.jsonl", "in/e.png"]


def test_a_pipe_is_no_metadata(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path, "a.png")
    os.mkfifo(tmp_path / "metadata.jsonl")
    assert names(scan([tmp_path], ALL, manifest)) == ["a.png"]


def test_metadata_is_read_again_only_where_it_changed(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    rows = folder_metadata._rows

    def counted(path: Path) -> Iterator[tuple[bytes, str] | None]:
        read.append(path)
        return rows(path)

    monkeypatch.setattr(folder_metadata, "_rows", counted)
    write(tmp_path, "a.png")
    path = tmp_path / "metadata.jsonl"
    for number, num_read in ((1, 1), (1, 1), (2, 2)):
        path.write_text(f'{{"file_name": "a.png", "n": {number}}}\n' + '{"file_name": "gone.png"}\n' * (2 - number))
        os.utime(path, (0, 0))
        (item,) = scan([tmp_path], ALL, manifest)
        assert isinstance(item, Item)
        assert item.metadata == {"n": number}
        assert len(read) == num_read
    path.write_text('{"file_name": "a.png", "n": 3}\n')  # this young, it may change again
    for _ in range(2):
        assert len(list(scan([tmp_path], ALL, manifest))) == 1
    assert len(read) == 4
