"""What `metadata.jsonl` and `metadata.csv` say of the media in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("file", "data", "found", "bad"),
    [
        (
            "metadata.jsonl",
            b'{"file_name": "a.png", "n": 1}\nnot json\n[]\n{"file_name": 3}\n\n{"file_name": "a.png", "n": 2}',
            {"n": 1},
            "3 rows",
        ),
        # Half of a surrogate pair.
        ("metadata.jsonl", b'{"file_name": "\\ud83d.png"}\n{"file_name": "a.png", "n": 1}\n', {"n": 1}, None),
        # What names no files is something else.
        ("metadata.jsonl", b'{"image": "a.png"}\nnot json\n', {}, None),
        ("metadata.csv", b"", {}, None),
        # Nor can its first line be read.
        ("metadata.csv", b"file_name,text\ra.png,hello\r", {}, ""),
        ("metadata.csv", b"file_name," + b"x" * 200_000 + b"\n", {}, ""),
    ],
)
def test_bad_metadata_is_said_once_and_costs_no_medium(
    tmp_path: Path, manifest: Manifest, file: str, data: bytes, found: dict[str, Any], bad: str | None
) -> None:
    write(tmp_path, "a.png", "sub/b.png")
    write(tmp_path, file, data=data)
    *said, first, second = scan([tmp_path], ALL, manifest)
    assert isinstance(first, Item)
    assert (first.name, first.metadata, second.name) == ("a.png", found, "sub/b.png")
    assert [(each.name, each.kind) for each in said] == ([] if bad is None else [(file, "damaged")])
    assert all(isinstance(each, Unreadable) and (bad or "") in each.message for each in said)


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
