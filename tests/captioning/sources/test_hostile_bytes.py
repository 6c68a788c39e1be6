"""Bytes that were made, or damaged, to stop a scan: they cost their own entry, wherever they lie, and no other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.captioning.items import Item, Unreadable
from qwen35mm.captioning.sources import candidates
from qwen35mm.captioning.sources.candidates import Candidate
from qwen35mm.captioning.sources.scan import ScanOptions, scan
from tests.captioning.sources.media_tree import ALL, GIF, JPEG, MOVING_GIF, MP4, PNG, write
from tests.captioning.sources.test_tars import write_tar

# A picture of 4,294,836,225 pixels, and, behind a first one, a control block without its numbers. Both are met by who
# looks whether it moves.
FRAME = b"," + bytes(4) + b"\x04\0\x04\0\0" + b"\x02\x02\x4c\x01\0"
HEAD = b"GIF89a\x04\0\x04\0\x80\0\0" + bytes(6)
BOMB = HEAD + b"," + bytes(4) + b"\xff\xff\xff\xff\0\x02\0;"
NO_NUMBERS = HEAD + FRAME + b"!\xf9\x01\x01\0" + FRAME + b";"


def places(folder: Path, hostile: bytes) -> Iterator[Path]:
    """Sources in which the entry called `m` has these bytes, between others that are whole."""
    write(folder / "folder", "a.png", "z.png")
    write(folder / "folder", "m.gif", data=hostile)
    yield folder / "folder"
    yield write_tar(folder / "x.tar", ("a.png", PNG), ("m.gif", hostile), ("z.png", PNG))
    rows = [{"bytes": data, "path": name} for name, data in (("a.png", PNG), ("m.gif", hostile), ("z.png", PNG))]
    pq.write_table(pa.table({"image": rows}), folder / "x.parquet")
    yield folder / "x.parquet"


@pytest.mark.parametrize("hostile", [BOMB, NO_NUMBERS, GIF[:20], b"GIF89a"], ids=["bomb", "no numbers", "cut", "head"])
def test_a_picture_that_upsets_its_reader_ends_no_source(hostile: bytes, tmp_path: Path) -> None:
    for source in places(tmp_path, hostile):
        found = list(scan([source], ALL))
        assert len([each for each in found if isinstance(each, Item) and "m.gif" not in each.name]) >= 2
        assert len(found) <= 3


@given(st.sampled_from([PNG, JPEG, GIF, MOVING_GIF, MP4, BOMB]), st.integers(0, 2**32))
def test_damage_of_any_kind_costs_one_entry(tmp_path_factory: pytest.TempPathFactory, whole: bytes, seed: int) -> None:
    draw = random.Random(seed)
    damaged = bytearray(whole)
    for _ in range(draw.randint(1, 8)):
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
    folder = tmp_path_factory.mktemp("damaged")
    for source in places(folder, bytes(damaged[: draw.randint(1, len(damaged))])):
        found = list(scan([source], ALL))
        assert sum(isinstance(each, Item) for each in found) >= 2
        assert len(found) <= 3


def test_an_error_that_nobody_thought_of_costs_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kind's own code, and in what the source says of it besides."""

    def kind(candidate: Candidate, name: str, limits: object) -> str:
        if name.endswith("m.gif"):
            raise IndexError("index out of range")
        return "image"

    monkeypatch.setattr(candidates, "_kind", kind)
    source = next(places(tmp_path, GIF))
    first, hostile, last = scan([source], ScanOptions())
    assert (first.name, last.name) == ("a.png", "z.png")
    assert isinstance(hostile, Unreadable)
    assert (hostile.kind, hostile.path) == ("damaged", source / "m.gif")
    assert "'m.gif' could not be looked at (IndexError)" in hostile.message

    def metadata() -> dict[str, object]:
        raise KeyError("caption")

    entry = Candidate("m.gif", GIF, metadata)
    assert isinstance(candidates.probe(entry, "m.gif", ScanOptions().limits), Unreadable)
