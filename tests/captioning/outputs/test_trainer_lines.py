"""Lists of media for sd-scripts and musubi-tuner, read by their rules, retold from their code."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs import OutputSettings, Wants, open_outputs, parse_output
from qwen35mm.captioning.records import Record
from qwen35mm.errors import CaptioningError
from tests.captioning.outputs.helpers import caption, put, record, records_of, run


def sd_scripts(path: Path) -> dict[str, str]:
    """kohya-ss/sd-scripts, library/train_util.py, FineTuningDataset: absolute paths need no image_dir."""
    lines = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    assert all(os.path.isabs(line["image_path"]) for line in lines)  # noqa: PTH117 - as it is there
    return {line["image_path"]: line.get("caption", "") for line in lines}


def musubi(path: Path, key: str) -> dict[str, str]:
    """kohya-ss/musubi-tuner, dataset/datasources.py: every line must have the path and the caption."""
    return {line[key]: line["caption"] for line in map(json.loads, path.read_text("utf-8").split("\n")[:-1])}


def video(folder: Path, name: str) -> Record:
    found = record(put(folder, name, 9), "A clip.")
    item = Item(name, folder / name, "video", folder / name)
    return Record(item, found.key, found.content, caption("A clip.", kind="video", duration_s=1.0))


def test_trainers_read_their_kind_of_media(tmp_path: Path) -> None:
    pictures, clip = records_of(tmp_path, ["a.jpg", "cats/ü.png"]), video(tmp_path, "c.mp4")
    images, videos = tmp_path / "images.jsonl", tmp_path / "videos.jsonl"
    expected = {str(tmp_path / each.item.name): each.caption.text for each in pictures}
    run(tmp_path, [*pictures, clip], f"images:{images}")
    run(tmp_path, [*pictures, clip], f"videos:{videos}")
    assert sd_scripts(images) == musubi(images, "image_path") == expected
    assert musubi(videos, "video_path") == {str(tmp_path / "c.mp4"): "A clip."}
    assert run(tmp_path, [*pictures, clip], f"images:{images}") == [Wants.DONE] * 3
    # Another caption replaces its line.
    run(tmp_path, [record(pictures[0].item, "New.")], f"images:{images}")
    assert sd_scripts(images) == expected | {str(tmp_path / "a.jpg"): "New."}


def test_sd_scripts_draws_one_of_several_lines(tmp_path: Path) -> None:
    (one,) = records_of(tmp_path, ["a.jpg"])
    made = replace(one, caption=caption("A tree.\nIndeed.", others={"tags": "tree, hill"}))
    for kind, text in (("images", "A tree.\nIndeed."), ("image-lines", "A tree. Indeed.\ntree, hill")):
        run(tmp_path, [made], f"{kind}:{tmp_path / kind}.jsonl")
        assert sd_scripts(tmp_path / f"{kind}.jsonl") == {str(tmp_path / "a.jpg"): text}


def test_each_of_several_captions_has_a_list_for_musubi(tmp_path: Path, manifest: Manifest) -> None:
    """A dataset of musubi-tuner has one caption of each image; another list is another dataset."""
    images = tmp_path / "images.jsonl"
    outputs = open_outputs([parse_output(f"images:{images}")], manifest, OutputSettings(styles=("tags", "long")))
    for output in outputs:
        made = record(put(tmp_path, "a.jpg", 1), output.style or "")
        manifest.finish(made.key, made.caption)
        output.write(made)
        output.close()
    assert [output.style for output in outputs] == ["tags", "long"]
    for path, text in ((images, "tags"), (tmp_path / "images.long.jsonl", "long")):
        assert musubi(path, "image_path") == {str(tmp_path / "a.jpg"): text}


def test_a_medium_in_a_container_is_refused(tmp_path: Path) -> None:
    made = record(Item("rows.parquet/0.png", put(tmp_path, "a.png", 1).path or b"", "image"), "In a container.")
    with pytest.raises(CaptioningError, match="no file of its own"):
        run(tmp_path, [made], f"images:{tmp_path / 'images.jsonl'}")


def test_the_suffix_is_the_trainers(tmp_path: Path) -> None:
    with pytest.raises(CaptioningError, match=r"ends in \.jsonl, got images\.json\."):
        run(tmp_path, [], f"images:{tmp_path / 'images.json'}")
