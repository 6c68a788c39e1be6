"""The layer of multi-token prediction: its arithmetic, its loading from every format, and models without it."""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CachePools
from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.tensor_names import MTP_PREFIX
from qwen35mm.config import ModelConfig
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.model import LoadedModel, Qwen35Model, load, mtp
from qwen35mm.model.mtp import MultiTokenPrediction
from qwen35mm.model.weight_formats import AS_STORED, PackedWeight, StackedWeight, Weight
from qwen35mm.model.weights import find_mtp, load_model, loaded_bytes, weights_bytes
from qwen35mm.model.weights_cache import WeightsCache
from qwen35mm_kernels.cpu.native.library import find_library
from tests.checkpoints import packers
from tests.tiny import DENSE, MOE, TinyCheckpoints, TinySpec

Tensors = dict[str, torch.Tensor]

needs_library = pytest.mark.skipif(find_library() is None, reason="integers as stored are for the compiled part")


def demo_tensors() -> Tensors:
    return load_file(demo_model_path() / "model.safetensors")


def with_mtp(source: Path, folder: Path, tensors: Tensors, **text: Any) -> Path:
    """A copy of a checkpoint with other tensors, which announces an MTP layer."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    quantization = text.pop("quantization_config", None)
    config["text_config"] |= {"mtp_num_hidden_layers": 1, **text}
    config |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def layer_of(model: Qwen35Model) -> MultiTokenPrediction:
    assert model.mtp is not None
    return model.mtp


def values(module: Any) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, Weight)
    return weight.rows(torch.arange(weight.out_features))


def read(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Qwen35Model:
    config = find_mtp(folder, ModelConfig.from_pretrained(folder))
    return load_model(folder, config, dtype=dtype, **options)


class Oracle:
    """The layer in plain torch, float32, over a whole sequence."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.text, self.rope = loaded.config.text, loaded.model.rope
        self.weights = {name.removeprefix(MTP_PREFIX): x.float() for name, x in demo_tensors().items()}

    def __call__(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, hidden] each, and [3, T]; returns the layer's outputs, [T, hidden]."""
        text, layer = self.text, "layers.0.self_attn."
        joined = [self._norm(embeds, "pre_fc_norm_embedding"), self._norm(hidden, "pre_fc_norm_hidden")]
        x = self._linear(torch.cat(joined, dim=-1), "fc")
        y = self._norm(x, "layers.0.input_layernorm")
        q, gate = self._linear(y, f"{layer}q_proj").view(len(y), -1, 2 * text.head_dim).chunk(2, dim=-1)
        k, v = (self._linear(y, f"{layer}{name}").view(len(y), -1, text.head_dim) for name in ("k_proj", "v_proj"))
        q, k = (self._turn(self._norm(z, f"{layer}{name}"), positions) for z, name in ((q, "q_norm"), (k, "k_norm")))
        k, v = (z.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for z in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * text.head_dim**-0.5
        scores = scores.masked_fill(torch.ones(len(y), len(y), dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(dim=-1), v) * torch.sigmoid(gate)
        x = x + self._linear(mixed.flatten(1), f"{layer}o_proj")
        y = self._norm(x, "layers.0.post_attention_layernorm")
        inner = F.silu(self._linear(y, "layers.0.mlp.gate_proj")) * self._linear(y, "layers.0.mlp.up_proj")
        return self._norm(x + self._linear(inner, "layers.0.mlp.down_proj"), "norm")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        size = x.pow(2).mean(-1, keepdim=True) + self.text.rms_norm_eps
        return x * size.rsqrt() * (1 + self.weights[f"{name}.weight"])

    def _turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = (each[:, None] for each in self.rope(positions))
        one, two, rest = x.tensor_split([cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], dim=-1)


@torch.inference_mode()
def last_outputs(loaded: LoadedModel, embeds: torch.Tensor, hidden: torch.Tensor, stops: list[int]) -> torch.Tensor:
    """The layer's outputs at the places before `stops` of one sequence, as drafts compute them: [stops, hidden]."""
    model, num_tokens = loaded.model, len(embeds)
    pools = CachePools(loaded.config, num_slots=1, num_tokens=num_tokens, dtype=model.dtype, device=model.layer_devices)
    cache = pools.new_sequence()
    cache.prepare(num_tokens)
    positions = torch.arange(num_tokens).expand(3, -1).contiguous()
    batch = prefill_batch(cache, embeds, positions)
    written = stops[0] - 1
    model.write_mtp(prefill_batch(cache, embeds[:written], positions[:, :written]), hidden[:written])
    rows = slice(written, stops[-1])
    step = replace(
        batch,
        embeds=embeds[rows],
        positions=positions[:, rows],
        slot_mapping=batch.slot_mapping[rows],
        block_table=batch.block_table.expand(len(stops), -1).contiguous(),
        lengths=torch.tensor(stops, dtype=torch.int32),
        slots=torch.zeros(0, dtype=torch.int64),
        counts=None,
    )
    last = torch.tensor(stops) - stops[0]
    return layer_of(model)(hidden[rows], model.rope(positions[:, rows]), step, last)


def test_it_computes_what_plain_torch_does() -> None:
    loaded = load(demo_model_path(), dtype="float32", device="cpu", mtp=True)
    model = loaded.model
    embeds = model.embed_tokens(torch.arange(150) * 7 % 1200)
    hidden = torch.randn(150, embeds.shape[1])
    hidden[0] = 0
    expected = Oracle(loaded)(embeds, hidden, torch.arange(150).expand(3, -1))
    stops = [120, 123, 150]
    found = last_outputs(loaded, embeds, hidden, stops)
    assert torch.allclose(found, expected[torch.tensor(stops) - 1], atol=2e-4)
    assert torch.equal(model.drafts(found), model.logits(expected[torch.tensor(stops) - 1]).argmax(-1))


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_the_formats_agree(weights: str) -> None:
    exact = load(demo_model_path(), device="cpu", mtp=True, dtype="float32")
    loaded = load(demo_model_path(), device="cpu", mtp=True, weights=weights)
    embeds = exact.model.embed_tokens(torch.arange(80) * 7 % 1200)
    hidden = torch.randn(80, embeds.shape[1])
    expected = last_outputs(exact, embeds, hidden, [70, 80])
    found = last_outputs(loaded, embeds.bfloat16(), hidden.bfloat16(), [70, 80]).float()
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < {"bf16": 0.02, "int8": 0.03, "int4": 0.3}[weights]


@pytest.mark.parametrize("method", packers.METHODS)
def test_quantised_matrices_are_read(method: str, tmp_path: Path) -> None:
    tensors, expected, quantization = demo_tensors(), {}, {}
    names = ("mtp.fc.weight", "mtp.layers.0.self_attn.k_proj.weight", "mtp.layers.0.self_attn.v_proj.weight")
    for at, name in enumerate(names):
        packed = packers.METHODS[method](packers.Chance(at), *tensors.pop(name).shape)
        module, quantization = name.removesuffix("weight"), packed.quantization
        tensors |= {f"{module}{end}": x for end, x in packed.tensors.items()}
        expected[name] = packed.expected
    folder = with_mtp(demo_model_path(), tmp_path / "model", tensors, quantization_config=quantization)
    layer = layer_of(read(folder))
    fc, *keys_and_values = expected.values()
    assert torch.equal(values(layer.fc), fc)
    q = tensors["mtp.layers.0.self_attn.q_proj.weight"].float()
    assert torch.equal(values(layer.layer.attention.qkv_proj), torch.cat([q, *keys_and_values]))


@needs_library
def test_a_checkpoint_s_integers_stay_as_they_are(tmp_path: Path) -> None:
    tensors, name = demo_tensors(), "mtp.fc.weight"
    packed = packers.METHODS["gptq"](packers.Chance(0), *tensors.pop(name).shape)
    tensors |= {f"mtp.fc.{end}": x for end, x in packed.tensors.items()}
    folder = with_mtp(demo_model_path(), tmp_path / "model", tensors, quantization_config=packed.quantization)
    model = read(folder, torch.bfloat16, integers=AS_STORED)
    weight = layer_of(model).fc.weight
    assert isinstance(weight, StackedWeight)
    assert isinstance(weight.parts[0], PackedWeight)
    assert torch.equal(values(layer_of(model).fc), packed.expected.bfloat16())


def tiny_mtp(spec: TinySpec, source: Path, *, split: bool = False) -> Tensors:
    """Random tensors of an MTP layer for a tiny checkpoint, like those of its own full-attention layer."""
    tensors = load_file(source / "model.safetensors")
    like = f"model.language_model.layers.{spec.interval - 1}."
    hidden = len(tensors["model.language_model.norm.weight"])
    shapes: dict[str, tuple[int, ...]] = {
        name.replace(like, "mtp.layers.0."): x.shape for name, x in tensors.items() if name.startswith(like)
    }
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    shapes["mtp.fc.weight"] = hidden, 2 * hidden
    made = {name: torch.randn(shape) / 8 for name, shape in shapes.items()}
    for name in [each for each in made if split and re.search(r"experts\.(gate_up|down)_proj$", each)]:
        prefix, stacked = name.rpartition(".")[0], made.pop(name)
        for expert, matrix in enumerate(stacked):
            parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            for part, half in parts if "gate_up" in name else [("down_proj", matrix)]:
                made[f"{prefix}.{expert}.{part}.weight"] = half
    return {**tensors, **made}


def test_a_mixture_s_layer_is_one_too(tiny: TinyCheckpoints, tmp_path: Path) -> None:
    """Whether its experts are stacked or apart, whatever the other layers' are."""
    source, models = tiny.folder(MOE), []
    for name, split in (("fused", False), ("split", True)):
        torch.manual_seed(3)
        models.append(read(with_mtp(source, tmp_path / name, tiny_mtp(MOE, source, split=split))))
    one, two = (model.state_dict() for model in models)
    assert any("mtp.layer.mlp.experts" in name for name in one)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("what", ["announced", "not announced", "a part", "another shape", "two layers"])
def test_a_model_without_a_whole_layer_works_as_before(
    what: str, tiny: TinyCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny.folder(DENSE)
    tensors, announced = tiny_mtp(DENSE, source), {"not announced": 0, "two layers": 2}.get(what, 1)
    if what == "announced":
        tensors = {name: x for name, x in tensors.items() if not name.startswith(MTP_PREFIX)}
    elif what == "a part":
        del tensors["mtp.layers.0.self_attn.o_proj.weight"]
    elif what == "another shape":
        tensors["mtp.fc.weight"] = torch.zeros(3)
    folder = with_mtp(source, tmp_path / "model", tensors, mtp_num_hidden_layers=announced)
    with caplog.at_level(logging.INFO):
        model = read(folder)
    assert model.mtp is None
    assert model.config.text.attention_layers == (3,)
    assert ("No tokens are drafted" in caplog.text) == (announced == 1)
    ours, others = model.state_dict(), read(source).state_dict()
    assert ours.keys() == others.keys()
    assert all(torch.equal(ours[name], others[name]) for name in ours)


def test_it_is_loaded_only_where_it_is_asked_for() -> None:
    without, with_it = (load(demo_model_path(), device="cpu", mtp=asked) for asked in (False, True))
    assert without.model.mtp is None
    assert not any(MTP_PREFIX in name for name in without.model.state_dict())
    names = {name for name in with_it.model.state_dict() if MTP_PREFIX in name}
    assert with_it.model.state_dict().keys() - names == without.model.state_dict().keys()
    assert with_it.config.text.attention_layers == (3, 7, 8)
    assert without.config.text.attention_layers == (3, 7)


@pytest.mark.parametrize("most", [mtp.MOST_DRAFT_IDS, 512], ids=["whole head", "cut head"])
@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_the_bytes_are_those_that_loading_takes(format: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "MOST_DRAFT_IDS", most)
    folder, integers = demo_model_path(), None if format == "bf16" else format
    models = [load(folder, device="cpu", weights=format, mtp=asked).model for asked in (False, True)]
    planned = [
        weights_bytes(read_checkpoint(folder, None, with_mtp=asked), torch.bfloat16, integers)
        for asked in (False, True)
    ]
    assert loaded_bytes(models[1]) - loaded_bytes(models[0]) == planned[1] - planned[0]


def test_drafts_come_from_the_most_frequent_rows() -> None:
    loaded = load(demo_model_path(), device="cpu", mtp=True)
    model, hidden = loaded.model, torch.randn(200, loaded.config.text.hidden_size).bfloat16()
    whole = model.drafts(hidden)
    ids = torch.tensor(loaded.tokenizer.frequent_ids(400))
    layer_of(model).cut_head(model.head, ids, model.integers)
    found = model.drafts(hidden)
    assert set(found.tolist()) <= set(ids.tolist())
    kept = torch.isin(whole, ids)
    assert 0 < kept.sum() < 200
    assert (found == whole)[kept].float().mean() > 0.95, "eight bits choose another token now and then"


def test_packed_weights_tell_models_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = WeightsCache(tmp_path, 1 << 30)
    first = [load(demo_model_path(), device="cpu", weights="int4", weights_cache=cache, mtp=x) for x in (False, True)]
    if find_library() is not None:
        assert len(list((tmp_path / "packed").iterdir())) == 2
    second = load(demo_model_path(), device="cpu", weights="int4", weights_cache=cache, mtp=True)
    one, two = first[1].model.state_dict(), second.model.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_its_keys_and_values_are_one_more_layer_s() -> None:
    config = ModelConfig.from_pretrained(demo_model_path())
    assert config.text.num_mtp_layers == 1
    assert config.with_mtp().kv_bytes_per_token(torch.bfloat16) * 2 == config.kv_bytes_per_token(torch.bfloat16) * 3
    assert config.with_mtp().state_bytes(torch.bfloat16) == config.state_bytes(torch.bfloat16)
    pools = CachePools(config.with_mtp(), num_slots=1, num_tokens=64, dtype=torch.bfloat16)
    assert set(pools.layers) == set(range(9))
    assert pools.kv.token_bytes == config.with_mtp().kv_bytes_per_token(torch.bfloat16)
