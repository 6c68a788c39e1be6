"""What Hugging Face's own `datasets`, and `webdataset`, read of what a run wrote."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.records import Record
from tests.captioning.outputs.helpers import caption, put, record, run
from tests.preprocess.media_files import encode_video, scene

Load = Callable[..., Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()

    def load(*args: Any, **options: Any) -> Any:
        return datasets.load_dataset(*args, split="train", cache_dir=str(tmp_path / "cache"), **options)

    return load


def clip(folder: Path, name: str) -> Record:
    path = folder / name
    path.write_bytes(encode_video([scene(index, (32, 32)) for index in range(4)], fps=4))
    item = Item(name, path, "video", path, {"number": "a text"})
    found = record(item, "A clip.")
    return Record(item, found.key, found.content, caption("A clip.", kind="video", duration_s=1.0, flags=("words",)))


def media_of(record: Record) -> bytes:
    return b"".join(record.item.pieces())


@pytest.fixture
def pictures(tmp_path: Path) -> list[Record]:
    return [record(put(tmp_path / "media", f"more/{number}.png", number), f"Picture {number}.") for number in range(3)]


@pytest.fixture
def mixed(tmp_path: Path, pictures: list[Record]) -> list[Record]:
    return [*pictures, clip(tmp_path / "media", "a.mp4")]


def test_a_mixed_folder(tmp_path: Path, mixed: list[Record], load: Load) -> None:
    import datasets

    folder = tmp_path / "set"
    run(tmp_path, mixed, f"dataset:{folder}")
    found = load(str(folder))
    assert isinstance(found.features["image"], datasets.Image)
    assert [row["image"].getpixel((0, 0)) for row in found] == [(number, 0, 7) for number in range(3)]
    assert found["metadata"][:] == [f'{{"number": {number}}}' for number in range(3)]
    videos = load("videofolder", data_dir=str(folder), metadata_filenames=["videos.jsonl"])
    assert isinstance(videos.features["video"], datasets.Video)
    (row,) = videos.cast_column("video", datasets.Video(decode=False))
    assert (Path(row["video"]["path"]).name, row["text"], row["duration_s"]) == ("a.mp4", "A clip.", 1.0)
    # What the card says is what was done here.
    card = (folder / "README.md").read_text()
    assert 'load_dataset("videofolder", data_dir="FOLDER", metadata_filenames=["videos.jsonl"])' in card
    # One kind that is left needs no rows of its own.
    run(tmp_path, mixed[:3], f"dataset:{tmp_path / 'other'}")
    assert not (tmp_path / "other" / "images.jsonl").exists()


@pytest.mark.parametrize("embed", [False, True])
def test_parquet(tmp_path: Path, mixed: list[Record], load: Load, embed: bool) -> None:
    import datasets

    run(tmp_path, mixed, f"parquet:{tmp_path / 'rows'}", embed_media=embed)
    found = load(str(tmp_path / "rows"))
    assert found["flags"][:] == [[], [], [], ["words"]]
    assert ("image" in found.features) == embed
    if embed:
        assert isinstance(found.features["image"], datasets.Image)
        assert isinstance(found.features["video"], datasets.Video)
        assert [row["image"] and row["image"].getpixel((0, 0)) for row in found.remove_columns("video")] == [
            *((number, 0, 7) for number in range(3)),
            None,
        ]
        *none, video = found.cast_column("video", datasets.Video(decode=False))["video"]
        assert none == [None] * 3
        assert video == {"bytes": media_of(mixed[3]), "path": "a.mp4"}


def test_webdataset_reads_its_tars(tmp_path: Path, mixed: list[Record]) -> None:
    from webdataset.compat import WebDataset

    run(tmp_path, mixed, f"webdataset:{tmp_path / 'tars'}", records_per_shard=10)
    (shard,) = (tmp_path / "tars").glob("*.tar")
    found = list(WebDataset(str(shard), shardshuffle=False, empty_check=False))
    assert [sample["txt"].decode() for sample in found] == ["Picture 0.", "Picture 1.", "Picture 2.", "A clip."]
    assert Image.open(io.BytesIO(found[1]["png"])).getpixel((0, 0)) == (1, 0, 7)
    assert found[3]["mp4"] == media_of(mixed[3])


def test_somebodys_own_card_stays(tmp_path: Path, pictures: list[Record]) -> None:
    folder = tmp_path / "set"
    run(tmp_path, pictures[:1], f"dataset:{folder}")
    ours = (folder / "README.md").read_text()
    (folder / "README.md").write_text("# Mine\n")
    run(tmp_path, pictures, f"dataset:{folder}")
    assert (folder / "README.md").read_text() == "# Mine\n"
    (folder / "README.md").unlink()
    run(tmp_path, pictures, f"dataset:{folder}")
    assert (folder / "README.md").read_text() == ours
