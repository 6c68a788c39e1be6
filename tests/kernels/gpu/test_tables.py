"""The tables of configurations: what is written is what kernels take, and what can't be one is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen35mm_kernels.gpu import launch, tables
from qwen35mm_kernels.gpu.launch import config_for, trial
from qwen35mm_kernels.gpu.tables import Config, Table, read_table, table_path, write_table

CUDA = torch.device("cuda", 0)
DEFAULT = Config({"BLOCK": 64}, num_warps=4, num_stages=1)
TABLE: Table = {
    ("norm", "D128"): Config({"BLOCK": 32}, num_warps=8, num_stages=2),
    ("norm", "D64"): Config({"BLOCK": 16}, num_warps=1, num_stages=1),
    ("gates", "Hv16"): Config({}, num_warps=2, num_stages=3),
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the table of "Some Card" belongs, which this machine seems to have."""
    monkeypatch.setattr(tables, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Some-Card (2nd)")
    launch._table.cache_clear()
    yield tmp_path / "configs" / "nvidia_some_card_2nd.json"
    launch._table.cache_clear()


def test_a_kernel_takes_what_was_written(path: Path) -> None:
    assert table_path("NVIDIA Some-Card (2nd)") == path
    assert config_for("norm", CUDA, "D128", DEFAULT) is DEFAULT
    write_table(path, TABLE, {"card": "NVIDIA Some-Card (2nd)", "driver": None})
    launch._table.cache_clear()
    assert config_for("norm", CUDA, "D128", DEFAULT) == TABLE["norm", "D128"]
    assert config_for("norm", CUDA, "D256", DEFAULT) is DEFAULT
    assert config_for("other", CUDA, "D128", DEFAULT) is DEFAULT
    assert config_for("norm", torch.device("cpu"), "D128", DEFAULT) is DEFAULT


def test_a_file_is_written_at_once_and_in_order(path: Path) -> None:
    write_table(path, TABLE, {"card": "one"})
    first = path.read_bytes()
    assert read_table(path) == TABLE
    write_table(path, dict(reversed(TABLE.items())), {"card": "one"})
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(TypeError):
        write_table(path, {("norm", "D64"): Config({"BLOCK": CUDA})}, {})  # type: ignore[dict-item]
    assert path.read_bytes() == first


def test_blocks_of_another_kernel_are_refused(path: Path) -> None:
    write_table(path, TABLE, {})
    with pytest.raises(ValueError, match=rf"{path}, norm, D128: blocks must be \['BLOCK_V'\], got \['BLOCK'\]"):
        config_for("norm", CUDA, "D128", Config({"BLOCK_V": 32}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.update(warps=4), "must have blocks, num_stages, num_warps and nothing else"),
        (lambda entry: entry.pop("num_stages"), "must have blocks, num_stages, num_warps and nothing else"),
        (lambda entry: entry.update(blocks=[32]), "blocks must map names to sizes, got"),
        (lambda entry: entry.update(blocks={"BLOCK": 0}), "BLOCK must be a whole number of at least 1, got 0"),
        (lambda entry: entry.update(num_warps="4"), "num_warps must be a whole number of at least 1, got '4'"),
        (lambda entry: entry.update(num_stages=True), "num_stages must be a whole number of at least 1, got True"),
    ],
)
def test_a_malformed_entry_is_named(change: Callable[[dict[str, Any]], object], message: str, path: Path) -> None:
    write_table(path, TABLE, {})
    content = json.loads(path.read_text())
    change(content["kernels"]["norm"]["D128"])
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{path}, norm, D128: {message}"):
        config_for("gates", CUDA, "Hv16", DEFAULT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", " isn't JSON"),
        ("[]", ' must be an object with "kernels"'),
        ('{"norm": {}}', ' must be an object with "kernels"'),
        ('{"kernels": {"norm": 1}}', ", norm: must map shapes to configurations, got 1"),
    ],
)
def test_a_file_that_is_no_table_is_named(text: str, message: str, path: Path) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}{message}"):
        config_for("norm", CUDA, "D128", DEFAULT)


def test_a_trial_takes_its_own_and_reads_no_table(path: Path) -> None:
    write_table(path, TABLE, {})
    tried = Config({"BLOCK": 128})
    with trial({("norm", "D64"): tried}) as asked:
        assert config_for("norm", CUDA, "D64", DEFAULT) is tried
        assert config_for("norm", CUDA, "D128", DEFAULT) is DEFAULT
    assert asked == {("norm", "D64"): DEFAULT, ("norm", "D128"): DEFAULT}
    assert config_for("norm", CUDA, "D128", DEFAULT) == TABLE["norm", "D128"]


def test_a_trial_can_take_the_place_of_a_launch() -> None:
    launched = []
    kernel = object()
    with trial({}, lambda *arguments, **constants: launched.append((arguments, constants))):
        launch.launch(kernel, (2,), x := torch.ones(1), 3, config=DEFAULT, D=64)
        launch.launch(kernel, (2, 0), x, 3, config=DEFAULT, D=64)
    constants = {"BLOCK": 64, "D": 64, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    assert launched == [((kernel, (2,), x, 3), constants)]
