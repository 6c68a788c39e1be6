"""config.json: what is read, what is refused, and the memory table of the family."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import make_random
from qwen35mm.config import ModelConfig, YarnConfig
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import CheckpointError, ConfigError
from tests.tiny import DENSE, MOE, config_dict

MIB, KIB = 2**20, 2**10
BF16, FP32 = torch.bfloat16, torch.float32


def tiny(moe: bool = False) -> dict[str, Any]:
    return copy.deepcopy({"model_type": "qwen3_5_moe" if moe else "qwen3_5", **config_dict(MOE if moe else DENSE)})


SIZES = {size: ModelConfig.from_dict(make_random.make_config(size, "bfloat16")) for size in make_random.SIZES}


@pytest.mark.parametrize(
    ("size", "kib_per_token"),
    [("0.8B", 12), ("2B", 12), ("4B", 32), ("9B", 32), ("27B", 64), ("35B-A3B", 20)],
)
def test_kv_bytes_per_token(size: str, kib_per_token: int) -> None:
    assert SIZES[size].kv_bytes_per_token(BF16) == kib_per_token * KIB
    assert SIZES[size].kv_bytes_per_token(FP32) == 2 * kib_per_token * KIB


@pytest.mark.parametrize(("size", "mib"), [("0.8B", 18.6), ("2B", 18.6), ("4B", 49.1), ("9B", 49.1), ("27B", 147)])
def test_state_bytes_with_a_bfloat16_conv_state(size: str, mib: float) -> None:
    assert SIZES[size].state_bytes(BF16) / MIB == pytest.approx(mib, abs=0.2 if mib > 100 else 0.05)


def test_state_bytes_as_llama_cpp_reports_them() -> None:
    """Four slots of the 35B-A3B, conv state in fp32."""
    assert 4 * SIZES["35B-A3B"].state_bytes(FP32) / MIB == pytest.approx(251, abs=0.5)


def test_numpy_dtypes_do_as_well() -> None:
    config = SIZES["0.8B"]
    assert config.kv_bytes_per_token(np.dtype("float32")) == config.kv_bytes_per_token(FP32)


def test_values_are_those_of_the_file() -> None:
    config = ModelConfig.from_dict(tiny())
    text = config.text
    assert (text.hidden_size, text.num_layers, text.intermediate_size, text.moe) == (64, 4, 128, None)
    assert (text.attention_layers, text.linear_layers) == ((3,), (0, 1, 2))
    assert (text.rope.theta, text.rope.rotary_dim, text.rope.mrope_section) == (10_000.0, 16, (3, 3, 2))
    assert (text.conv_dim, text.value_dim) == (128, 64)
    assert (config.vision.patch_dim, config.vision.grid_side) == (1536, 6)
    assert (config.image_token_id, config.video_token_id) == (1004, 1005)
    assert config.eos_token_ids == (1001,)
    assert config.tie_word_embeddings


def test_moe_values_are_those_of_the_file() -> None:
    text = ModelConfig.from_dict(tiny(moe=True)).text
    assert text.intermediate_size is None
    assert text.moe is not None
    moe = text.moe
    values = (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size, moe.shared_intermediate_size)
    assert values == (8, 3, 32, 48)


def test_equal_to_what_transformers_saves(tmp_path: Path) -> None:
    from transformers import Qwen3_5Config

    Qwen3_5Config(**config_dict(DENSE)).save_pretrained(tmp_path)
    assert ModelConfig.from_pretrained(tmp_path) == ModelConfig.from_dict(tiny())


def test_the_older_spelling_of_rope() -> None:
    data = tiny()
    rope = data["text_config"].pop("rope_parameters")
    data["text_config"] |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    data["text_config"]["rope_scaling"] = {"type": "mrope", "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    assert ModelConfig.from_dict(data) == ModelConfig.from_dict(tiny())


def test_layers_by_interval() -> None:
    data = tiny()
    del data["text_config"]["layer_types"]
    data["text_config"] |= {"num_hidden_layers": 8, "full_attention_interval": 4}
    assert ModelConfig.from_dict(data).text.attention_layers == (3, 7)


def test_several_eos_ids() -> None:
    data = tiny()
    data["eos_token_id"] = [5, 6]
    data["text_config"]["eos_token_id"] = 6
    assert ModelConfig.from_dict(data).eos_token_ids == (5, 6)
    del data["eos_token_id"], data["text_config"]["eos_token_id"]
    assert ModelConfig.from_dict(data).eos_token_ids == ()


TOP_KEYS = [
    "model_type", "text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id",
]  # fmt: skip
TEXT_KEYS = [
    "vocab_size", "hidden_size", "num_hidden_layers", "layer_types", "num_attention_heads", "num_key_value_heads",
    "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "rms_norm_eps", "max_position_embeddings", "intermediate_size",
]  # fmt: skip
MOE_KEYS = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"]
VISION_KEYS = [
    "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size", "temporal_patch_size",
    "spatial_merge_size", "num_position_embeddings", "out_hidden_size",
]  # fmt: skip


PATHS = [
    *TOP_KEYS,
    *(f"text_config.{key}" for key in TEXT_KEYS + MOE_KEYS),
    *(f"text_config.rope_parameters.{key}" for key in ("rope_theta", "partial_rotary_factor", "mrope_section")),
    *(f"vision_config.{key}" for key in VISION_KEYS),
]


@pytest.mark.parametrize("how", ["missing", "null"])
def test_every_size_and_id_must_be_there(how: str) -> None:
    for path in PATHS:
        *parents, key = path.split(".")
        data = tiny(moe=key in MOE_KEYS)
        section = data
        for parent in parents:
            section = section[parent]
        if how == "missing":
            del section[key]
        else:
            section[key] = None
        with pytest.raises(ConfigError, match=rf"{key} is missing"):
            ModelConfig.from_dict(data)


def test_modelopt_may_say_its_quantisation_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_AWQ"}}))
    found = ModelConfig.from_pretrained(tmp_path).quantization
    assert found == {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json must hold an object with `quantization`"):
        ModelConfig.from_pretrained(tmp_path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json can't be read as JSON"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny() | {"quantization_config": {"quant_method": "fp8"}}))
    assert ModelConfig.from_pretrained(tmp_path).quantization == {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("", {"model_type": "qwen3_vl"}, "model_type is 'qwen3_vl'; supported are qwen3_5, qwen3_5_moe, qwen3_5_text"),
        ("", {"quantization_config": {"quant_method": "quip"}}, r"quantised by 'quip'.* fp8, gptq, .*bf16 checkpoint"),
        ("text_config", {"quantization_config": {}}, "quantised by None"),
        ("", {"quantization_config": "fp8"}, "quantization_config must be an object; got 'fp8'"),
        ("", {"image_token_id": 1024}, "image_token_id is 1024, outside the vocabulary of 1024"),
        ("", {"image_token_id": -1}, "image_token_id must be an integer from 0 to 1099511627776; got -1"),
        ("", {"eos_token_id": "x"}, "eos_token_id holds 'x'"),
        ("", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ("", {"text_config": []}, "text_config must be an object"),
        ("text_config", {"hidden_act": "gelu"}, "text_config.hidden_act is 'gelu'; only 'silu' is supported"),
        (
            "text_config",
            {"hidden_size": "64"},
            "text_config.hidden_size must be an integer from 1 to 1099511627776; got",
        ),
        ("text_config", {"hidden_size": True}, "got True"),
        ("text_config", {"hidden_size": 1 << 41}, "from 1 to 1099511627776; got 2199023255552"),
        ("text_config", {"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
        ("text_config", {"attention_bias": True}, "attention_bias is True; only False"),
        ("text_config", {"attn_output_gate": False}, "attn_output_gate is False; only True"),
        ("text_config", {"norm_topk_prob": False}, "norm_topk_prob is False; only True"),
        ("text_config", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'; only 'float32'"),
        ("text_config", {"mlp_only_layers": [1]}, "mlp_only_layers must be empty"),
        ("text_config", {"layer_types": ["full_attention"]}, "must list 4 layers"),
        ("text_config", {"layer_types": ["sliding_attention"] * 4}, "holds 'sliding_attention'"),
        ("text_config", {"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of"),
        ("text_config", {"linear_num_value_heads": 3}, r"linear_num_value_heads \(3\) must be a multiple of"),
        ("text_config.rope_parameters", {"rope_type": "yarn"}, r"rope_parameters\.factor is missing"),
        ("text_config.rope_parameters", {"rope_type": "linear", "factor": 0.5}, r"factor is 0\.5, which would shrink"),
        (
            "text_config.rope_parameters",
            {"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2},
            r"beta_fast \(1\) must be at least beta_slow \(2\)",
        ),
        ("text_config.rope_parameters", {"mrope_interleaved": False}, "mrope_interleaved is False; only True"),
        ("text_config.rope_parameters", {"mrope_section": [3, 3, 3]}, r"must sum to half.*= 16"),
        ("text_config.rope_parameters", {"mrope_section": [8]}, "must be three positive integers"),
        ("vision_config", {"hidden_act": "relu"}, "vision_config.hidden_act is 'relu'"),
        ("vision_config", {"deepstack_visual_indexes": [2]}, "deepstack_visual_indexes must be empty"),
        ("vision_config", {"out_hidden_size": 65}, r"out_hidden_size \(65\) must equal .*hidden_size \(64\)"),
        ("vision_config", {"num_heads": 5}, "must be a multiple of"),
        ("vision_config", {"num_position_embeddings": 35}, "must be a square; got 35"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type is 'yarn'"),
    ],
)
def test_what_is_not_supported_is_refused_in_words(section: str, change: dict[str, Any], message: str) -> None:
    data = tiny()
    target = data
    for key in filter(None, section.split(".")):
        target = target[key]
    target |= change
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(data)


def test_more_experts_per_token_than_experts() -> None:
    data = tiny(moe=True)
    data["text_config"]["num_experts_per_tok"] = 9
    with pytest.raises(ConfigError, match=r"num_experts_per_tok \(9\) is more than num_experts \(8\)"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read as JSON"),
        ("[]", "must hold a JSON object"),
        pytest.param('{"a":' * 5000, "can't be read as JSON", id="nested"),
        pytest.param('{"a":' + "[" * 900 + "]" * 900 + "}", "can't be read as JSON", id="nested in a value"),
        pytest.param("[" + "0," * 1_000_000 + "0]", "can't be read as JSON", id="many values"),
    ],
)
def test_a_broken_file(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("section", ["text_config", "vision_config"])
def test_any_value_is_an_error_in_words_or_taken(section: str) -> None:
    values = (10**400, -(10**400), 10**19, "x" * 10**6, [None] * 10_000, {"a": 1}, 1e308, None, True)
    for key, value in itertools.product(tiny()[section], values):
        data = tiny()
        data[section][key] = value
        try:
            ModelConfig.from_dict(data)
        except ConfigError as error:
            assert len(str(error)) < 700  # noqa: PT017 - most of them raise


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json in this folder"):
        ModelConfig.from_pretrained(tmp_path)


def test_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    assert ModelConfig.from_pretrained(str(tmp_path)) == ModelConfig.from_dict(tiny())


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def with_rope(key: str = "rope_parameters", **values: Any) -> dict[str, Any]:
    data = tiny()
    rope = data["text_config"]["rope_parameters"]
    data["text_config"][key] = {**rope, **values}
    return data


def test_yarn_has_factor_times_the_original_positions() -> None:
    text = ModelConfig.from_dict(with_rope(**YARN)).text
    assert text.rope.yarn == YarnConfig(4.0, 512, 1 + 0.1 * math.log(4))
    assert text.max_position_embeddings == 2048
    assert EngineSettings().context_length_of(text) == 2048
    with pytest.raises(
        ConfigError, match=r"2,049 tokens was asked for; m has 2,048: YaRN makes 4 times as many of 512"
    ):
        EngineSettings(context_length=2049).context_length_of(text, "m")
    with pytest.raises(ConfigError, match=r"m has 4,096\. YaRN makes more of them: --rope-scaling yarn,factor=3\."):
        EngineSettings(context_length=9000).context_length_of(ModelConfig.from_dict(tiny()).text, "m")


def test_the_option_takes_the_place_of_the_file_s_scaling() -> None:
    """Of the file stay what isn't scaling, and how many positions the model was trained with."""
    with_option = ModelConfig.from_dict(tiny(), rope_scaling="yarn,factor=4, original_max_position_embeddings=512")
    assert with_option == ModelConfig.from_dict(with_rope(**YARN))
    assert ModelConfig.from_dict(tiny(), rope_scaling="yarn,factor=2.5").text.max_position_embeddings == 10_240
    replaced = ModelConfig.from_dict(with_rope(**YARN, beta_fast=8), rope_scaling="yarn,factor=2,truncate=false").text
    assert replaced.rope.yarn == YarnConfig(2.0, 512, 1 + 0.1 * math.log(2), truncate=False)
    assert ModelConfig.from_dict(with_rope(**YARN), rope_scaling="default") == ModelConfig.from_dict(tiny())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("yarn", r"rope_parameters with --rope-scaling: factor is missing"),
        ("yarn,factor=0.5", r"--rope-scaling: factor is 0\.5, which would shrink the context"),
        ("yarn,factor=four", r"takes a number for each of factor, .*; got 'factor=four'"),
        ("yarn,size=4", r"got 'size=4'"),
        ("yarn,factor=true", r"factor must be a number above 0; got True"),
        ("yarn,factor=NaN", r"factor must be a number above 0; got nan"),
        ("linear,factor=4", r"yarn,factor=4, or default for none; 'linear' isn't supported"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(tiny(), rope_scaling=option)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "llama3", "proportional"])
def test_other_scalings_are_refused_by_name(rope_type: str) -> None:
    with pytest.raises(ConfigError, match=rf"rope_type is '{rope_type}'; 'default', 'linear' and 'yarn' are supported"):
        ModelConfig.from_dict(with_rope(rope_type=rope_type, factor=4.0))


def test_scaling_that_transformers_would_read_otherwise_is_refused() -> None:
    """`rope_scaling` takes the place of all of `rope_parameters` there, theta too."""
    data = with_rope(rope_theta=5e6)
    data["text_config"]["rope_scaling"] = {"type": "yarn", "factor": 4.0, "mrope_section": [3, 3, 2]}
    with pytest.raises(ConfigError, match=r"rope_theta is missing, .* whose rope_theta is 5000000\.0: .* 10000\.0"):
        ModelConfig.from_dict(data)
    data = tiny()
    data["rope_scaling"] = {"type": "yarn", "factor": 4.0}
    with pytest.raises(ConfigError, match="rope_scaling must be in text_config"):
        ModelConfig.from_dict(data)
