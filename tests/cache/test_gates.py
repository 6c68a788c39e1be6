"""Files of gates: which are taken, and what is said of the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CacheSettings
from qwen35mm.cache.gates import GATES_FILE, KVGates, find_gates, gate_shapes, gates_file
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm.model.load import read_config

CONFIG = read_config(demo_model_path()).text
MODEL = "ab" * 32


def layers(**changes: torch.Tensor) -> dict[int, dict[str, torch.Tensor]]:
    return {
        layer: {name: torch.ones(shape) for name, shape in gate_shapes(CONFIG, 2).items()} | changes
        for layer in CONFIG.attention_layers
    }


def written(folder: Path, data: bytes) -> Path:
    path = folder / "some.safetensors"
    path.write_bytes(data)
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    gates = KVGates.read(written(tmp_path, gates_file(layers(), MODEL)), CONFIG, MODEL)
    assert tuple(gates.layers) == CONFIG.attention_layers
    assert all(tensor.dtype == torch.float32 for gate in gates.layers.values() for tensor in gate.values())
    others = KVGates.read(written(tmp_path, gates_file(layers(bias=torch.zeros(2, 2)), MODEL)), CONFIG, MODEL)
    assert others.digest != gates.digest
    near = gates.on([torch.device("meta")] * CONFIG.num_layers)
    assert {tensor.device.type for gate in near.layers.values() for tensor in gate.values()} == {"meta"}


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: gates_file(layers(), MODEL)[:-9], "it is no file of gates, or was cut off. Expected is a file"),
        (lambda: b"", "it is no file of gates, or was cut off"),
        (lambda: b"\xff" * 64, "it is no file of gates, or was cut off"),
        (lambda: safetensors.torch.save({"x": torch.ones(2)}), "it is no file of gates, or was cut off"),
        (lambda: safetensors.torch.save({"x": torch.ones(2)}, {"qwen35mm-kv-gates-1": "[]"}), "it is damaged"),
        (lambda: safetensors.torch.save({"x": torch.ones(2)}, {"format": "pt"}), "it is no file of gates"),
        (lambda: flipped(gates_file(layers(), MODEL)), "it is damaged: its numbers don't have the digest"),
        (
            lambda: gates_file(layers(), "cd" * 32),
            "it was trained on another model (cdcdcdcdcdcd, this one is abababababab). Make one for this model",
        ),
        (
            lambda: gates_file(layers(sinks=torch.ones(2, 8, 4)), MODEL),
            "layers.3.sinks is torch.bfloat16 [2, 8, 4], expected are floats of [2, 8, 8]",
        ),
        (lambda: gates_file({3: layers()[3]}, MODEL), "it has no layers.7.down"),
        (lambda: gates_file(layers(bias=torch.full((2, 2), torch.nan)), MODEL), "layers.3.bias has numbers that"),
    ],
)
def test_other_files_are_refused_in_words(made: Callable[[], bytes], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^Gates some\.safetensors: {re.escape(said)}"):
        KVGates.read(written(tmp_path, made()), CONFIG, MODEL)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors: it can't be read \(No such file .* `qwen35mm gates"):
        find_gates(demo_model_path(), tmp_path / "none.safetensors", CONFIG, None)
    with pytest.raises(ConfigError, match="kv_gates must be a file, auto or none; got 3"):
        CacheSettings(kv_gates=3)  # pyright: ignore[reportArgumentType]


def test_gates_beside_the_weights_are_found_by_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in demo_model_path().iterdir():
        if path.name != GATES_FILE:
            (folder / path.name).symlink_to(path)
    assert find_gates(folder, "auto", CONFIG, None) is None
    digest = weights_digest(folder, None)
    (folder / GATES_FILE).write_bytes(gates_file(layers(), digest))
    assert weights_digest(folder, None) == digest, "they are no weights"
    found = find_gates(folder, "auto", CONFIG, None)
    assert found is not None
    assert find_gates(folder, "none", CONFIG, None) is None
    # As beside several GGUF files; one that is named is refused.
    (folder / GATES_FILE).write_bytes(gates_file(layers(), "cd" * 32))
    assert find_gates(folder, "auto", CONFIG, None) is None
    with pytest.raises(CheckpointError, match="trained on another model"):
        find_gates(folder, str(folder / GATES_FILE), CONFIG, None)


def test_the_bundled_model_has_gates_of_its_own() -> None:
    config = read_config(demo_model_path(), mtp=True).text
    found = find_gates(demo_model_path(), "auto", config, None)
    assert found is not None
    assert tuple(found.layers) == config.attention_layers
    assert (demo_model_path() / GATES_FILE).stat().st_size < 32_000
