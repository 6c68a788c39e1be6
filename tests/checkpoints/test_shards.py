"""Finding a checkpoint's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen35mm.checkpoints.shards import check_folder, find_shards
from qwen35mm.errors import CheckpointError


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_names_the_files(tmp_path: Path) -> None:
    for name in ("b", "a", "stray"):
        (tmp_path / f"{name}.safetensors").touch()
    write_index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors"})
    assert [path.name for path in find_shards(tmp_path)] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.safetensors", r"aren't in the folder: gone\.safetensors"),
        ("../outside.safetensors", "not a safetensors file of this folder"),
        ("/etc/passwd", "not a safetensors file of this folder"),
        ("pytorch_model.bin", "not a safetensors file of this folder"),
        (3, "not a safetensors file of this folder"),
    ],
)
def test_an_index_names_files_of_its_folder(tmp_path: Path, name: object, message: str) -> None:
    write_index(tmp_path, {"x": name})
    with pytest.raises(CheckpointError, match=message):
        find_shards(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', "\xff"])
def test_a_broken_index_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match="can't be read as a safetensors index"):
        find_shards(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError, match=rf"pickled weights only \({name}\), which can run code"):
        find_shards(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No weights in this folder"):
        find_shards(tmp_path)
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        find_shards(tmp_path / "nowhere")


def test_what_git_leaves_in_a_files_place_is_told(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1746882752\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is what Git leaves.*`git lfs pull`"):
        find_shards(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 8)
    (tmp_path / "tokenizer.json").write_bytes(pointer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is what Git leaves"):
        find_shards(tmp_path)


@pytest.mark.parametrize("with_index", [False, True])
def test_a_link_to_nothing_is_told(with_index: bool, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../blobs/abc")
    if with_index:
        write_index(tmp_path, {"x": "model.safetensors"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link to \.\./blobs/abc, where nothing is"):
        find_shards(tmp_path)


def test_folders_that_are_taken_for_a_checkpoints_are_told(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"folder of the Hugging Face cache.*name .*snapshots.0123"):
        check_folder(tmp_path / "models--org--name")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match=r"adapter holds an adapter \(LoRA\) alone.*--lora"):
        check_folder(adapter)
    (adapter / "config.json").touch()
    check_folder(adapter)
    check_folder(snapshot)
