"""Models in GGUF files: numbers and tokens are those of the model that was converted, and answers are llama.cpp's."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.backends.local import LocalBackend
from qwen35mm.checkpoints.gguf_files import GgufFile
from qwen35mm.checkpoints.gguf_folder import config_of, gguf_folder
from qwen35mm.checkpoints.gguf_sources import TYPES, ValueHeads, gguf_sources
from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.safetensors_files import new_buffer
from qwen35mm.config import ModelConfig, YarnConfig
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.errors import CheckpointError, ConfigError, MissingExtraError
from qwen35mm.model.load import load
from qwen35mm.model.weight_formats import AS_STORED, PackedWeight
from qwen35mm.model.weights import find_mtp, load_model, loaded_bytes, weights_bytes
from qwen35mm.tokenizer import Tokenizer
from qwen35mm.tuning.need import TARGETS
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_kernels.cpu.native.products import Groups
from qwen35mm_preprocess import read_processing
from tests.checkpoints import ggufs
from tests.kernels.compare import dequantised, relative_error
from tests.model.layouts import TEXT, make_prompt, new_cache, our_embeds, their_logits, their_positions
from tests.model.test_parity import FP32_TOLERANCE
from tests.peft_adapters import make_adapter

gguf = pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "qwen35mm" / "gguf"


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """The dense model beside its vision tower, and one of a model that it isn't."""
    folder = tmp_path / "models"
    shutil.copytree(ggufs.FOLDER, folder)
    shutil.copy(folder / "mmproj-dense.gguf", folder / "mmproj-other.gguf")
    return folder / "dense.gguf"


def numbers_of(folder: Path) -> dict[str, torch.Tensor]:
    sources = read_checkpoint(folder, None).values()
    read = {each.name: [part.clone() for part in each.rows(each.shape[-1], new_buffer())] for each in sources}
    return {each.name: torch.cat(read[each.name]).view(each.shape) for each in sources}


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_weights_are_those_that_were_converted(name: str, dense: Path) -> None:
    spec = ggufs.SPECS[name]
    found = numbers_of(gguf_folder(alone(dense) if spec.moe else dense))
    expected = dict(ggufs.model_of(spec).state_dict())
    for key in [key for key in expected if ".experts." in key]:
        stacked = expected.pop(key)
        prefix, _, last = key.rpartition(".")
        parts = (
            zip(("gate_proj", "up_proj"), stacked.chunk(2, 1), strict=True) if "gate_up" in last else [(last, stacked)]
        )
        expected |= {f"{prefix}.{at}.{part}.weight": each for part, x in parts for at, each in enumerate(x)}
    expected = {key: x for key, x in expected.items() if not (spec.tied and key == "lm_head.weight")}
    if spec.moe:
        expected = {key: x for key, x in expected.items() if ".visual." not in key}
    assert found.keys() == expected.keys()
    for key, x in found.items():
        # float16 has 11 bits, and what is added to norms takes some of float32's.
        is_half = spec.moe or ".visual." in key
        rtol, atol = (1e-3, 1e-5) if is_half else (1e-6, 1e-6)
        torch.testing.assert_close(x, expected[key], rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


def alone(dense: Path) -> Path:
    """The model of experts without any vision tower beside it."""
    path = dense.parent / "alone" / "moe.gguf"
    path.parent.mkdir(exist_ok=True)
    return Path(shutil.copy(dense.with_name("moe.gguf"), path))


def test_tokens_are_those_of_llama_cpp_and_of_the_tokenizer_that_was_converted(dense: Path) -> None:
    ours = Tokenizer.from_pretrained(gguf_folder(dense))
    theirs = tokenizers.Tokenizer.from_file(str(ggufs.SOURCE / "tokenizer.json"))
    assert ours.control_ids == Tokenizer.from_pretrained(ggufs.SOURCE).control_ids
    for answer in json.loads(ggufs.ANSWERS.read_text("utf-8")):
        assert ours.encode_plain(answer["prompt"]) == answer["tokens"] == theirs.encode(answer["prompt"]).ids
    for text in ("e\u0301", "it's  I'LL\r\n\r\n 12 ", "नमस्ते", "\u00a0x", "<tool_call>"):
        assert ours.encode_plain(text) == Tokenizer.from_pretrained(ggufs.SOURCE).encode_plain(text)


@pytest.mark.parametrize(
    ("words", "expected"), [("qwen35", ["e\u0301t", " ज\u0940"]), ("qwen2", ["e", "\u0301t", " ज", "\u0940"])]
)
def test_words_are_cut_as_the_file_says(words: str, expected: list[str], tmp_path: Path) -> None:
    made = writer(tmp_path / "model.gguf", ggufs.FOLDER / "dense.gguf", leave_out="tokenizer.ggml.pre")
    made.add_tokenizer_pre(words)
    made.add_tensor("token_embd.weight", np.zeros((960, 64), np.float32))
    write(made)
    found = tokenizers.Tokenizer.from_file(str(gguf_folder(tmp_path / "model.gguf") / "tokenizer.json"))
    assert found.pre_tokenizer is not None
    text = "".join(expected)
    places = [place for _, place in found.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:stop] for start, stop in places] == expected


def test_its_next_tokens_are_those_of_llama_cpp(dense: Path) -> None:
    with LocalBackend.load(dense, dtype="float32") as model:
        assert model.loaded.name == "dense"
        for answer in json.loads(ggufs.ANSWERS.read_text("utf-8")):
            params = {"temperature": 0.0, "max_tokens": ggufs.NUM_TOKENS, "ignore_eos": True, "repetition_penalty": 1.0}
            result = model.complete(answer["tokens"], params)
            assert list(result.token_ids) == answer["next"]


def test_a_folder_is_made_once_for_a_file_as_it_is(dense: Path, cache: Path) -> None:
    folder = gguf_folder(dense)
    assert gguf_folder(dense) == folder
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert ModelConfig.from_pretrained(folder).tower is not None
    dense.touch()
    assert gguf_folder(dense) != folder
    dense.unlink()
    with pytest.raises(CheckpointError, match=r"dense\.gguf: moved or deleted"):
        read_checkpoint(folder, None)


def writer(path: Path, source: Path, leave_out: str = "", **changes: Any) -> Any:
    """A writer with another file's values, but for one."""
    reader = gguf.GGUFReader(source)
    made = gguf.GGUFWriter(path, changes.pop("arch", "qwen35"), **changes)
    for key, value in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", leave_out):
            made.add_key_value(key, value.contents(), value.types[0], value.types[-1] if len(value.types) > 1 else None)
    return made


def write(made: Any) -> None:
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


def test_the_layer_that_drafts_is_read(tmp_path: Path) -> None:
    """As llama.cpp's converter writes it: one more block, with 1 added to its norms."""
    numbers, path, sizes = np.random.default_rng(0), tmp_path / "model.gguf", {"q": 512, "k": 128, "v": 128}
    shapes = {f"attn_{name}": (rows, 64) for name, rows in sizes.items()}
    shapes |= {"attn_output": (64, 256), "ffn_gate": (128, 64), "ffn_up": (128, 64), "ffn_down": (64, 128)}
    shapes |= {"nextn.eh_proj": (64, 128)} | dict.fromkeys(("attn_q_norm", "attn_k_norm"), (64,))
    norms = ("attn_norm", "post_attention_norm", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    shapes |= dict.fromkeys(norms, (64,))
    tensors = {name: numbers.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    made = writer(path, ggufs.FOLDER / "dense.gguf", "qwen35.block_count")
    made.add_uint32("qwen35.block_count", 3)
    made.add_uint32("qwen35.nextn_predict_layers", 1)
    for name, x in tensors.items():
        made.add_tensor(f"blk.2.{name}.weight", x)
    for tensor in gguf.GGUFReader(ggufs.FOLDER / "dense.gguf").tensors:
        made.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write(made)
    folder = gguf_folder(path)
    config = find_mtp(folder, ModelConfig.from_pretrained(folder))
    assert config.text.runs_mtp
    model = load_model(folder, config, dtype=torch.float32)
    assert model.mtp is not None
    layer = model.mtp.layer
    plain = {"post_attention_layernorm": "post_attention_norm", "input_layernorm": "attn_norm"}
    found = {theirs: getattr(layer, ours).weight for ours, theirs in plain.items()}
    found |= {f"attn_{name}": getattr(layer.attention, name).weight for name in ("q_norm", "k_norm")}
    plain = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
    found |= {f"nextn.{theirs}": getattr(model.mtp, ours).weight for ours, theirs in plain.items()}
    assert all(torch.equal(x, torch.from_numpy(tensors[name] - 1)) for name, x in found.items())
    matrices = {"nextn.eh_proj": model.mtp.fc, "attn_output": layer.attention.o_proj, "ffn_down": layer.mlp.down_proj}
    for name, linear in matrices.items():
        assert torch.equal(linear.weight.rows(torch.arange(64)), torch.from_numpy(tensors[name]))
    merged = np.concatenate([tensors[f"attn_{name}"] for name in sizes])
    rows = layer.attention.qkv_proj.weight.rows(torch.arange(len(merged)))
    assert torch.equal(rows, torch.from_numpy(merged))
    without = load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.float32)
    assert without.mtp is None


def test_quantised_rows_are_those_of_the_library(tmp_path: Path) -> None:
    numbers, path = np.random.default_rng(0), tmp_path / "model.gguf"
    made, rows, stored = writer(path, ggufs.FOLDER / "dense.gguf"), 2 * 2 * 32 + 4 * 32, {}
    for layer, kind in enumerate(name for name in TYPES if name not in ("F32", "F16", "BF16")):
        block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        # Any bytes are numbers, but scales of float16 and e4m3 may be infinite, or none: these are small.
        stored[kind] = numbers.integers(0, 0x38, (rows, 256 // block * num_bytes), dtype=np.uint8)
        raw_dtype = gguf.GGMLQuantizationType[kind]
        made.add_tensor(f"blk.{layer}.attn_qkv.weight", stored[kind], raw_dtype=raw_dtype)
    write(made)
    sources = gguf_sources([GgufFile(path)])
    order, floats = ValueHeads(2, 4, 32, 32).order(32, 128), set()
    for layer, (kind, raw) in enumerate(stored.items()):
        source = sources[f"model.language_model.layers.{layer}.linear_attn.in_proj_qkv.weight"]
        found = torch.cat([part.clone() for part in source.rows(256, new_buffer())]).numpy()
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        assert source.shape == (rows, 256), kind
        assert np.array_equal(found, expected[order]), kind
        if (groups := source.groups) is None:
            floats.add(kind)
            continue
        assert isinstance(groups, Groups)
        held = torch.cat([dequantised(part, groups.width) for part in source.grouped_rows()]).numpy()
        assert np.array_equal(held, expected[order]), kind
    assert floats == {"IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "MXFP4", "NVFP4"}


def quantised(dense: Path, name: str, kind: str) -> Path:
    """A model's file with its matrices in another type, beside the dense one's."""
    path, type = dense.with_name(f"{name}-{kind}.gguf"), gguf.GGMLQuantizationType[kind]
    made = writer(path, ggufs.FOLDER / f"{name}.gguf", arch="qwen35moe" if name == "moe" else "qwen35")
    for tensor in gguf.GGUFReader(ggufs.FOLDER / f"{name}.gguf").tensors:
        data = np.array(tensor.data)
        if data.ndim > 1 and data.shape[-1] % 32 == 0 and "_inp" not in tensor.name and "conv1d" not in tensor.name:
            made.add_tensor(tensor.name, gguf.quants.quantize(data.astype(np.float32), type), raw_dtype=type)
        else:
            made.add_tensor(tensor.name, data)
    write(made)
    return path


@pytest.mark.parametrize(("name", "kind", "bits"), [("dense", "Q8_0", 9), ("moe", "Q4_1", 6)])
def test_a_quantised_model_stays_as_its_file_has_it(name: str, kind: str, bits: int, dense: Path) -> None:
    if find_library() is None:
        pytest.skip("there is no compiled part for this processor")
    path = quantised(dense, name, kind)
    held, exact = load(path, device="cpu"), load(path, device="cpu", dtype="float32")
    assert (held.weights, exact.weights) == ("as stored", "float32")
    parts = {key: x for key, x in held.model.named_modules() if isinstance(x, PackedWeight)}
    groups = {key: x for key, x in parts.items() if isinstance(x.matrix.format, Groups)}
    assert len(groups) >= 8
    formats = {x.matrix.format for x in groups.values()}
    assert [x.bits_per_value for x in formats if isinstance(x, Groups)] == [bits]
    floats = dict(exact.model.named_modules())
    for key, part in groups.items():
        # A weight of one format has one part; floats have none.
        whole, index = floats.get(key.removesuffix(".0")), torch.arange(part.out_features)
        if isinstance(whole, PackedWeight) and whole.out_features == part.out_features:
            assert torch.equal(part.matrix.rows(index, torch.float32), whole.matrix.rows(index, torch.float32))
    stored = read_checkpoint(held.path, None)
    kept, told = loaded_bytes(held.model), weights_bytes(stored, torch.bfloat16, AS_STORED)
    assert told <= kept < 1.1 * told
    # Only rows that are multiplied are rounded, to eight bits.
    x = torch.randn(7, held.config.text.hidden_size, generator=torch.Generator().manual_seed(3))
    for index in range(len(held.model.layers)):
        layers = (loaded.model.get_submodule(f"layers.{index}.mlp") for loaded in (held, exact))
        ours, theirs = (layer(x.to(loaded.model.dtype)) for layer, loaded in zip(layers, (held, exact), strict=True))
        assert 1e-4 < relative_error(ours, theirs) <= 0.03


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_equals_peft_over_the_files_numbers(use_dora: bool, dense: Path, tmp_path: Path) -> None:
    """Merged and apart, and beside the file's own integers."""
    path, folder = quantised(dense, "dense", "Q8_0"), tmp_path / "adapter"
    original = ggufs.model_of(ggufs.SPECS["dense"])
    original.load_state_dict(numbers_of(gguf_folder(path)), strict=False)
    modules = [*TARGETS, "qkv", "linear_fc2"]
    expected = make_adapter(original, folder, target_modules=modules, use_dora=use_dora)
    prompt = make_prompt(TEXT, seed=1)
    # The vocabulary is smaller than that of other tiny models.
    prompt = replace(prompt, token_ids=prompt.token_ids % original.config.text_config.vocab_size)
    logits, positions = their_logits(expected, prompt), their_positions(expected, prompt)[0]

    def found(number: int, **how: Any) -> torch.Tensor:
        model = load(path, device="cpu", **how).model
        groups, cache = model.routes.groups_of([number]), new_cache(model)
        with model.routes.using(groups):
            embeds = our_embeds(model, prompt)
        cache.prepare(len(embeds))
        return model.logits(model(prefill_batch(cache, embeds, positions, groups))).float()

    assert relative_error(found(0, dtype="float32", lora=folder), logits) <= FP32_TOLERANCE
    assert relative_error(found(1, dtype="float32", lora={"own": folder}), logits) <= FP32_TOLERANCE
    assert relative_error(their_logits(original, prompt), logits) > 0.1
    if find_library() is not None:
        # Rows that are multiplied with integers are rounded to eight bits.
        assert relative_error(found(0, lora=folder), logits) < 0.1
        assert relative_error(found(1, lora={"own": folder}), logits) < 0.1


@given(num_keys=st.integers(1, 4), repeats=st.integers(1, 4), width=st.integers(1, 5), before=st.integers(0, 3))
def test_value_heads_come_back_to_their_key_head(num_keys: int, repeats: int, width: int, before: int) -> None:
    # What the converter does to rows: the first value heads of all key heads, then the second ones.
    heads = {(key, repeat): 10 * key + repeat for key in range(num_keys) for repeat in range(repeats)}
    family = [("before", row) for row in range(before)]
    family += [
        (heads[key, repeat], row) for key in range(num_keys) for repeat in range(repeats) for row in range(width)
    ]
    stored = [("before", row) for row in range(before)]
    stored += [
        (heads[key, repeat], row) for repeat in range(repeats) for key in range(num_keys) for row in range(width)
    ]
    order = ValueHeads(num_keys, num_keys * repeats, 1, width).order(width, before)
    assert [stored[at] for at in order] == family


def test_split_files_are_one_model(dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "split"
    folder.mkdir()
    made = writer(folder / "model.gguf", dense, split_max_tensors=10)
    for tensor in gguf.GGUFReader(dense).tensors:
        made.add_tensor(tensor.name, np.array(tensor.data))
    write(made)
    parts = sorted(folder.glob("*.gguf"))
    assert len(parts) > 2
    expected = {key: x for key, x in numbers_of(gguf_folder(dense)).items() if ".visual." not in key}
    found = numbers_of(gguf_folder(parts[0]))
    assert found.keys() == expected.keys()
    assert all(torch.equal(x, expected[key]) for key, x in found.items())
    parts[-1].unlink()
    with pytest.raises(
        CheckpointError, match=rf"{parts[0].name} is one of {len(parts)} files, of which {parts[-1].name}"
    ):
        gguf_folder(parts[0])


def scaled(dense: Path, kind: str, **values: float) -> GgufFile:
    path = dense.with_name(f"scaled-{kind}-{len(values)}.gguf")
    made = writer(path, dense)
    made.add_string("qwen35.rope.scaling.type", kind)
    for key, value in values.items():
        add = made.add_uint32 if isinstance(value, int) else made.add_float32
        add(f"qwen35.rope.scaling.{key}", value)
    write(made)
    return GgufFile(path)


def config_without_tensors(file: GgufFile) -> ModelConfig:
    return ModelConfig.from_dict({**config_of(file, None), "vocab_size": 1000})


def test_more_positions_are_those_of_the_file(dense: Path) -> None:
    plain = config_without_tensors(GgufFile(dense))
    assert config_without_tensors(scaled(dense, "none", factor=4.0)) == plain
    file = scaled(
        *(dense, "yarn"),
        factor=4.0,
        original_context_length=512,
        attn_factor=0.5,
        yarn_beta_fast=8.0,
        yarn_ext_factor=1.0,
    )
    text = config_without_tensors(file).text
    # llama.cpp multiplies by 1 + 0.1 ln(factor) itself.
    attention_factor = 0.5 * (1 + 0.1 * math.log(4))
    assert text.rope.yarn == YarnConfig(4.0, 512, attention_factor, beta_fast=8.0)
    assert text.max_position_embeddings == 2048
    assert config_without_tensors(scaled(dense, "linear", factor=3.0)).text.rope.linear_factor == 3.0
    with pytest.raises(ConfigError, match="rope_type is 'longrope'"):
        config_without_tensors(scaled(dense, "longrope", factor=4.0))
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.yarn_ext_factor is 0\.5, which isn't supported"):
        config_of(scaled(dense, "yarn", factor=4.0, yarn_ext_factor=0.5), None)


def test_sizes_of_pictures_are_those_of_the_file(dense: Path) -> None:
    family = read_processing(gguf_folder(dense))
    made = writer(dense.with_name("mmproj-dense-bounds.gguf"), dense.with_name("mmproj-dense.gguf"), arch="clip")
    made.add_vision_min_pixels(4096)
    made.add_vision_max_pixels(1 << 20)
    for tensor in gguf.GGUFReader(dense.with_name("mmproj-dense.gguf")).tensors:
        made.add_tensor(tensor.name, np.array(tensor.data))
    write(made)
    dense.with_name("mmproj-dense.gguf").unlink()
    image, video = read_processing(gguf_folder(dense))
    assert (image.min_pixels, image.max_pixels) == (4096, 1 << 20)
    assert family[0].max_pixels != 1 << 20
    assert video == family[1]


def damaged_files(dense: Path) -> Iterator[tuple[Path, str]]:
    raw = dense.read_bytes()
    for name, data, said in (
        ("short", raw[:100], "truncated, damaged, or no GGUF file"),
        ("cut", raw[:-1000], "truncated, damaged, or no GGUF file"),
        ("text", b"not a model" * 100, "truncated, damaged, or no GGUF file"),
        ("empty", b"", "truncated, damaged, or no GGUF file"),
    ):
        path = dense.with_name(f"{name}.gguf")
        path.write_bytes(data)
        yield path, said
    other = dense.with_name("other.gguf")
    made = writer(other, dense, arch="llama")
    made.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    write(made)
    yield other, "architecture 'llama'; only qwen35, qwen35moe can be read"


def test_damage_is_told_in_words(dense: Path) -> None:
    for path, said in damaged_files(dense):
        with pytest.raises(CheckpointError, match=said):
            load(path)


def test_without_the_package_the_extra_is_named(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"qwen35mm\[gguf\]"):
        gguf_folder(dense)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_whatever_a_header_says_only_clear_errors_come(name: str, tmp_path: Path, cache: Path) -> None:
    chance, path = random.Random(0), tmp_path / f"{name}.gguf"
    whole = ggufs.RawHeader.read(ggufs.FOLDER / f"{name}.gguf", num_tokens=64)
    data_bytes = (ggufs.FOLDER / f"{name}.gguf").stat().st_size - len(whole.encode())
    num_good = 0
    for turn in range(240):
        raw = bytearray((whole.damaged(chance) if turn % 4 else whole).encode())
        if turn % 4 == 0:
            for _ in range(turn % 3):
                at = chance.randrange(len(raw))
                raw[at : at + chance.choice((1, 8))] = chance.choice((b"\0", b"\xff" * 8, chance.randbytes(8)))
        if turn % 8 == 7:
            del raw[chance.randrange(len(raw)) :]
        with path.open("wb") as file:
            file.write(raw)
            file.truncate(len(raw) + chance.choice((data_bytes, data_bytes, chance.randrange(data_bytes))))
        try:
            folder = gguf_folder(path)
            ModelConfig.from_pretrained(folder)
            Tokenizer.from_pretrained(folder)
            found = {source.place: source for source in read_checkpoint(folder, None).values()}
        except (CheckpointError, ConfigError):
            continue
        num_good += 1
        ends = [start + found[file, start].num_bytes for file, start in sorted(found)]
        starts = [start for _, start in sorted(found)]
        assert all(end <= start for end, start in zip(ends, [*starts[1:], path.stat().st_size], strict=True))
    assert 12 < num_good < 120


@pytest.mark.parametrize(
    ("damaged", "num_turns"),
    [
        ("dense.gguf", 16),
        *(pytest.param(name, 230, marks=pytest.mark.slow) for name in ("dense.gguf", "mmproj-dense.gguf")),
    ],
)
def test_damage_never_runs_as_another_model(damaged: str, num_turns: int, tmp_path: Path, cache: Path) -> None:
    """What can't be noticed: other bytes in the tensors' data, in texts and in settings that change no shape; and types
    whose values take as many bytes, as F16 and BF16."""
    chance = random.Random(damaged)
    for name in ("dense.gguf", "mmproj-dense.gguf"):
        shutil.copy(ggufs.FOLDER / name, tmp_path)
    path = tmp_path / damaged
    raw, start = path.read_bytes(), min(x.stored.start for x in GgufFile(path).tensors.values())
    kinds = {name: tensor.kind for name, tensor in GgufFile(path).tensors.items()}
    expected = load(tmp_path / "dense.gguf", dtype="float32").model.state_dict()
    num_loaded = 0
    for turn in range(num_turns):
        changed = bytearray(raw)
        if turn % 8 == 0:
            del changed[chance.randrange(start if turn % 16 else len(raw)) :]
        else:
            # Half of them where the tensors are described: most of the header is the vocabulary.
            at = chance.randrange(start - 2000 if turn % 2 else 0, start)
            changed[at] ^= chance.randrange(1, 256) if turn % 4 < 2 else 1 << chance.randrange(8)
        path.write_bytes(changed)
        shutil.rmtree(cache, ignore_errors=True)
        with contextlib.suppress(CheckpointError, ConfigError):
            found = load(tmp_path / "dense.gguf", dtype="float32").model.state_dict()
            assert {name: tensor.kind for name, tensor in GgufFile(path).tensors.items()} == kinds
            assert not [name for name, x in expected.items() if not torch.equal(found[name], x)]
            num_loaded += 1
    assert num_loaded > 0
