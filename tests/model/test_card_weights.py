"""Integer weights as a card holds them, here with torch's products; `tests/engine/test_triton_path.py` runs a model of
them on the interpreted kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ConfigError
from qwen35mm.model import Qwen35Model, mlp, weight_formats
from qwen35mm.model import weights as loading
from qwen35mm.model.weight_formats import (
    AS_STORED,
    FP8,
    CardWeight,
    Factory,
    PlainWeight,
    QuantisedWeight,
    StoredWeight,
    Weight,
    new_weight,
)
from qwen35mm.model.weights import as_stored, check_integers, load_model, loaded_bytes, weights_bytes
from qwen35mm.model.weights_cache import WeightsCache
from qwen35mm_kernels import reference
from qwen35mm_kernels.cpu.native.products import GroupedRows, Groups
from tests.checkpoints import ggufs
from tests.checkpoints.packers import write_packed
from tests.kernels.compare import dequantised, relative_error
from tests.model.test_quantised_models import write_fp8
from tests.tiny import DENSE, MOE, TinyCheckpoints

CPU, CARD, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """This processor passes for a card that has kernels for integers."""
    monkeypatch.setattr(weight_formats, "find_library", lambda: None)
    monkeypatch.setattr(weight_formats, "QuantisedWeight", CardWeight)
    monkeypatch.setattr(loading, "find_library", lambda: None)
    monkeypatch.setattr(loading, "multiplies_integers", lambda device: True)


def is_matrix(name: str) -> bool:
    return "language_model" in name and "_proj.weight" in name


def matrices(model: Qwen35Model) -> dict[str, Weight]:
    return {name: x for name, x in model.named_modules() if isinstance(x, Weight) and name.endswith(".weight")}


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_rounded_for_a_card_is_what_is_rounded_without(bits: int, card: None) -> None:
    values = torch.randn(77, 72).bfloat16()
    factory = Factory(torch.bfloat16, CPU, f"int{bits}")
    ours, theirs = new_weight(77, 72, factory), QuantisedWeight(77, 72, factory)
    assert isinstance(ours, CardWeight)
    for start, stop in ((0, 50), (50, 77)):
        ours.fill(start, values[start:stop])
        theirs.fill(start, values[start:stop])
    rows = ours.rows(torch.arange(77))
    assert torch.equal(rows, theirs.rows(torch.arange(77)))
    assert relative_error(rows, values) < (6e-3 if bits == 8 else 9e-2)
    x, bias, wide = torch.randn(9, 72).bfloat16(), torch.randn(77).bfloat16(), torch.zeros(9, 90).bfloat16()
    expected = x.float() @ rows.float().T
    assert relative_error(ours.product(x), expected.bfloat16()) < 5e-3
    assert torch.equal(ours.product(x, bias, wide[:, 4:81]), wide[:, 4:81])
    assert relative_error(wide[:, 4:81], (expected + bias).bfloat16()) < 5e-3
    assert not wide[:, :4].any()
    assert not wide[:, 81:].any()


@pytest.mark.parametrize(
    "groups", [Groups(4, 32, has_minima=True), Groups(8, 16), Groups(4, 128), Groups(8, 128, has_minima=True)], ids=str
)
def test_a_checkpoints_integers_are_held_as_they_are(groups: Groups, card: None) -> None:
    least = -128 if groups.bits == 8 else 0 if groups.has_minima else -8
    integers = torch.randint(least, least + (1 << groups.bits), (50, 128)).to(torch.int8)
    sizes = 50, 128 // groups.width
    rows = GroupedRows(integers, torch.rand(sizes) + 0.1, torch.randn(sizes) if groups.has_minima else None)
    weight = StoredWeight(60, 128, Factory(torch.float32, CPU, AS_STORED))
    weight.lay_out([(50, groups), (10, None)])
    held, plain = weight.parts
    assert isinstance(held, CardWeight)
    assert isinstance(plain, PlainWeight)
    weight.fill(0, rows[:30])
    weight.fill(30, rows[30:])
    values = dequantised(rows, groups.width)
    assert relative_error(held.rows(torch.arange(50)), values) < 1e-6
    x = torch.randn(3, 128)
    how: dict[str, Any] = {"bits": groups.bits, "width": groups.width}
    assert (
        relative_error(held.product(x), reference.integer_linear(x, held.words, held.scales, held.minima, **how)) < 1e-6
    )
    # In float32 as the planner counts it.
    assert 8 * sum(x.nbytes for x in held.buffers()) == 50 * 128 * groups.bits_per_value


@pytest.mark.parametrize("integers", ["int8", "int4"])
def test_a_model_takes_what_is_told_and_keeps_none_of_it_on_disk(
    integers: str, card: None, tiny: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder(DENSE)
    model = load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.bfloat16, integers=integers)
    assert sum(isinstance(x, CardWeight) for x in model.modules()) > 10
    told = weights_bytes(read_checkpoint(folder, None), torch.bfloat16, integers, [CARD])
    assert told <= loaded_bytes(model) < 1.05 * told
    # A cache is a processor's.
    monkeypatch.setattr(loading, "_on_cards", lambda devices: True)
    monkeypatch.setattr(WeightsCache, "find", lambda *arguments: pytest.fail("asked for the weights on disk"))
    cache = WeightsCache(tmp_path, 1 << 30)
    load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.bfloat16, integers=integers, cache=cache)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_packed_checkpoint_is_held_as_it_is_stored(method: str, card: None, tmp_path: Path) -> None:
    ggufs.write_checkpoint(ggufs.DENSE, tmp_path / "plain")
    folder = tmp_path / method
    write_packed(method, tmp_path / "plain", folder, is_matrix)
    config = ModelConfig.from_pretrained(folder)
    held, plain = (
        load_model(folder, config, dtype=torch.bfloat16, integers=integers) for integers in (AS_STORED, None)
    )
    assert held.integers == AS_STORED
    theirs = matrices(plain)
    assert sum(isinstance(x, CardWeight) for x in held.modules()) > 5
    for name, weight in matrices(held).items():
        index = torch.arange(weight.out_features)
        assert relative_error(weight.rows(index), theirs[name].rows(index)) < 5e-3, name
    stored = read_checkpoint(folder, config.quantization)
    told = weights_bytes(stored, torch.bfloat16, AS_STORED, [CARD])
    assert told <= loaded_bytes(held) < 1.1 * told
    assert told < weights_bytes(stored, torch.bfloat16, None, [CARD])


@pytest.mark.parametrize("integers", ["int8", "int4"])
def test_the_experts_of_a_mixture_are_integers_and_are_counted_so(integers: str, tiny: TinyCheckpoints) -> None:
    folder = tiny.folder(MOE)
    config, stored = ModelConfig.from_pretrained(folder), read_checkpoint(folder, None)
    model = Qwen35Model(config, dtype=torch.bfloat16, device=META, integers=integers)
    experts = [x for name, x in model.named_modules() if name.endswith("experts.gate_up_proj")]
    assert experts
    assert all(isinstance(x, CardWeight) for x in experts)
    told = weights_bytes(stored, torch.bfloat16, integers, [CARD])
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert told <= held < 1.05 * told
    assert told == weights_bytes(stored, torch.bfloat16, integers, [CPU])


@pytest.mark.parametrize("uneven", [False, True])
def test_a_packed_mixture_keeps_experts_of_one_format(
    uneven: bool, card: None, tiny: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert that stayed a float makes its layer's experts floats: a card multiplies all of them at once."""
    folder = tmp_path / "awq"

    def is_packed(name: str) -> bool:
        return ".experts." in name and not (uneven and ".layers.0." in name and ".experts.1.down_proj" in name)

    write_packed("awq", tiny.folder(MOE), folder, is_packed)
    monkeypatch.setattr(loading, "_on_cards", lambda devices: True)
    monkeypatch.setattr(mlp, "_are_grouped", lambda device: True)
    config = ModelConfig.from_pretrained(folder)
    held, plain = (
        load_model(folder, config, dtype=torch.bfloat16, integers=integers) for integers in (AS_STORED, None)
    )
    stored = read_checkpoint(folder, config.quantization)
    told = weights_bytes(stored, torch.bfloat16, AS_STORED, [CARD])
    assert told <= loaded_bytes(held) < 1.1 * told
    x = torch.randn(9, config.text.hidden_size).bfloat16()
    for index in range(config.text.num_layers):
        ours, theirs = (model.get_submodule(f"layers.{index}.mlp") for model in (held, plain))
        kept = ours.get_submodule("experts.gate_up_proj.0")
        assert isinstance(kept, PlainWeight if uneven and index == 0 else CardWeight)
        assert relative_error(ours(x), theirs(x)) < 1e-2


def test_a_card_holds_what_it_has_kernels_for(
    tiny: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 where it multiplies it, integers with Triton, and else bfloat16."""
    ggufs.write_checkpoint(ggufs.DENSE, tmp_path / "plain")
    write_packed("awq", tmp_path / "plain", tmp_path / "awq", is_matrix)
    write_fp8(tiny.folder(DENSE), tmp_path / "fp8", 128)
    stored = {
        name: read_checkpoint(tmp_path / name, ModelConfig.from_pretrained(tmp_path / name).quantization)
        for name in ("awq", "fp8")
    }

    def found(name: str) -> str | None:
        return as_stored(stored[name], torch.bfloat16, [CARD, torch.device("cuda", 1)])

    monkeypatch.setattr(loading, "multiplies_integers", lambda device: True)
    monkeypatch.setattr(loading, "multiplies_fp8", lambda device: False)
    assert (found("awq"), found("fp8")) == (AS_STORED, None)
    monkeypatch.setattr(loading, "multiplies_fp8", lambda device: True)
    assert (found("awq"), found("fp8")) == (AS_STORED, FP8)
    monkeypatch.setattr(loading, "multiplies_integers", lambda device: False)
    assert (found("awq"), found("fp8")) == (None, FP8)


def test_without_kernels_integers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "why_not_triton", lambda kind: None)
    check_integers("int8", [CARD, CPU])
    monkeypatch.setattr(loading, "why_not_triton", lambda kind: "Triton isn't installed: `pip install triton`")
    check_integers("int8", [CPU])
    check_integers(None, [CARD])
    said = r"int8 weights need Triton's kernels on cuda. Triton isn't installed.*--device cpu or --weights bf16\."
    with pytest.raises(ConfigError, match=said):
        check_integers("int8", [CPU, CARD])
