"""Parquet and WebDataset: how records are spread over shards, which move to new ones, who else changed them."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow.parquet
import pytest

from qwen35mm.captioning.items import FileSlice, Item
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs import OutputSettings, Wants
from qwen35mm.captioning.outputs.webdataset import TarShards
from qwen35mm.errors import CaptioningError
from tests.captioning.outputs.helpers import (
    captions_of,
    expected,
    kept,
    leftovers,
    picture,
    put,
    record,
    records_of,
    rows_in,
    rows_of,
    run,
)

KINDS = ("parquet", "webdataset")
SUFFIXES = {"parquet": ".parquet", "webdataset": ".tar"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def sizes(out: Path, kind: str) -> dict[int, int]:
    """How many records each shard has, by its number."""
    return {int(shard.stem): len(rows_in(shard)) for shard in sorted(out.glob(f"*{SUFFIXES[kind]}"))}


def test_each_run_begins_a_new_shard_and_changes_no_old_one(tmp_path: Path, out: Path, kind: str) -> None:
    records = records_of(tmp_path, [f"{number}.png" for number in range(8)])
    before: dict[Path, tuple[int, bytes]] = {}
    for upto, expected_sizes in ((2, [2]), (2, [2]), (4, [2, 2]), (8, [2, 2, 3, 1])):
        run(tmp_path, records[:upto], f"{kind}:{out}")
        assert sizes(out, kind) == dict(enumerate(expected_sizes))
        now = {path: (path.stat().st_ino, path.read_bytes()) for path in out.iterdir()}
        assert before.items() <= now.items()
        before = now
    assert [row["name"] for row in rows_of(f"{kind}:{out}")] == [each.item.name for each in records]


def test_shards_that_are_not_full_are_merged_on_request(tmp_path: Path, out: Path, kind: str) -> None:
    records = records_of(tmp_path, [f"{number}.png" for number in range(8)])
    for upto in (2, 4, 8):
        run(tmp_path, records[:upto], f"{kind}:{out}")
    for _ in range(2):  # a second time, there is nothing to merge
        run(tmp_path, records, f"{kind}:{out}", compact=True)
        assert sizes(out, kind) == {2: 3, 4: 3, 5: 2}
        assert captions_of(rows_of(f"{kind}:{out}")) == expected(records)
    assert run(tmp_path, records, f"{kind}:{out}") == [Wants.DONE] * 8


@pytest.mark.parametrize("change", ["gone", "shorter", "longer", "empty"])
def test_a_shard_that_somebody_changed_is_written_again(
    tmp_path: Path, out: Path, kind: str, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    records = records_of(tmp_path, [f"{number}.png" for number in range(8)])
    run(tmp_path, records, f"{kind}:{out}")
    shard = out / f"000001{SUFFIXES[kind]}"
    content = shard.read_bytes()
    changed = {"gone": None, "shorter": content[:-1], "longer": content + b"x", "empty": b""}[change]
    shard.unlink() if changed is None else shard.write_bytes(changed)
    with caplog.at_level(logging.WARNING):
        run(tmp_path, records, f"{kind}:{out}")
    assert shard.name in caplog.text
    assert captions_of(rows_of(f"{kind}:{out}")) == expected(records)
    assert [path.read_bytes() for path in kept(tmp_path)] == ([] if changed is None else [changed])


def test_nothing_of_a_failed_record_stays_in_its_shard(tmp_path: Path, out: Path, manifest: Manifest) -> None:
    records = records_of(tmp_path, [f"{number}.png" for number in range(3)])
    (tmp_path / "1.png").write_bytes(picture(99))
    output = TarShards(manifest, out, OutputSettings())
    for each in records:
        manifest.finish(each.key, each.caption)
    output.write(records[0])
    with pytest.raises(CaptioningError, match="was changed"):
        output.write(records[1])
    output.write(records[2])
    output.finish()
    assert captions_of(rows_of(f"webdataset:{out}")) == expected([records[0], records[2]])


def test_media_of_every_source(tmp_path: Path, out: Path) -> None:
    (tmp_path / "big").write_bytes(b"before" + picture(1) + b"after")
    piece = Item("x.tar/1.png", FileSlice(tmp_path / "big", 6, len(picture(1))), "image")
    inside = Item("x.parquet/2", picture(2), "image")
    whole = put(tmp_path, "3.txt", 3)  # a picture, whatever its name
    records = [record(item, item.name) for item in (piece, inside, whole)]
    for kind in KINDS:
        run(tmp_path, records, f"{kind}:{out / kind}", embed_media=True)
        assert captions_of(rows_of(f"{kind}:{out / kind}")) == expected(records)
    images = [row["image"] for row in rows_of(f"parquet:{out / 'parquet'}")]
    assert images == [{"bytes": picture(number), "path": each.item.name} for number, each in enumerate(records, 1)]


def test_parquet_with_and_without_pictures_are_kept_apart(tmp_path: Path, out: Path) -> None:
    records = records_of(tmp_path, [f"{number}.png" for number in range(5)])
    run(tmp_path, records[:2], f"parquet:{out}")
    run(tmp_path, records, f"parquet:{out}", embed_media=True)
    assert captions_of(rows_of(f"parquet:{out}")) == expected(records)
    schemas = [pyarrow.parquet.read_schema(path) for path in sorted(out.glob("*.parquet"))]
    assert ["image" in schema.names for schema in schemas] == [False, True]
    new = records_of(tmp_path, [f"{number}.png" for number in range(5)], "second")
    mixed = [new[0], records[1], new[2], *records[3:]]
    run(tmp_path, mixed, f"parquet:{out}")
    assert captions_of(rows_of(f"parquet:{out}")) == expected(mixed)
    assert leftovers(out) == []


def test_a_shard_needs_room(tmp_path: Path, out: Path, kind: str) -> None:
    with pytest.raises(CaptioningError, match="at least one"):
        run(tmp_path, [], f"{kind}:{out}", records_per_shard=0)
