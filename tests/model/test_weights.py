"""Loading: every tensor lands in its place or is named in an error, and nothing is held twice."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen35mm.checkpoints import sources
from qwen35mm.checkpoints.safetensors_files import DTYPES
from qwen35mm.checkpoints.tensor_names import checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.errors import CheckpointError
from qwen35mm.model import weights
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.weight_formats import Weight
from qwen35mm.model.weights_cache import WeightsCache
from qwen35mm_kernels.cpu.native.library import find_library
from tests import forked
from tests.model.layouts import make_prompt, new_cache, our_prefill, their_logits, their_positions
from tests.tiny import DENSE, MOE, SHALLOW, TinyCheckpoints, TinySpec, build

Loader = Callable[..., Any]
Tensors = dict[str, torch.Tensor]
EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
NORM = "model.language_model.norm.weight"


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Qwen35Model:
    return weights.load_model(folder, ModelConfig.from_pretrained(folder), dtype=dtype, **options)


@pytest.fixture
def edited(tiny: TinyCheckpoints, tmp_path: Path) -> Callable[..., Path]:
    """edited(spec, change): a copy of a checkpoint whose tensors went through `change`."""

    def edit(spec: TinySpec, change: Callable[[Tensors], None]) -> Path:
        source, folder = tiny.folder(spec), tmp_path / "edited"
        folder.mkdir()
        shutil.copy(source / "config.json", folder)
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return edit


def same_parameters(one: Qwen35Model, two: Qwen35Model) -> bool:
    first, second = one.state_dict(), two.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def values(weight: torch.nn.Module) -> torch.Tensor:
    assert isinstance(weight, Weight)
    return weight.rows(torch.arange(weight.out_features))


@pytest.mark.parametrize("spec", [DENSE, MOE], ids=lambda spec: spec.name)
def test_shards_equal_a_single_file(spec: TinySpec, tmp_path: Path, ours: Loader) -> None:
    build(spec).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same_parameters(load(tmp_path), ours(spec))


def test_fused_experts_equal_one_tensor_per_expert(edited: Callable[..., Path], ours: Loader) -> None:
    """save_pretrained writes each expert's matrices apart, the official checkpoints hold them fused."""

    def fuse(tensors: Tensors) -> None:
        for layer in range(4):
            prefix = f"model.language_model.layers.{layer}.mlp.experts"

            def take(name: str, prefix: str = prefix) -> torch.Tensor:
                return torch.stack([tensors.pop(f"{prefix}.{expert}.{name}_proj.weight") for expert in range(8)])

            tensors[f"{prefix}.gate_up_proj"] = torch.cat([take("gate"), take("up")], dim=1)
            tensors[f"{prefix}.down_proj"] = take("down")

    assert same_parameters(load(edited(MOE, fuse)), ours(MOE))


def test_multi_token_prediction_is_ignored(edited: Callable[..., Path], ours: Loader) -> None:
    folder = edited(DENSE, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(3)}))
    assert same_parameters(load(folder), ours(DENSE))


def test_dtypes_are_converted_and_gates_stay_float32(edited: Callable[..., Path], ours: Loader) -> None:
    def halve(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.float16 if "mlp" in name else torch.bfloat16)

    folder = edited(DENSE, halve)
    stored = load_file(folder / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        model = load(folder, dtype)
        assert torch.equal(values(model.embedding.weight), stored[EMBEDDING].to(dtype))
        down = "model.language_model.layers.3.mlp.down_proj.weight"
        assert torch.equal(values(model.get_submodule("layers.3.mlp.down_proj.weight")), stored[down].to(dtype))
    rounded = ours(DENSE, torch.bfloat16)
    exact = ours(DENSE)
    for name in ("A_log", "dt_bias"):
        parameter = rounded.get_parameter(f"layers.0.linear_attn.{name}")
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, exact.get_parameter(f"layers.0.linear_attn.{name}"))


def test_a_stored_head_that_repeats_tied_embeddings_is_tied(edited: Callable[..., Path]) -> None:
    model = load(edited(DENSE, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()})))
    assert model.lm_head is None


def test_a_stored_head_that_differs_is_used_as_transformers_does(
    edited: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Qwen3_5ForConditionalGeneration

    folder = edited(DENSE, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].flip(0).contiguous()}))
    model = load(folder)
    assert "they differ: both are used" in caplog.text
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = make_prompt([20])
    positions, _ = their_positions(theirs, prompt)
    actual = our_prefill(model, prompt, positions, new_cache(model))
    assert torch.allclose(actual, their_logits(theirs, prompt), atol=1e-3)


def test_progress_ends_at_the_total(tiny: TinyCheckpoints) -> None:
    calls: list[tuple[int, int]] = []
    load(tiny.folder(DENSE), progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] > 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), rf"missing: {NORM}"),
        (lambda tensors: tensors.update(surplus=torch.zeros(2)), r"unexpected: surplus \(model.safetensors\)"),
        (
            lambda tensors: tensors.update({NORM: torch.zeros(65)}),
            rf"wrong shape: {NORM} in model.safetensors is \[65\], expected \[64\]",
        ),
        (
            lambda tensors: tensors.update({NORM: torch.zeros(64, dtype=torch.int8)}),
            rf"wrong dtype .*{NORM} in model.safetensors is I8",
        ),
        (
            lambda tensors: tensors.update({NORM: torch.zeros(64).to(torch.float8_e4m3fn)}),
            rf"wrong dtype .*{NORM} in model.safetensors is F8_E4M3",
        ),
    ],
    ids=["missing", "unexpected", "misshapen", "integer", "float8"],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[Tensors], None], message: str, edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edited(SHALLOW, change)
    forbid_reading(monkeypatch)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_all_problems_are_told_at_once(edited: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".visual." in name]:
            del tensors[name]
        tensors["surplus"] = torch.zeros(2)

    with pytest.raises(CheckpointError, match=r"missing: model.visual.*and \d+ more; unexpected: surplus"):
        load(edited(SHALLOW, change))


def test_what_everybody_computes_may_lie_beside_the_weights(
    edited: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.language_model.rotary_emb.inv_freq"
    load(edited(SHALLOW, lambda tensors: tensors.update({name: torch.zeros(2)})))
    assert name in caplog.text


def test_float64_is_told_how_to_be_cast(edited: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"float64 can be cast: .*lm_head\.weight in model\.safetensors is F64"):
        load(edited(SHALLOW, lambda tensors: tensors.update({HEAD: tensors[HEAD].double()})))


def test_an_untied_checkpoint_needs_its_head(edited: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load(edited(SHALLOW, lambda tensors: tensors.pop(HEAD)))


def test_a_truncated_shard_is_found_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(DENSE).save_pretrained(tmp_path, max_shard_size="200KB")
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 100)
    forbid_reading(monkeypatch)
    with pytest.raises(CheckpointError, match=rf"{last.name} is truncated, cutting off model\."):
        load(tmp_path)


def test_a_file_that_shrinks_while_loading_is_an_error(
    edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edited(SHALLOW, lambda tensors: None)
    check = weights._check

    def check_then_cut(*arguments: Any) -> None:
        check(*arguments)
        (folder / "model.safetensors").open("r+b").truncate(50_000)

    monkeypatch.setattr(weights, "_check", check_then_cut)
    with pytest.raises(CheckpointError, match=r"model.safetensors ends in the middle of .*: it changed while loading"):
        load(folder)


def test_other_dtypes_are_refused(tiny: TinyCheckpoints) -> None:
    with pytest.raises(ValueError, match=r"float32 or torch\.bfloat16; got torch\.float16"):
        load(tiny.folder(DENSE), torch.float16)


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("data was read before the headers were checked")

    monkeypatch.setattr(sources, "open_shard", read)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_the_weights_and_one_shard(large_checkpoint: Path, tiny: TinyCheckpoints) -> None:
    process = forked.run("tests.model.test_weights", large_checkpoint, tiny.folder(DENSE))
    assert process.returncode == 0, process.stderr
    weight_bytes, peak_bytes = json.loads(process.stdout)
    shard_bytes = max(path.stat().st_size for path in large_checkpoint.glob("*.safetensors"))
    assert weight_bytes > 100e6
    assert 0.9 * weight_bytes < peak_bytes < 1.15 * weight_bytes + shard_bytes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("integers", ["int8", "int4"])
def test_peak_memory_of_quantised_weights_is_little_more_than_they_are(
    integers: str, large_checkpoint: Path, tiny: TinyCheckpoints, tmp_path: Path
) -> None:
    """When they are made, and when they are mapped."""
    for _ in range(2):
        process = forked.run("tests.model.test_weights", large_checkpoint, tiny.folder(DENSE), integers, tmp_path)
        assert process.returncode == 0, process.stderr
        weight_bytes, peak_bytes = json.loads(process.stdout)
        # Beside them a buffer of 16 MiB, and some rows on their way, whatever a model's size.
        assert peak_bytes < 1.2 * weight_bytes + (48 << 20)
    assert any(tmp_path.glob("packed/*")) == (find_library() is not None)


@pytest.fixture(scope="module")
def large_checkpoint(tiny: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 220 MB of float32 weights in shards of about 60."""
    folder = tmp_path_factory.mktemp("large")
    data = json.loads((tiny.folder(DENSE) / "config.json").read_text())
    data["text_config"] |= {"hidden_size": 1024, "intermediate_size": 4096}
    data["vision_config"]["out_hidden_size"] = 1024
    (folder / "config.json").write_text(json.dumps(data))
    targets = checkpoint_targets(ModelConfig.from_dict(data), separate_head=False, split_experts=False)
    shards: list[Tensors] = [{}]
    for target in targets:
        if sum(tensor.nbytes for tensor in shards[-1].values()) > 60e6:
            shards.append({})
        shards[-1][target.name] = torch.empty(target.shape)
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number:05}.safetensors"
        write_zeros(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_zeros(tensors: Tensors, path: Path) -> None:
    """As `save_file` of so many zeros, in a file with a hole, which takes a disk no time."""
    header, size = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [size, size + tensor.nbytes],
        }
        size += tensor.nbytes
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(file.tell() + size)


def measure_peak(folder: Path, small: str, integers: str | None = None, cache: str | None = None) -> None:
    """What the other process does: prints the bytes of a model's weights, and how much its loading took at most.

    A small one comes first: how much of its libraries' files a system maps at their first use is no matter here.
    """

    def status(key: str) -> int:
        text = Path("/proc/self/status").read_text()
        (kib,) = re.findall(rf"{key}:\s+(\d+) kB", text)
        return int(kib) * 1024

    def load_with(cache: Path | None, folder: Path) -> Qwen35Model:
        kept = None if cache is None else WeightsCache(cache, 1 << 30)
        return load(folder, torch.bfloat16, integers=integers, cache=kept)

    for _ in range(2):  # made and mapped
        load_with(None if cache is None else Path(cache, "small"), Path(small))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    model = load_with(None if cache is None else Path(cache), folder)
    weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    print(json.dumps([weight_bytes, status("VmHWM") - before]))


if __name__ == "__main__":
    measure_peak(Path(sys.argv[1]), *sys.argv[2:])
