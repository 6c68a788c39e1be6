"""Records over small pictures, a whole run of outputs, and what it left, read back."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
from PIL import Image

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs import Mode, OutputSettings, Wants, open_outputs, parse_output
from qwen35mm.captioning.records import Caption, Record, printable

# Names that collide, lead astray, or are hard to write down.
HARD_NAMES = (
    "a.jpg",
    "A.JPG",
    "a.png",
    "cats/a.jpg",
    "cats/b.tar.png",
    "new\nline.png",
    os.fsdecode(b"not-utf8-\xff.png"),
    "ü" * 125 + ".png",
)


@functools.cache
def picture(number: int) -> bytes:
    """A small PNG of its own colour."""
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (number % 256, number // 256, 7)).save(file, "PNG")
    return file.getvalue()


def put(folder: Path, name: str, number: int) -> Item:
    """A picture as a file, as the scan would find it."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(number))
    return Item(name, path, "image", path, {"number": number})


def caption(text: str, **values: Any) -> Caption:
    return Caption(**{"text": text, "kind": "image", "width": 4, "height": 3, "prompt": "?", "model": "tiny"} | values)


def record(item: Item, text: str, prompt: str = "?") -> Record:
    """What a run has made of an item; another text or prompt is another work."""
    medium = item.read()
    content = hashlib.sha256(medium if isinstance(medium, bytes) else medium.read_bytes()).digest()
    key = hashlib.sha256(content + f"{text} {prompt}".encode("utf-8", "surrogatepass")).digest()
    return Record(item, key, content, caption(text, prompt=prompt))


def records_of(folder: Path, names: Sequence[str], prompt: str = "first") -> list[Record]:
    items = [put(folder, name, number) for number, name in enumerate(names)]
    return [record(item, f"{prompt} caption {number} ü\n2nd line", prompt) for number, item in enumerate(items)]


def moved(old: Record, folder: Path, name: str) -> Record:
    """A record's file renamed within its folder, and what a run then makes of it."""
    path = folder / name
    (folder / old.item.name).rename(path)
    return Record(Item(name, path, "image", path), old.key, old.content, old.caption)


def run(
    folder: Path,
    records: Sequence[Record],
    spec: str,
    *,
    mode: Mode = "skip",
    records_per_shard: int = 3,
    link_media: bool = False,
    embed_media: bool = False,
    compact: bool = False,
    captions: Path | None = None,
    prune: bool = False,
) -> list[Wants]:
    """A whole run without a model, as the real one does it; what the output wanted of each record."""
    manifest = Manifest.open(folder / ".qwen35mm" / "manifest.sqlite")
    try:
        (output,) = open_outputs(
            [parse_output(spec)],
            manifest,
            OutputSettings(
                mode,
                captions,
                link_media=link_media,
                embed_media=embed_media,
                records_per_shard=records_per_shard,
                compact=compact,
            ),
        )
        try:
            wanted = []
            for each in records:
                if manifest.caption(each.key) is None:
                    manifest.finish(each.key, each.caption)
                wanted.append(output.wants(each.item, each.key))
                if wanted[-1] is Wants.CAPTION:
                    output.write(each)
            output.finish()
            if prune:
                output.prune(output.gone())
        finally:
            output.close()
    finally:
        manifest.close()
    return wanted


NO_MEDIA = {"metadata.jsonl", "images.jsonl", "videos.jsonl", "README.md"}


def rows_of(spec: str) -> list[dict[str, Any]]:
    """All records in an output, in its order; each checked against its medium where that is in the output too."""
    kind, _, target = spec.partition(":")
    path = Path(target)
    if kind == "jsonl":
        return lines_of(path)
    if kind == "dataset":
        rows = lines_of(path / "metadata.jsonl")
        for row in rows:
            assert hashlib.sha256((path / row["file_name"]).read_bytes()).hexdigest() == row["sha256"]
            row["caption"] = row.pop("text")
            for column in ("flags", "metadata"):
                row[column] = json.loads(row[column])
            for column in ("data", "judged", "shared_from"):
                if not row[column]:
                    del row[column]
            if "judged" in row:
                row["judged"] = json.loads(row["judged"])
        media = {str(found.relative_to(path)) for found in path.rglob("*") if found.is_file()} - NO_MEDIA
        assert media == {row["file_name"] for row in rows}, "a medium without a line"
        return rows
    return [row for shard in sorted(path.glob("*.parquet" if kind == "parquet" else "*.tar")) for row in rows_in(shard)]


def rows_in(shard: Path) -> list[dict[str, Any]]:
    """The records in one shard."""
    return pyarrow.parquet.read_table(shard).to_pylist() if shard.suffix == ".parquet" else _samples(shard)


def lines_of(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    assert content.endswith(b"\n") or not content
    return [json.loads(line) for line in content.splitlines()]


def _samples(path: Path) -> list[dict[str, Any]]:
    """A shard as a WebDataset reader sees it: members grouped by what stands before the name's first dot."""
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            folder, _, last = member.name.rpartition("/")
            key, _, suffix = last.partition(".")
            parts = samples.setdefault(f"{folder}/{key}", {})
            assert suffix not in parts, f"{member.name} twice"
            file = tar.extractfile(member)
            assert file is not None
            parts[suffix] = file.read()
    rows = []
    for parts in samples.values():
        row = json.loads(parts["json"])
        assert parts["txt"].decode() == row["caption"]
        assert hashlib.sha256(parts["mp4" if row["kind"] == "video" else "png"]).hexdigest() == row["sha256"]
        rows.append(row)
    return rows


def captions_of(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Caption by name; every name once."""
    assert len({row["name"] for row in rows}) == len(rows), "an item twice"
    return {row["name"]: row["caption"] for row in rows}


def expected(records: Sequence[Record]) -> dict[str, str]:
    return {printable(each.item.name): each.caption.text for each in records}


def kept(folder: Path) -> list[Path]:
    """What people's files were before runs replaced them, the oldest first; the state folder is in `folder`."""
    return sorted(path for path in (folder / ".qwen35mm" / "backups").rglob("*") if path.is_file())


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".qwen35mm-")]
