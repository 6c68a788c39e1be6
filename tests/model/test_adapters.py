"""Adapters merged while weights are read, against PEFT over transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen35mm.assets import demo_model_path
from qwen35mm.checkpoints.adapters import AdaptedSource, Change, with_adapters
from qwen35mm.checkpoints.lora_choices import LoraChoice, read_choices
from qwen35mm.checkpoints.peft_folders import read_adapter
from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD
from qwen35mm.config import ModelConfig
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm.model import load, weights
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.weight_formats import AS_STORED
from qwen35mm.model.weights import load_model, loaded_bytes, weights_bytes
from qwen35mm_kernels.cpu.native.library import find_library
from tests.checkpoints import packers
from tests.model.layouts import (
    IMAGES,
    TEXT,
    make_prompt,
    new_cache,
    our_embeds,
    our_greedy,
    our_prefill,
    relative_error,
    their_greedy,
    their_logits,
    their_positions,
)
from tests.model.test_parity import FP32_TOLERANCE
from tests.model.test_quantised_models import is_matrix
from tests.peft_adapters import make_adapter
from tests.small_adapters import PREFIX, write_adapter
from tests.tiny import DENSE, MOE, SHALLOW, TinyCheckpoints, TinySpec

Loader = Callable[..., Any]
TEXT_LINEARS = ["q_proj", "v_proj", "in_proj_qkv", "in_proj_b", "up_proj", "down_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "every linear": {"target_modules": "all-linear"},
    "a list": {"target_modules": TEXT_LINEARS, "exclude_modules": ["layers.1.mlp.up_proj"]},
    "a pattern": {"target_modules": r".*language_model.*\.(k_proj|o_proj|in_proj_z|in_proj_a|out_proj|gate_proj)"},
    "the tower": {"target_modules": r".*visual.*\.(qkv|proj|linear_fc1|linear_fc2)", "bias": "lora_only"},
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "dora": {"target_modules": [*TEXT_LINEARS, "qkv", "linear_fc2"], "use_dora": True},
    "ranks by module": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, r"layers\.0\.mlp\.\w+": 7},
        "alpha_pattern": {"q_proj": 9, r"model\.visual\..*": 3, "^model.language_model.layers.1.mlp.up_proj": 1.5},
    },
    "some layers": {"target_modules": TEXT_LINEARS, "layers_to_transform": [0, 3], "layers_pattern": "layers"},
    "whole tensors": {"target_modules": ["down_proj"], "modules_to_save": ["norm", "merger.linear_fc2", "lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens", "v_proj"]},
    "whole embeddings": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
}


def loaded_with(
    folder: Path, *choices: LoraChoice, dtype: torch.dtype = torch.float32, integers: str | None = None
) -> Qwen35Model:
    adapters = [read_adapter(each) for each in choices]
    config = ModelConfig.from_pretrained(folder)
    return load_model(folder, config, dtype=dtype, integers=integers, adapters=adapters)


def loaded_beside(folder: Path, *adapters: Path) -> Qwen35Model:
    """The adapters stay apart, as those of requests that choose one."""
    named = [read_adapter(LoraChoice(each)) for each in adapters]
    return load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.float32, named=named)


def logits_with(model: Qwen35Model, number: int, prompt: Any, theirs: Any) -> torch.Tensor:
    """Logits [T, vocab] of a prefill whose rows have an adapter."""
    groups, cache = model.routes.groups_of([number]), new_cache(model)
    with model.routes.using(groups):
        embeds = our_embeds(model, prompt)
    cache.prepare(len(embeds))
    return model.logits(model(prefill_batch(cache, embeds, their_positions(theirs, prompt)[0], groups)))


def our_logits(model: Qwen35Model, prompt: Any, theirs: Any) -> torch.Tensor:
    return our_prefill(model, prompt, their_positions(theirs, prompt)[0], new_cache(model))


@pytest.mark.parametrize(
    ("spec", "options"),
    [pytest.param(DENSE, each, id=name) for name, each in OPTIONS.items()]
    + [
        pytest.param(SHALLOW, OPTIONS["every linear"] | {"modules_to_save": ["lm_head"]}, id="own head"),
        pytest.param(MOE, OPTIONS["every linear"], id="shared expert"),
        pytest.param(
            MOE,
            {
                "target_modules": ["q_proj", "shared_expert_gate"],
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            },
            id="experts",
        ),
    ],
)
def test_logits_equal_peft(
    spec: TinySpec, options: dict[str, Any], tiny: TinyCheckpoints, theirs: Loader, tmp_path: Path
) -> None:
    expected = make_adapter(theirs(spec), tmp_path, **options)
    model, prompt = loaded_with(tiny.folder(spec), LoraChoice(tmp_path)), make_prompt(IMAGES)
    logits = their_logits(expected, prompt)
    assert relative_error(our_logits(model, prompt, expected), logits) <= FP32_TOLERANCE
    # An adapter that changed nothing would pass without being read.
    assert relative_error(their_logits(theirs(spec), prompt), logits) > 0.05


APART = ["every linear", "a pattern", "rslora", "dora", "ranks by module"]


@pytest.mark.parametrize(
    ("spec", "options"),
    [pytest.param(DENSE, OPTIONS[name], id=name) for name in APART]
    + [
        pytest.param(DENSE, OPTIONS["the tower"] | {"bias": "none", "use_dora": True}, id="the tower"),
        pytest.param(MOE, OPTIONS["every linear"], id="shared expert"),
    ],
)
def test_apart_from_the_weights_logits_equal_peft(
    spec: TinySpec, options: dict[str, Any], tiny: TinyCheckpoints, theirs: Loader, tmp_path: Path
) -> None:
    make_adapter(theirs(spec), tmp_path / "other", 1, **OPTIONS["a list"])
    expected = make_adapter(theirs(spec), tmp_path / "own", **options)
    model, prompt = loaded_beside(tiny.folder(spec), tmp_path / "other", tmp_path / "own"), make_prompt(IMAGES)
    logits = logits_with(model, 2, prompt, expected)
    assert relative_error(logits, their_logits(expected, prompt)) <= FP32_TOLERANCE
    # Without an adapter it is the model as it was, to the bit.
    plain = our_logits(loaded_with(tiny.folder(spec)), prompt, expected)
    assert torch.equal(logits_with(model, 0, prompt, expected), plain)
    assert relative_error(plain, logits) > 0.05


def test_what_lies_beside_the_weights_is_counted_before(tiny: TinyCheckpoints, theirs: Loader, tmp_path: Path) -> None:
    """Also what a quantised checkpoint couldn't take up, which each named adapter repeats."""
    for seed in (0, 1):
        # A factor of DoRA also has the rows of the matrices beside it.
        make_adapter(theirs(DENSE), tmp_path / str(seed), seed, r=16, use_dora=seed == 0, **OPTIONS["a list"])
    packers.write_packed("gptq", tiny.folder(DENSE), tmp_path / "model", is_matrix)
    choices = [LoraChoice(tmp_path / str(seed)) for seed in (0, 1)]
    merged, named = (read_adapter(each) for each in choices)
    for folder, dtype, integers in (
        (tiny.folder(DENSE), torch.float32, None),
        (tmp_path / "model", torch.bfloat16, AS_STORED),
    ):
        config = ModelConfig.from_pretrained(folder)
        stored = read_checkpoint(folder, config.quantization)
        for adapters in ([], [merged]):
            shapes = with_adapters(stored, adapters) if adapters else stored
            told = [weights_bytes(shapes, dtype, integers, (), each) for each in ([], [named])]
            how: dict[str, Any] = {"dtype": dtype, "integers": integers, "adapters": adapters}
            held = [loaded_bytes(load_model(folder, config, **how, named=each)) for each in ([], [named])]
            # Of one module, small ranks are padded together.
            least = 0.5 if adapters and integers else 0.98
            assert least <= (held[1] - held[0]) / (told[1] - told[0]) <= 1.01
            assert told[1] - told[0] > 50_000


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_a_quantised_checkpoint_keeps_its_numbers(method: str, tiny: TinyCheckpoints, tmp_path: Path) -> None:
    """What can be kept as integers stays so, with the change beside it; the rest takes it up."""
    packers.write_packed(method, tiny.folder(DENSE), tmp_path / "model", is_matrix)
    modules = {"layers.3.self_attn.k_proj": (128, 64), "layers.0.linear_attn.in_proj_z": (64, 64)}
    choice = LoraChoice(write_adapter(tmp_path / "adapter", modules), 0.5)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "integers": AS_STORED}
    plain, adapted = loaded_with(tmp_path / "model", **how), loaded_with(tmp_path / "model", choice, **how)
    is_kept = method == "gptq" and find_library() is not None
    assert (0 in adapted.routes.numbers) is is_kept
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for module, rows in {
        "layers.3.self_attn.qkv_proj": (512, 640, "layers.3.self_attn.k_proj"),
        "layers.0.linear_attn.in_proj": (128, 192, "layers.0.linear_attn.in_proj_z"),
    }.items():
        start, stop, name = rows
        with adapted.routes.using(adapted.routes.groups_of([0])):
            changed = adapted.get_submodule(module)(x) - plain.get_submodule(module)(x)
        up, down = (tensors[f"{PREFIX}{name}.lora_{side}.weight"] for side in "BA")
        expected = torch.zeros(changed.shape)
        expected[:, start:stop] = 0.5 * (x.float() @ down.T @ up.T)
        assert relative_error(changed.float(), expected) < 0.1, module
    if is_kept:
        own = {name: tensor for name, tensor in adapted.state_dict().items() if ".adapters." not in name}
        assert all(torch.equal(tensor, own[name]) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize("name", ["whole tensors", "embeddings", "the tower"])
def test_what_only_a_merge_can_do_is_refused_apart(
    name: str, tiny: TinyCheckpoints, theirs: Loader, tmp_path: Path
) -> None:
    make_adapter(theirs(DENSE), tmp_path, **OPTIONS[name])
    with pytest.raises(CheckpointError, match=r"an adapter can only change linear layers. Name its folder alone"):
        loaded_beside(tiny.folder(DENSE), tmp_path)


def test_greedy_tokens_equal_peft(tiny: TinyCheckpoints, theirs: Loader, tmp_path: Path) -> None:
    expected = make_adapter(theirs(DENSE), tmp_path, **OPTIONS["every linear"])
    prompt = make_prompt(TEXT, seed=1)
    positions, rope_delta = their_positions(expected, prompt)
    tokens, logits = our_greedy(
        loaded_with(tiny.folder(DENSE), LoraChoice(tmp_path)), prompt, positions, rope_delta, 20
    )
    expected_tokens, expected_logits = their_greedy(expected, prompt, 20)
    assert tokens == expected_tokens
    assert relative_error(logits, expected_logits) <= FP32_TOLERANCE
    assert tokens != their_greedy(theirs(DENSE), prompt, 20)[0]


def test_several_are_added_up_and_taken_in_part(tiny: TinyCheckpoints, theirs: Loader, tmp_path: Path) -> None:
    """Each as a change of the original weights, DoRA too."""
    original = theirs(DENSE).state_dict()
    kinds = {"lora": OPTIONS["every linear"], "dora": OPTIONS["dora"], "whole": OPTIONS["whole tensors"]}
    expected = {name: tensor.double() for name, tensor in original.items()}
    choices = []
    for seed, (kind, scale) in enumerate(zip(kinds, (0.5, -1.0, 0.25), strict=True)):
        made = make_adapter(theirs(DENSE), tmp_path / kind, seed, **kinds[kind])
        choices.append(LoraChoice(tmp_path / kind, scale))
        for name, tensor in merged(made).items():
            expected[name] = expected[name] + scale * (tensor.double() - original[name].double())
    model = loaded_with(tiny.folder(DENSE), *choices)
    folder = tmp_path / "expected"
    folder.mkdir()
    config = json.loads((tiny.folder(DENSE) / "config.json").read_text())
    untied = {"tie_word_embeddings": False}
    config = config | untied | {"text_config": config["text_config"] | untied}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.float().contiguous() for name, tensor in expected.items()}, folder / "model.safetensors")
    by_hand = load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.float32)
    prompt = make_prompt(IMAGES)
    logits = [our_logits(each, prompt, theirs(DENSE)) for each in (model, by_hand)]
    assert relative_error(*logits) <= FP32_TOLERANCE


def merged(adapted: Any) -> dict[str, torch.Tensor]:
    """A model's tensors with its adapter, by their original names."""
    for module in adapted.modules():
        if hasattr(module, "get_base_layer") and hasattr(module, "merge"):
            module.merge()
    found = {}
    for name, tensor in adapted.state_dict().items():
        if ".original_module." not in name and "lora_" not in name:
            found[name.replace(".base_layer", "").replace(".modules_to_save.default", "")] = tensor
    return found


@pytest.mark.parametrize("integers", [None, "int8", "int4"])
def test_a_format_is_made_of_the_merged_weights(
    integers: str | None, tiny: TinyCheckpoints, theirs: Loader, tmp_path: Path
) -> None:
    made = make_adapter(theirs(DENSE), tmp_path / "adapter", **OPTIONS["every linear"])
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny.folder(DENSE) / "config.json").read_bytes())
    tensors = merged(made)
    del tensors["lm_head.weight"]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    how: dict[str, Any] = {"dtype": torch.bfloat16, "integers": integers}
    ours = loaded_with(tiny.folder(DENSE), LoraChoice(tmp_path / "adapter"), **how).state_dict()
    expected = load_model(folder, ModelConfig.from_pretrained(folder), **how).state_dict()
    # The sums differ in float32's last bits, which seldom reach the rounded values.
    for name, tensor in expected.items():
        assert int((ours[name] != tensor).sum()) <= 0.01 * tensor.numel(), name


def test_an_adapter_may_have_other_names(tiny: TinyCheckpoints, theirs: Loader, tmp_path: Path) -> None:
    expected = make_adapter(theirs(DENSE), tmp_path, target_modules=TEXT_LINEARS)
    tensors, prompt = load_file(tmp_path / "adapter_model.safetensors"), make_prompt(TEXT)
    logits = their_logits(expected, prompt)
    for old, new in {
        "model.language_model.layers": "model.layers",  # the text-only class
        "model.layers": "language_model.model.layers",  # earlier multimodal classes, and vLLM
        "base_model.model.language_model": "language_model",  # saved without PEFT's prefix
        ".lora_A.weight": ".lora_A.default.weight",  # a training's own file
    }.items():
        assert any(old in name for name in tensors)
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        model = loaded_with(tiny.folder(DENSE), LoraChoice(tmp_path))
        assert relative_error(our_logits(model, prompt, expected), logits) <= FP32_TOLERANCE, new


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder with a LoRA of two modules of the tiny model, for damages."""
    modules = {"layers.3.self_attn.q_proj": (512, 64), "layers.3.mlp.down_proj": (64, 128)}
    return write_adapter(tmp_path / "adapter", modules)


Q_PROJ = f"{PREFIX}layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q_PROJ}.lora_B.weight": None}, r"layers.3.self_attn.q_proj has no lora_B. The file is incomplete"),
        ({f"{Q_PROJ}.lora_A.weight": (3, 64)}, r"q_proj.lora_A.weight is \[3, 64\], rank 3, and .* says rank 2"),
        ({f"{Q_PROJ}.lora_A.weight": (2, 32)}, r"lora_A.weight is \[2, 32\], where \[2, 64\] is expected.*org/base"),
        ({f"{Q_PROJ}.lora_B.weight": (512, 3)}, r"lora_B.weight is \[512, 3\], where \[512, 2\] is expected"),
        ({f"{Q_PROJ}.lora_B.bias": (512,)}, r"q_proj.lora_B.bias is no part of a LoRA that can be used.*lora_bias"),
        ({f"{Q_PROJ}.lora_magnitude_vector": (512,)}, r"q_proj has lora_magnitude_vector, which .* doesn't say"),
        ({f"{Q_PROJ}.lora_A.default.weight": (2, 64)}, r"q_proj.lora_A.* change the same tensor. Save one adapter"),
        (
            {f"base_model.model.model.layers.9.mlp.up_proj.lora_{side}.weight": shape for side, shape in
             {"A": (2, 64), "B": (128, 2)}.items()},
            r"layers.9.mlp.up_proj.lora_A.weight changes .*layers.9.mlp.up_proj.weight, which this model doesn't have",
        ),
        ({"base_model.model.transformer.h.0.attn.lora_A.weight": (2, 64)}, r"transformer.h.0.* names no part of a"),
        ({"base_model.model.model.norm.weight": (32,)}, r"norm.weight is \[32\], where \[64\] is expected"),
        ({"base_model.model.model.visual.blocks.7.norm1.bias": (64,)}, r"takes the place of .*visual.blocks.7.norm1"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    changes: dict[str, tuple[int, ...] | None], message: str, adapter: Path, tiny: TinyCheckpoints
) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, shape in changes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.ones(shape)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=f"The adapter adapter: .*{message}"):
        loaded_with(tiny.folder(DENSE), LoraChoice(adapter))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type 'IA3', where 'LORA' is expected.*merge_and_unload"),
        ({"r": 0}, r"gives r the rank 0"),
        ({"lora_alpha": None}, r"lora_alpha None, where a number is expected"),
        ({"rank_pattern": {"q_proj": "8"}}, r"rank_pattern gives 'q_proj' '8'"),
        ({"lora_alpha": 10**400}, r"lora_alpha 1000"),
        ({"rank_pattern": {"(.|.)*!": 2}}, r"could take minutes to match"),
        ({"alpha_pattern": {"(": 8}}, r"alpha_pattern has '\(', which is no pattern"),
        ({"use_dora": True}, r"layers.3.* has no lora_magnitude_vector"),
        ({"init_lora_weights": "pissa_niter_4"}, r"'pissa_niter_4', so it fits a changed model.*path_initial_model"),
        ({"use_qalora": True}, r"use_qalora is set: it sums groups of inputs first"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices is set: it changes single tokens"),
    ],
)
def test_other_kinds_of_adapters_are_refused(changes: dict[str, Any], message: str, adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=f"The adapter adapter: .*{message}"):
        read_adapter(LoraChoice(adapter))


def test_folders_that_hold_no_adapter_are_refused(adapter: Path, tiny: TinyCheckpoints) -> None:
    for folder, message in (
        (adapter / "none", "There is no adapter folder 'none'"),
        (adapter.parent, "no adapter_config.json. Adapters are in its folders adapter"),
        (tiny.folder(DENSE), "holds a whole model, no adapter"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_adapter(LoraChoice(folder))
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated, cutting off"):
        read_adapter(LoraChoice(adapter))
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="Git leaves in the place of a large file"):
        read_adapter(LoraChoice(adapter))
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors: get the whole folder"):
        read_adapter(LoraChoice(adapter))
    (adapter / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"adapter_model.bin, a pickle.*save_pretrained"):
        read_adapter(LoraChoice(adapter))


def test_numbers_that_are_not_finite_are_refused(adapter: Path, tiny: TinyCheckpoints) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[f"{Q_PROJ}.lora_B.weight"][7, 1] = torch.inf
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.3.*q_proj.weight with the adapter adapter holds .* not finite"):
        loaded_with(tiny.folder(DENSE), LoraChoice(adapter))


def test_two_whole_tensors_in_one_place_are_refused(adapter: Path, tiny: TinyCheckpoints, tmp_path: Path) -> None:
    tensors = {f"{PREFIX}norm.weight": torch.zeros(64)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    shutil.copytree(adapter, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"other: .*norm.weight is a whole tensor in it and in adapter"):
        loaded_with(tiny.folder(DENSE), LoraChoice(adapter), LoraChoice(tmp_path / "other"))


def test_choices_are_read(tmp_path: Path) -> None:
    (folder := tmp_path / "r=8").mkdir()
    assert read_choices([str(folder), f"a={folder}"]) == (LoraChoice(folder), LoraChoice(folder, 1, "a"))
    assert read_choices(None) == ()
    assert read_choices("./a/b") == (LoraChoice(Path("a/b")),)
    assert read_choices(["a=0.5", Path("b=c"), LoraChoice(Path("d"), 2)]) == (
        LoraChoice(Path("a"), 0.5),
        LoraChoice(Path("b=c")),
        LoraChoice(Path("d"), 2),
    )
    # Of the Hub, where there is no such folder.
    named = (LoraChoice("a/b", 1, "poet"), LoraChoice(Path("c"), -2, "x"))
    assert read_choices(["poet=a/b", "x=c=-2"]) == read_choices({"poet": "a/b", "x": "c=-2"}) == named
    assert list(map(str, (LoraChoice(Path("a"), 0.5), *named))) == ["a=0.5", "poet=a/b", "x=c=-2"]
    assert [each.absolute().source for each in named] == ["a/b", Path("c").absolute()]
    # As vLLM takes them.
    assert read_choices('{"name": "poet", "path": "a/b", "base_model_name": "m"}') == named[:1]
    for wrong in ("", "=1", "a=nan", "a=1e39", "a=", 3, "{", '{"name": "a"}', '{"name": 1, "path": "b"}'):
        with pytest.raises(ConfigError, match="An adapter is FOLDER or NAME=FOLDER"):
            read_choices([wrong])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="no spaces; got 'a poet'"):
        read_choices("a poet=folder")
    with pytest.raises(ConfigError, match="Two adapters have the name 'a'"):
        read_choices(["a=b", "a=c"])


def test_a_folder_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert read_choices("a/b=2") == (LoraChoice(Path("a/b"), 2),)


def test_a_folder_may_have_the_mark_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "r=8"
    folder.mkdir()
    assert read_choices(str(folder)) == (LoraChoice(folder),)
    assert read_choices(f"{folder}=2") == (LoraChoice(folder, 2),)


def test_files_that_are_replaced_while_they_are_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fill = write_adapter(tmp_path / "adapter"), weights._fill

    def replaced(*args: Any) -> set[str]:
        held = fill(*args)
        (folder / "adapter_model.safetensors").touch()
        return held

    monkeypatch.setattr(weights, "_fill", replaced)
    with pytest.raises(CheckpointError, match=r"adapter: its files were replaced while they were read. Start again"):
        load(demo_model_path(), lora=folder)


@pytest.mark.parametrize("name", [EMBEDDING, LM_HEAD, "a.experts.up_proj"])
def test_what_only_a_merge_can_change_loses_a_checkpoints_integers(name: str, tmp_path: Path) -> None:
    adapter = read_adapter(LoraChoice(write_adapter(tmp_path / "adapter")))
    low_rank = next(iter(adapter.low_rank.values()))[0]
    base = cast(Any, SimpleNamespace(groups="integers"))

    def adapted(name: str) -> AdaptedSource:
        return AdaptedSource(name, (2, 2), cast(Any, None), base, (Change(adapter, low_rank),), cast(Any, None))

    assert adapted(name).groups is None
    assert adapted("a.q_proj.weight").groups == "integers"
