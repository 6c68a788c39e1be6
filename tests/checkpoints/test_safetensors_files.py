"""Reading headers and tensors of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen35mm.checkpoints.safetensors_files import open_shard, read_headers, read_into, same_bytes
from qwen35mm.checkpoints.shards import find_shards
from qwen35mm.errors import CheckpointError


def write(folder: Path, name: str = "model.safetensors", **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / name)
    return folder / name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_is_read_into_place(tmp_path: Path, dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored = read_headers([write(tmp_path, first=torch.zeros(3), values=values)])
    assert stored["values"].shape == (7, 5)
    target = torch.full((50,), float("nan"), dtype=target_dtype)
    with open_shard(stored["values"].file) as file:
        read_into(file, stored["values"], target[10:45])
    assert torch.equal(target[10:45], values.flatten().to(target_dtype))
    assert target[:10].isnan().all()
    assert target[45:].isnan().all()


def test_a_large_tensor_is_converted_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.checkpoints.safetensors_files._CHUNK_BYTES", 64)
    values = torch.arange(101.0)
    stored = read_headers([write(tmp_path, values=values)])["values"]
    target = torch.empty(101, dtype=torch.bfloat16)
    with open_shard(stored.file) as file:
        read_into(file, stored, target)
    assert torch.equal(target, values.bfloat16())


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    stored = read_headers([write(tmp_path, scalar=torch.tensor(3.5), empty=torch.zeros(0, 4))])
    assert stored["scalar"].shape == ()
    target = torch.empty(1)
    with open_shard(tmp_path / "model.safetensors") as file:
        read_into(file, stored["scalar"], target)
        read_into(file, stored["empty"], torch.empty(0))
    assert target.item() == 3.5


def header_of(entry: object) -> bytes:
    header = json.dumps({"x": entry}).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or not a safetensors file"),
        (b"\x08\x00\x00", "truncated or not a safetensors file"),
        (b"\xff" * 16, "truncated or not a safetensors file"),
        (b"\x80\x00\x00\x00\x00\x00\x00\x00{}", "truncated or not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is what Git leaves"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00[]", "header can't be read"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{]", "header can't be read"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{}surplus", "longer than its header says"),
        *(
            pytest.param(header_of(entry), "header can't be read", id=f"a header with {entry}")
            for entry in (
                {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
                {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
                {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
                {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
                {"dtype": "F32", "shape": [1]},
                {"shape": [1], "data_offsets": [0, 4]},
                [],
            )
        ),
        *(
            pytest.param(len(text).to_bytes(8, "little") + text, "header can't be read", id=name)
            for name, text in {
                "nested": b'{"a":' * 100_000,
                "many values": b"[" + b"[]," * 4_000_000 + b"0]",
                # The product of these would take minutes.
                "long numbers": json.dumps(
                    {"x": {"dtype": "F32", "shape": [10**300] * 30_000, "data_offsets": [0, 4]}}
                ).encode(),
                "UTF-16": '{"x": 1}'.encode("utf-16"),
            }.items()
        ),
    ],
)
def test_files_that_are_not_safetensors(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model.safetensors.*{message}"):
        read_headers(find_shards(tmp_path))


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    paths = [write(tmp_path, name, x=torch.zeros(1)) for name in ("a.safetensors", "b.safetensors")]
    with pytest.raises(CheckpointError, match=r"x is in both a\.safetensors and b\.safetensors"):
        read_headers(paths)


def test_same_bytes(tmp_path: Path) -> None:
    values = torch.arange(6.0).view(2, 3)
    stored = read_headers(
        [write(tmp_path, a=values, b=values.clone(), c=values + 1, d=values.view(3, 2).clone(), e=values.bfloat16())]
    )
    assert [name for name in "abcde" if same_bytes(stored["a"], stored[name])] == ["a", "b"]
