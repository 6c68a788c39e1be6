"""Quantised weights on disk: mapped at the next start with the same bits, checked, bounded, made again if damaged."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CacheSettings
from qwen35mm.config import ModelConfig
from qwen35mm.model import weights, weights_cache
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.weights import load_model
from qwen35mm.model.weights_cache import WeightsCache
from qwen35mm.model_library import BackendOptions
from qwen35mm_kernels.cpu.native.library import find_library
from tests.model.layouts import ONE_IMAGE, make_prompt, new_cache, our_prefill
from tests.tiny import DENSE, MOE, TinyCheckpoints, TinySpec

pytestmark = pytest.mark.skipif(find_library() is None, reason="there is no compiled part for this processor")
Load = Callable[..., Qwen35Model]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats of all models that were filled from a checkpoint."""
    fill, made = weights._fill, []

    def watch(model: Qwen35Model, *args: object) -> set[str]:
        made.append(str(model.integers))
        return fill(model, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(weights, "_fill", watch)
    return made


@pytest.fixture
def folder(tiny: TinyCheckpoints, tmp_path: Path) -> Path:
    """A checkpoint of the test's own, old enough to be remembered."""
    return own_copy(tiny.folder(DENSE), tmp_path / "checkpoint")


def own_copy(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    return folder


def load(
    folder: Path, directory: Path, integers: str = "int4", max_bytes: int = 1 << 30, **options: object
) -> Qwen35Model:
    cache = WeightsCache(directory, max_bytes)
    dtype = options.pop("dtype", torch.bfloat16)
    assert isinstance(dtype, torch.dtype)
    return load_model(folder, ModelConfig.from_pretrained(folder), dtype=dtype, integers=integers, cache=cache)


def logits(model: Qwen35Model) -> torch.Tensor:
    prompt = make_prompt(ONE_IMAGE)
    positions = torch.arange(prompt.num_tokens).expand(3, -1)
    return our_prefill(model, prompt, positions, new_cache(model))


def files(directory: Path) -> list[Path]:
    return sorted((directory / "packed").iterdir())


@pytest.mark.parametrize(("spec", "integers", "dtype"), [(DENSE, "int8", torch.float32), (MOE, "int4", torch.bfloat16)])
def test_the_second_start_has_the_same_bits(
    spec: TinySpec, integers: str, dtype: torch.dtype, tiny: TinyCheckpoints, tmp_path: Path, made: list[str]
) -> None:
    first = load(tiny.folder(spec), tmp_path, integers, dtype=dtype)
    second = load(tiny.folder(spec), tmp_path, integers, dtype=dtype)
    assert made == [integers]
    assert torch.equal(logits(second), logits(first))
    ones, others = first.state_dict(), second.state_dict()
    assert ones.keys() == others.keys()
    assert all(torch.equal(ones[name], others[name]) for name in ones)
    (path,) = files(tmp_path)
    assert load_file(path).keys() == {*ones, "digest"}, "it is a safetensors file like any other"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_mapped_model_outlives_its_file(folder: Path, tmp_path: Path, made: list[str]) -> None:
    expected = logits(load(folder, tmp_path))
    model = load(folder, tmp_path)
    shutil.rmtree(tmp_path / "packed")
    assert torch.equal(logits(model), expected)
    assert made == ["int4"]


def test_bfloat16_is_not_kept(folder: Path, tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "cache", 1 << 30)
    load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.bfloat16, cache=cache)
    assert not (tmp_path / "cache").exists()


def test_each_format_and_each_dtype_has_a_file(folder: Path, tmp_path: Path, made: list[str]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for integers in ("int8", "int4"):
            load(folder, tmp_path, integers, dtype=dtype)
    assert made == ["int8", "int4"] * 2
    assert len(files(tmp_path)) == 4


def test_a_changed_checkpoint_is_another_one(folder: Path, tmp_path: Path, made: list[str]) -> None:
    before = logits(load(folder, tmp_path))
    tensors = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, name: -tensors[name]}, folder / "model.safetensors")
    after = logits(load(folder, tmp_path))
    assert made == ["int4"] * 2
    assert not torch.equal(before, after)


def test_other_sources_or_another_library_pack_anew(
    folder: Path, tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder, tmp_path)
    library = find_library()
    assert library is not None
    with monkeypatch.context() as patch:
        patch.setattr(library, "digest", "another")
        load(folder, tmp_path)
    monkeypatch.setattr(weights_cache, "_packing_digest", lambda: "another")
    load(folder, tmp_path)
    assert made == ["int4"] * 3


@pytest.mark.parametrize("named", [False, True])
def test_weights_are_kept_without_a_disk_cache(
    named: bool, tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the user's cache folder, unless the settings forbid it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = CacheSettings(directory=tmp_path / "named" if named else None)
    read: list[int] = []
    options = BackendOptions(device="cpu", weights="int4", cache=cache, progress=lambda done, total: read.append(done))
    for _ in range(2):
        options.load_model(demo_model_path())
    assert made == ["int4"]
    assert len(read) == len(set(read)) > 10, "what is mapped needs no progress"
    assert len(files(tmp_path / "named" if named else tmp_path / "qwen35mm")) == 1
    replace(options, cache=replace(cache, keep_weights=False)).load_model(demo_model_path())
    assert made == ["int4"] * 2


def flip_a_bit(data: bytearray) -> None:
    data[-100] ^= 1


def cut_the_end(data: bytearray) -> None:
    del data[-64:]


def lose_a_page(data: bytearray) -> None:
    middle = len(data) // 2
    data[middle : middle + 4096] = bytes(4096)


def spoil_the_header(data: bytearray) -> None:
    data[20] = 0


def rename_a_tensor(data: bytearray) -> None:
    place = data.index(b"layers.0")
    data[place : place + 8] = b"layers.9"


@pytest.mark.parametrize("damage", [flip_a_bit, cut_the_end, lose_a_page, spoil_the_header, rename_a_tensor])
def test_what_is_damaged_is_made_again(
    damage: Callable[[bytearray], None],
    folder: Path,
    tmp_path: Path,
    made: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = logits(load(folder, tmp_path))
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    assert torch.equal(logits(load(folder, tmp_path)), expected)
    assert made == ["int4"] * 2
    assert "the weights are made again" in caplog.text
    assert torch.equal(logits(load(folder, tmp_path)), expected)
    assert made == ["int4"] * 2
    assert files(tmp_path) == [path]


def test_those_used_longest_ago_make_room(folder: Path, tmp_path: Path, made: list[str]) -> None:
    load(folder, tmp_path, "int8")
    (eight,) = files(tmp_path)
    os.utime(eight, (0, 0))
    unfinished, in_work = eight.with_name("old.part"), eight.with_name("new.part")
    for path in (unfinished, in_work):
        path.touch()
    os.utime(unfinished, (0, 0))
    budget = eight.stat().st_size * 3 // 2
    load(folder, tmp_path, "int4", budget)
    assert eight not in files(tmp_path), "both are too much"
    assert in_work in files(tmp_path)
    assert unfinished not in files(tmp_path)
    (four,) = [path for path in files(tmp_path) if path != in_work]
    os.utime(four, (0, 0))
    load(folder, tmp_path, "int4", budget)
    assert four.stat().st_mtime > 0, "what is used is young"
    load(folder, tmp_path, "int4", 1000)
    assert made == ["int8", "int4"]


def test_a_model_beyond_the_budget_is_not_kept(folder: Path, tmp_path: Path, made: list[str]) -> None:
    for _ in range(2):
        load(folder, tmp_path, "int4", 1000)
    assert files(tmp_path) == []
    load(folder, tmp_path, "int4")
    (four,) = files(tmp_path)
    load(folder, tmp_path, "int8", four.stat().st_size)
    assert files(tmp_path) == [four], "nothing has to go for what can't be kept"
    assert made == ["int4", "int4", "int4", "int8"]


def test_a_folder_that_cannot_be_used_is_no_error(
    folder: Path, tmp_path: Path, made: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("not a folder")
    assert torch.equal(logits(load(folder, tmp_path / "taken")), logits(load(folder, tmp_path)))
    assert "can't be kept in the disk cache" in caplog.text


def test_without_the_compiled_part_nothing_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_cache, "find_library", lambda: None)
    load(folder, tmp_path)
    assert not (tmp_path / "packed").exists()
