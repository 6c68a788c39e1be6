"""A file of lines: what is in one, who else wrote to it, which lines are replaced."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs import Mode, OutputSettings, Wants
from qwen35mm.captioning.outputs.jsonl import JsonLines
from qwen35mm.errors import CaptioningError
from tests.captioning.outputs.helpers import (
    HARD_NAMES,
    captions_of,
    expected,
    kept,
    leftovers,
    lines_of,
    picture,
    record,
    records_of,
    run,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "captions.jsonl"


def asides(path: Path) -> list[bytes]:
    return [found.read_bytes() for found in kept(path.parent)]


def test_lines_appear_as_they_are_done(tmp_path: Path, path: Path, manifest: Manifest) -> None:
    output = JsonLines(manifest, path, OutputSettings())
    for number, each in enumerate(records_of(tmp_path, HARD_NAMES), 1):
        manifest.finish(each.key, each.caption)
        assert output.wants(each.item, None) is output.wants(each.item, each.key) is Wants.CAPTION
        for _ in range(2):
            output.write(each)
        assert output.wants(each.item, each.key) is Wants.DONE
        assert len(lines_of(path)) == number
    output.close()


def test_what_json_lacks(tmp_path: Path, path: Path) -> None:
    odd = Item(
        "a.png", picture(1), "image", None, {"nan": float("nan"), "half": "\udc80", "deep": [{"x": float("inf")}]}
    )
    made = record(odd, "line\u2028separator\x00 and \ud800")
    run(tmp_path, [made], f"jsonl:{path}")
    (line,) = path.read_bytes().splitlines()
    found = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found["metadata"] == {"nan": None, "half": "\udc80", "deep": [{"x": None}]}
    assert found["caption"] == made.caption.text


# What somebody else does to the file between two runs.
CHANGES = {
    "gone": lambda content: None,
    "emptied": lambda content: b"",
    "shortened to a line's end": lambda content: content[: content.index(b"\n") + 1],
    "torn": lambda content: content[: len(content) // 2],
    "a line more": lambda content: content + b'{"name": "mine"}\n',
    "bytes without a line's end": lambda content: content + b"\x00\xff",
    "a line edited": lambda content: content.replace(b"caption 1", b"CAPTION 1"),
    "another file": lambda content: b"something else altogether" * 1000,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_else_changed_is_written_anew(
    tmp_path: Path, path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    records = records_of(tmp_path, HARD_NAMES[:5])
    run(tmp_path, records[:4], f"jsonl:{path}")
    changed = CHANGES[change](path.read_bytes())
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    with caplog.at_level(logging.WARNING):
        run(tmp_path, records, f"jsonl:{path}")
    assert captions_of(lines_of(path)) == expected(records)
    assert asides(path) == ([] if changed is None else [changed]), "nothing is thrown away"
    assert "captions.jsonl" in caplog.text
    assert leftovers(tmp_path) == []


def test_a_last_line_that_was_cut_is_completed(tmp_path: Path, path: Path) -> None:
    """As a loss of power may leave it: the manifest knows the line, so nothing is moved aside."""
    records = records_of(tmp_path, HARD_NAMES[:5])
    run(tmp_path, records, f"jsonl:{path}")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    run(tmp_path, records, f"jsonl:{path}")
    assert path.read_bytes() == whole
    assert asides(path) == []


@pytest.mark.parametrize(
    ("mode", "head"), [("append", b'{"mine": 1}\n'), ("append", b'{"mine": 1}'), ("prepend", b"1\n"), ("append", b"")]
)
def test_lines_that_were_there_stay_in_front(tmp_path: Path, path: Path, mode: Mode, head: bytes) -> None:
    path.write_bytes(head)
    old = records_of(tmp_path, HARD_NAMES[:4])
    new = records_of(tmp_path, HARD_NAMES[:4], "second")
    for records in (old[:2], old, new):
        run(tmp_path, records, f"jsonl:{path}", mode=mode)
        lines = path.read_bytes().splitlines(keepends=True)
        assert b"".join(lines[: -len(records)]) == (head if not head or head.endswith(b"\n") else head + b"\n")
        assert captions_of([json.loads(line) for line in lines[-len(records) :]]) == expected(records)
    assert asides(path) == []


def test_a_folder_where_the_file_should_be(tmp_path: Path, path: Path) -> None:
    path.mkdir()
    with pytest.raises(CaptioningError, match="is there already"):
        run(tmp_path, [], f"jsonl:{path}", mode="overwrite")
