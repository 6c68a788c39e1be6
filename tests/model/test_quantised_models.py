"""Whole checkpoints with quantised matrices: they answer as transformers does, and damage is named before they run."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from transformers import FineGrainedFP8Config, Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

from qwen35mm.checkpoints.gguf_folder import gguf_folder
from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.safetensors_files import new_buffer
from qwen35mm.checkpoints.sources import QuantisedSource
from qwen35mm.checkpoints.tensor_names import checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.errors import CheckpointError, ConfigError, Qwen35mmError
from qwen35mm.model.load import load
from qwen35mm.model.weights import load_model
from tests import forked
from tests.checkpoints import ggufs, packers
from tests.model.test_weights import write_zeros
from tests.tiny import DENSE, MOE, SHALLOW, TinyCheckpoints, TinySpec

Tensors = dict[str, torch.Tensor]

# It divides all widths: transformers reads the last, narrower blocks of others otherwise than they are defined.
BLOCK = 16


def is_matrix(name: str) -> bool:
    last = name.removesuffix(".weight").rpartition(".")[2]
    return "language_model.layers" in name and (last.endswith("_proj") or last in ("in_proj_qkv", "in_proj_z"))


def fp8(matrix: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., out, in] e4m3, and scales of blocks."""
    *_, out, width = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -width % block, 0, -out % block))
    blocks = padded.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
    scales = blocks.abs().amax((-3, -1)) / 448
    codes = (blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)[..., :out, :width]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales


def write_fp8(source: Path, folder: Path, block: int = BLOCK, *, stacked: bool = False) -> dict[str, Any]:
    """A checkpoint as Qwen publishes those in FP8; returns its quantization_config.

    Args:
        stacked: whether a layer's experts stay one tensor.
    """
    shutil.copytree(source, folder)
    tensors: Tensors = {}
    for name, x in load_file(source / "model.safetensors").items():
        if ".mlp.experts." in name and x.ndim == 3 and not stacked:
            for expert, matrix in enumerate(x):
                prefix = name.replace("gate_up_proj", "").replace("down_proj", "") + f"{expert}."
                halves = matrix.chunk(2) if "gate_up" in name else [matrix]
                for part, half in zip(
                    ["gate_proj", "up_proj"] if len(halves) == 2 else ["down_proj"], halves, strict=True
                ):
                    put(tensors, f"{prefix}{part}.weight", half, block)
        elif is_matrix(name):
            put(tensors, name, x, block)
        else:
            tensors[name] = x
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": sorted({"lm_head", "model.visual", *unquantised(tensors)}),
    }
    set_config(folder, quantization)
    return quantization


def unquantised(tensors: Tensors) -> set[str]:
    names = {
        name.removesuffix(".weight") for name in tensors if name.endswith(("in_proj_a.weight", "in_proj_b.weight"))
    }
    return names | {name.removesuffix(".weight") for name in tensors if "gate.weight" in name}


def put(tensors: Tensors, name: str, matrix: torch.Tensor, block: int = BLOCK) -> None:
    tensors[name], tensors[f"{name}_scale_inv"] = fp8(matrix, block)


def set_config(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


@pytest.fixture(scope="module")
def fp8_folder(tiny: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    write_fp8(tiny.folder(DENSE), folder)
    return folder


@pytest.mark.parametrize("spec", [DENSE, MOE], ids=lambda spec: spec.name)
def test_fp8_weights_are_those_of_transformers(spec: TinySpec, tiny: TinyCheckpoints, tmp_path: Path) -> None:
    config = write_fp8(tiny.folder(spec), tmp_path / "model")
    kind = Qwen3_5MoeForConditionalGeneration if spec.moe else Qwen3_5ForConditionalGeneration
    read = FineGrainedFP8Config(
        dequantize=True,
        weight_block_size=tuple(config["weight_block_size"]),
        modules_to_not_convert=config["modules_to_not_convert"],
    )
    theirs = kind.from_pretrained(tmp_path / "model", dtype=torch.float32, quantization_config=read)
    # Theirs, written without any quantisation, is read by the path that other tests hold.
    theirs.config.quantization_config = None
    plain = {name: x for name, x in theirs.state_dict().items() if not (spec.tied and name == "lm_head.weight")}
    (tmp_path / "plain").mkdir()
    shutil.copy(tiny.folder(spec) / "config.json", tmp_path / "plain")
    save_file({name: x.contiguous() for name, x in plain.items()}, tmp_path / "plain" / "model.safetensors")
    ours, expected = (
        load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.float32).state_dict()
        for folder in (tmp_path / "model", tmp_path / "plain")
    )
    assert any(isinstance(each, QuantisedSource) for each in read_checkpoint(tmp_path / "model", config).values())
    assert ours.keys() == expected.keys()
    different = [name for name, x in ours.items() if not torch.equal(x, expected[name])]
    assert not different


def test_a_load_tells_what_it_read_and_keeps(fp8_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "qwen35mm.model.weights")
    load_model(fp8_folder, ModelConfig.from_pretrained(fp8_folder), dtype=torch.bfloat16)
    assert re.fullmatch(r"Read \d+ F32, 25 FP8; kept as bfloat16, 0\.00 GB\.", caplog.messages[-1])


def damage_of(change: Callable[[Tensors], object], folder: Path, tmp_path: Path) -> str:
    """What is said of a checkpoint after a change of its tensors."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_model(broken, ModelConfig.from_pretrained(broken), dtype=torch.float32)
    return str(caught.value)


MATRIX = "model.language_model.layers.0.mlp.down_proj.weight"
SCALE = f"{MATRIX}_scale_inv"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.pop(SCALE), rf"wrong dtype .*{MATRIX} in model.safetensors is F8_E4M3"),
        (lambda x: x.pop(MATRIX), rf"{MATRIX} in model.safetensors .*an unknown format"),
        (
            lambda x: x.update({SCALE: x[SCALE][:1]}),
            rf"{MATRIX}.*scale of \[1, 8\].*doesn't fit \[64, 128\] in blocks of 16",
        ),
        (lambda x: x[SCALE].fill_(torch.nan), rf"{MATRIX} .*scales that are not finite"),
        (lambda x: x[SCALE].fill_(torch.inf), rf"{MATRIX} .*scales that are not finite"),
        (lambda x: x[MATRIX].view(torch.uint8).fill_(0x7F), rf"{MATRIX} .*values that are not finite"),
        (lambda x: x.update({MATRIX: x[MATRIX].float()}), rf"{MATRIX} .*codes \(F32\).*an unknown format"),
    ],
    ids=["no scale", "no codes", "other blocks", "nan scale", "infinite scale", "nan code", "codes are floats"],
)
def test_damage_is_named(change: Callable[[Tensors], object], said: str, fp8_folder: Path, tmp_path: Path) -> None:
    found = damage_of(change, fp8_folder, tmp_path)
    assert re.search(said, found), found


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "gptq", "bits": 5}, "5 bits; 2, 3, 4, 8 can be read"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'; gemm can be read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"blocks of \[0, 128\]"),
    ],
)
def test_a_variant_that_is_not_known_is_refused_in_words(
    quantization: Any, said: str, fp8_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(fp8_folder, tmp_path / "other")
    set_config(folder, quantization)
    with pytest.raises(ConfigError, match=said):
        load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.float32)


def test_whatever_a_header_says_only_clear_errors_come(fp8_folder: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    layer = {name: x for name, x in load_file(fp8_folder / "model.safetensors").items() if ".layers.0.mlp." in name}
    raw = save(layer)
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    names = list(header)
    kinds = ["F32", "BF16", "F16", "F64", "I64", "I32", "I8", "U8", "F8_E4M3", "F8_E5M2", "X9"]
    endings = [".qweight", ".qzeros", ".scales", ".weight_packed", ".weight_scale", ".weight.absmax", ".SCB", ""]
    methods = [{"quant_method": m} for m in ("fp8", "gptq", "awq", "compressed-tensors", "modelopt", "bitsandbytes")]
    path, buffer = tmp_path / "model.safetensors", new_buffer()
    for turn in range(500):
        changed = json.loads(json.dumps(header))
        for name in chance.sample(names, chance.randint(1, 2)):
            entry = changed.pop(name)
            what = chance.randrange(4)
            if what == 0:
                entry["dtype"] = chance.choice(kinds)
            elif what == 1 and entry["shape"]:
                entry["shape"][chance.randrange(len(entry["shape"]))] = chance.choice([0, 1, 7, -1, 2**40])
            elif what == 2:
                entry["shape"] = entry["shape"][::-1] + chance.choice([[], [1]])
            renamed = name.rpartition(".")[0] + chance.choice(endings) if chance.random() < 0.4 else name
            changed[renamed] = entry
        text = json.dumps(changed).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        try:
            found = read_checkpoint(tmp_path, chance.choice(methods))
            quantised = [source for source in found.values() if isinstance(source, QuantisedSource)]
            if quantised and turn % 5 == 0:
                source = chance.choice(quantised)
                assert all(rows.isfinite().all() for rows in source.rows(source.shape[-1], buffer))
        except Qwen35mmError:
            pass


def written(method: str, source: Path, folder: Path) -> Tensors:
    """Writes a checkpoint in a method's format; returns the parameters of a model with what it means."""
    means = packers.write_packed(method, source, folder / "model", is_matrix)
    (folder / "plain").mkdir()
    save_file(means, folder / "plain" / "model.safetensors")
    config = replace(ModelConfig.from_pretrained(folder / "model"), quantization=None)
    return load_model(folder / "plain", config, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("method", packers.METHODS)
def test_weights_are_those_that_the_format_defines(method: str, tiny: TinyCheckpoints, tmp_path: Path) -> None:
    expected = written(method, tiny.folder(SHALLOW), tmp_path)
    folder = tmp_path / "model"
    assert_same(load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.float32).state_dict(), expected)


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=() if each == "packed" else pytest.mark.slow) for each in packers.METHODS]
)
def test_damage_never_runs_as_another_model(method: str, tiny: TinyCheckpoints, tmp_path: Path) -> None:
    """The file cut off, and bytes of its header changed. What can't be noticed: other bytes in the tensors' data."""
    chance, folder = random.Random(method), tmp_path / "model"
    expected = written(method, tiny.folder(SHALLOW), tmp_path)
    config, path = ModelConfig.from_pretrained(folder), folder / "model.safetensors"
    raw = path.read_bytes()
    header_bytes = 8 + int.from_bytes(raw[:8], "little")
    for turn in range(120):
        changed = bytearray(raw)
        if turn < 20:
            del changed[chance.randrange(header_bytes if turn < 10 else len(raw)) :]
        else:
            at = chance.randrange(header_bytes)
            changed[at] ^= chance.randrange(1, 256) if turn % 2 else 1 << chance.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            assert_same(load_model(folder, config, dtype=torch.float32).state_dict(), expected)


@pytest.mark.slow
def test_files_that_are_cut_off_never_run_as_another_model(tmp_path: Path) -> None:
    chance, whole = random.Random(0), tmp_path / "whole"
    ggufs.write_checkpoint(ggufs.DENSE, whole)
    packers.write_packed("gptq-order", whole, tmp_path / "model", is_matrix)
    expected = load(tmp_path / "model", dtype="float32").model.state_dict()
    files = sorted(path for path in (tmp_path / "model").iterdir())
    assert {"config.json", "tokenizer.json", "model.safetensors"} < {path.name for path in files}
    for path in files:
        raw = path.read_bytes()
        for _ in range(30):
            path.write_bytes(raw[: chance.randrange(len(raw))])
            with contextlib.suppress(Qwen35mmError):
                assert_same(load(tmp_path / "model", dtype="float32").model.state_dict(), expected)
        path.write_bytes(raw)


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, x in found.items() if not torch.equal(x, expected[name])]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("kind", "integers"), [("FP8", None), ("GGUF", None), ("GPTQ", "int8")])
def test_peak_memory_is_what_is_kept_and_one_shard_whatever_is_read(
    kind: str, integers: str | None, tiny: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 MB of bfloat16, in matrices of 25 MB (GGUF: 50)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if kind == "GGUF":
        folder, shard_bytes = gguf_folder(large_gguf(tmp_path / "model.gguf")), (tmp_path / "model.gguf").stat().st_size
    else:
        folder = write_large(tiny.folder(DENSE), tmp_path / "model", kind)
        shard_bytes = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    process = forked.run("tests.model.test_weights", folder, tiny.folder(DENSE), *([integers] if integers else []))
    assert process.returncode == 0, process.stderr
    weight_bytes, peak_bytes = json.loads(process.stdout)
    print(f"{kind}, {integers}: {weight_bytes:,} bytes, at most {peak_bytes:,}, a shard {shard_bytes:,}")
    assert weight_bytes > (140e6 if integers else 280e6)
    assert 0.9 * weight_bytes < peak_bytes < weight_bytes + shard_bytes + (32 << 20)


def large_gguf(path: Path) -> Path:
    """The dense model with an enormous MLP in Q8_0."""
    gguf = pytest.importorskip("gguf")
    reader, width = gguf.GGUFReader(ggufs.FOLDER / "dense.gguf"), 409_600
    made = gguf.GGUFWriter(path, "qwen35")
    for key, value in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "qwen35.feed_forward_length"):
            made.add_key_value(key, value.contents(), value.types[0], value.types[-1] if len(value.types) > 1 else None)
    made.add_feed_forward_length(width)
    for tensor in reader.tensors:
        if "ffn" in tensor.name:
            shape = (64, width // 32 * 34) if "down" in tensor.name else (width, 68)
            made.add_tensor(tensor.name, np.zeros(shape, np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            made.add_tensor(tensor.name, np.array(tensor.data))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return path


def write_large(small: Path, folder: Path, kind: str) -> Path:
    """The small model with an MLP of 300 MB in bfloat16, in zeros, two layers' in a shard."""
    data = json.loads((small / "config.json").read_text())
    data["text_config"] |= {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 1024}
    data["vision_config"]["out_hidden_size"] = 2048
    methods = {"FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "GPTQ": {"quant_method": "gptq"}}
    data |= {"quantization_config": methods[kind]} if kind in methods else {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    shards: dict[str, Tensors] = defaultdict(dict)
    for target in checkpoint_targets(ModelConfig.from_dict(data), separate_head=False, split_experts=False):
        shard = shards[f"layers-{int(target.name.split('.')[3]) // 2}" if ".layers." in target.name else "others"]
        is_quantised = kind in methods and ".mlp." in target.name and ".layers." in target.name
        if not is_quantised:
            shard[target.name] = torch.empty(target.shape, dtype=torch.bfloat16, device="meta")
        elif kind == "FP8":
            shard[target.name] = torch.empty(target.shape, dtype=torch.float8_e4m3fn, device="meta")
            shard[f"{target.name}_scale_inv"] = torch.empty(*(size // 128 for size in target.shape), device="meta")
        else:
            (out, width), name = target.shape, target.name.removesuffix(".weight")
            shard[f"{name}.qweight"] = torch.empty(width // 8, out, dtype=torch.int32, device="meta")
            shard[f"{name}.qzeros"] = torch.empty(width // 128, out // 8, dtype=torch.int32, device="meta")
            shard[f"{name}.scales"] = torch.empty(width // 128, out, dtype=torch.float16, device="meta")
    weight_map = {}
    for name, shard in shards.items():
        write_zeros(shard, folder / f"{name}.safetensors")
        weight_map |= dict.fromkeys(shard, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
