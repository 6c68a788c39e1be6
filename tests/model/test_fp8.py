"""Checkpoints in FP8 that stay FP8: what a card would hold, here with torch's products and with interpreted kernels."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import compute_module_sizes
from safetensors.torch import load_file, save_file

from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.config import ModelConfig, MoEConfig
from qwen35mm.engine import Engine
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm.model import Qwen35Model, load, mlp, weight_formats
from qwen35mm.model import weights as loading
from qwen35mm.model.devices import DeviceMap, DeviceRequest
from qwen35mm.model.load import choose_integers
from qwen35mm.model.weight_formats import (
    FP8,
    ROUNDED_FORMATS,
    CardWeight,
    Factory,
    Fp8Weight,
    PlainWeight,
    StackedWeight,
    StoredWeight,
    Weight,
    new_weight,
)
from qwen35mm.model.weights import check_integers, load_model, loaded_bytes, weights_bytes
from qwen35mm_kernels import reference
from qwen35mm_kernels.cpu.native.products import GroupedRows
from qwen35mm_kernels.reference.fp8 import Blocks
from tests.engine import exact
from tests.engine.exact import SETTINGS, cache_settings, chat_checkpoint
from tests.kernels.compare import relative_error
from tests.model import test_quantised_models
from tests.model.layouts import new_cache
from tests.model.test_quantised_models import MATRIX, SCALE, set_config, write_fp8
from tests.tiny import DENSE, MOE, TinyCheckpoints, TinySpec

BFLOAT16 = torch.bfloat16


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """This processor passes for a card that multiplies eight-bit floats."""
    monkeypatch.setattr(loading, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(loading, "find_library", lambda: None)


@pytest.fixture
def one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's experts lie as they do on a card."""
    monkeypatch.setattr(mlp, "_are_grouped", lambda device: True)
    monkeypatch.setattr(weight_formats, "find_library", lambda: None)


@pytest.fixture(scope="module")
def folders(tiny: TinyCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints as Qwen publishes them, in blocks of 128 x 128."""
    found = {}
    for spec in (DENSE, MOE):
        found[spec.name] = tmp_path_factory.mktemp("fp8") / spec.name
        write_fp8(tiny.folder(spec), found[spec.name], 128)
    return found


def loaded(folder: Path, weights: str = "auto") -> Qwen35Model:
    config = ModelConfig.from_pretrained(folder)
    return load_model(folder, config, dtype=BFLOAT16, integers=choose_integers(weights, BFLOAT16))


def matrices(model: Qwen35Model) -> dict[str, Weight]:
    """The weights of a model that aren't part of another."""
    return {name: x for name, x in model.named_modules() if isinstance(x, Weight) and name.endswith(".weight")}


def logits_of(model: Qwen35Model, token_ids: torch.Tensor) -> torch.Tensor:
    cache = new_cache(model, num_tokens=256)
    cache.prepare(len(token_ids))
    positions = torch.arange(len(token_ids)).expand(3, -1)
    return model.logits(model(prefill_batch(cache, model.embed_tokens(token_ids), positions))).float()


@pytest.mark.usefixtures("card")
def test_own_and_rounded_ones_have_caches_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    write_fp8(chat_checkpoint(exact.DENSE), folder, 128)

    def root(weights: str, kind: str) -> bytes:
        loaded = load(folder, device="cpu", weights=weights)
        assert loaded.weights == kind
        return Engine(loaded, SETTINGS, cache_settings(loaded, directory=tmp_path / "cache")).runtime.root

    assert root("auto", FP8) == root("auto", FP8) != root("fp8", "fp8")


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("spec", [DENSE, MOE], ids=lambda spec: spec.name)
def test_matrices_are_held_as_they_are_stored(
    spec: TinySpec, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Each number that FP8 stands for is the one that bfloat16 is rounded from; what isn't FP8 is bfloat16's."""
    caplog.set_level("INFO", "qwen35mm.model.weights")
    folder = folders[spec.name]
    held = loaded(folder)
    told = re.search(r"kept as stored: (\d+) matrices as FP8, the rest as bfloat16", caplog.messages[-1])
    plain = loaded(folder, "bf16")
    assert held.integers == FP8
    assert plain.integers is None
    ours, theirs = matrices(held), matrices(plain)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        index = torch.arange(weight.out_features)
        assert torch.equal(weight.rows(index), theirs[name].rows(index)), name
    parts = [part for weight in held.modules() if isinstance(weight, StoredWeight) for part in weight.parts]
    assert any(isinstance(part, Fp8Weight) for part in parts)
    stored = read_checkpoint(folder, ModelConfig.from_pretrained(folder).quantization)
    assert told
    assert int(told[1]) == sum(x.kind == "FP8" for x in stored.values())
    # Matrices are tiny: blocks that none fills whole, and padding, cost a little more than their share.
    told_bytes = weights_bytes(stored, BFLOAT16, FP8)
    assert told_bytes <= loaded_bytes(held) < 1.05 * told_bytes
    assert loaded_bytes(held) < loaded_bytes(plain)


@pytest.mark.usefixtures("card")
def test_layers_are_those_of_bfloat16_up_to_the_rounding_of_rows(folders: dict[str, Path]) -> None:
    held, plain = loaded(folders[DENSE.name]), loaded(folders[DENSE.name], "bf16")
    x = torch.randn(7, held.config.text.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    for index in range(len(held.layers)):
        ours, theirs = (model.get_submodule(f"layers.{index}.mlp")(x) for model in (held, plain))
        # e4m3 errs by 1/16 at most, and mostly by less than half of that; with no error nothing was rounded.
        assert 1e-3 < relative_error(ours, theirs) < 0.06


@pytest.mark.slow
@pytest.mark.usefixtures("card", "one_product")
@pytest.mark.parametrize("spec", [DENSE, MOE], ids=lambda spec: spec.name)
def test_the_interpreted_kernels_give_the_same_model(
    spec: TinySpec, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's piece, and one of as few rows as a decode step has."""
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    from qwen35mm_kernels import gpu
    from tests.interpreter import prepare_interpreter

    prepare_interpreter()
    model = loaded(folders[spec.name])
    pieces = torch.arange(3, 24), torch.arange(50, 53)
    expected = [logits_of(model, piece) for piece in pieces]
    for module in model.modules():
        if isinstance(module, Fp8Weight | mlp.Experts):
            monkeypatch.setattr(module, "ops", gpu)
    for piece, logits in zip(pieces, expected, strict=True):
        assert relative_error(logits_of(model, piece), logits) < 1e-2


@pytest.mark.usefixtures("card", "one_product")
@pytest.mark.parametrize("kind", ["each", "stacked", "uneven"])
def test_a_layers_experts_are_one_product_on_a_card(kind: str, tiny: TinyCheckpoints, tmp_path: Path) -> None:
    """Each with tensors of its own, or all as one. One that stayed a float makes its layer's experts floats."""
    folder = tmp_path / "model"
    write_fp8(tiny.folder(MOE), folder, 128, stacked=kind == "stacked")
    if kind == "uneven":
        tensors = load_file(folder / "model.safetensors")
        (name,) = (name for name in tensors if name.endswith(".layers.0.mlp.experts.1.down_proj.weight"))
        tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale_inv")
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    held, plain = loaded(folder), loaded(folder, "bf16")
    stored = read_checkpoint(folder, ModelConfig.from_pretrained(folder).quantization)
    told = weights_bytes(stored, BFLOAT16, FP8)
    assert told <= loaded_bytes(held) < 1.1 * told
    x = torch.randn(7, held.config.text.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    for index in range(len(held.layers)):
        ours, theirs = (model.get_submodule(f"layers.{index}.mlp") for model in (held, plain))
        kept = ours.get_submodule("experts.gate_up_proj.0")
        assert isinstance(kept, PlainWeight if kind == "uneven" and index == 0 else Fp8Weight)
        # The shared expert is FP8 in any case.
        assert 1e-3 < relative_error(ours(x), theirs(x)) < 0.06


@pytest.mark.usefixtures("one_product")
@pytest.mark.parametrize("is_whole", [False, True])
def test_experts_that_fill_blocks_keep_their_scales(is_whole: bool) -> None:
    """A stack's matrices begin blocks of their own; two fill one together only where gate and up do."""
    hidden, config = 128 if is_whole else 200, MoEConfig(3, 2, 64, 64)
    ours, theirs = (
        mlp.Experts(hidden, config, Factory(BFLOAT16, torch.device("cpu"), format), None) for format in (FP8, None)
    )
    for weight, plain in ((ours.gate_up_proj, theirs.gate_up_proj), (ours.down_proj, theirs.down_proj)):
        assert isinstance(weight, StoredWeight)
        each = weight.out_features // 3
        weight.lay_out([(each, Blocks(128))] * 3)
        (part,) = weight.parts
        assert isinstance(part, Fp8Weight)
        assert part.blocks.rows == (128 if each % 128 == 0 else 1)
        for expert in range(3):
            codes = torch.randn(each, weight.in_features).to(torch.float8_e4m3fn)
            blocks = (torch.rand(-(-each // 128), -(-weight.in_features // 128)) + 0.1) / weight.in_features**0.5
            scales = blocks.repeat_interleave(128, 0)[:each]
            part.fill(expert * each, GroupedRows(codes, scales))
            spread = scales.repeat_interleave(128, 1)[:, : weight.in_features]
            plain.fill(expert * each, (codes.float() * spread).bfloat16())
    x = torch.randn(9, hidden).bfloat16()
    chosen, weights = torch.tensor([[0, 2]]).expand(9, 2), torch.rand(9, 2).bfloat16()
    assert 1e-3 < relative_error(ours(x, chosen, weights), theirs(x, chosen, weights)) < 0.06


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("kind", ["row", "tensor"])
def test_scales_of_rows_and_of_a_whole_matrix(kind: str, tiny: TinyCheckpoints, tmp_path: Path) -> None:
    """As compressed-tensors writes them."""
    folder = shutil.copytree(tiny.folder(DENSE), tmp_path / "model")
    tensors = {}
    for name, x in load_file(folder / "model.safetensors").items():
        if test_quantised_models.is_matrix(name):
            scale = x.abs().amax(1, keepdim=True) / 448 if kind == "row" else x.abs().amax().view(1) / 448
            tensors[name], tensors[f"{name}_scale"] = (x / scale).to(torch.float8_e4m3fn), scale
        else:
            tensors[name] = x
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    set_config(folder, {"quant_method": "compressed-tensors", "format": "float-quantized"})
    held, plain = matrices(loaded(folder)), matrices(loaded(folder, "bf16"))
    down = held["layers.0.mlp.down_proj.weight"]
    assert isinstance(down, StoredWeight)
    assert isinstance(down.parts[0], Fp8Weight)
    for name, weight in held.items():
        index = torch.arange(weight.out_features)
        assert torch.equal(weight.rows(index), plain[name].rows(index)), name


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (SCALE, torch.nan, "scales that are not finite"),
        (SCALE, torch.inf, "scales that are not finite"),
        (MATRIX, torch.nan, "values that are not finite"),
    ],
)
def test_what_is_no_number_is_refused(
    name: str, value: float, said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[DENSE.name], tmp_path / "broken")
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[-1:] = torch.tensor([value]).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{MATRIX}.*{said}"):
        loaded(folder)


def test_without_such_a_card_nothing_changes(folders: dict[str, Path]) -> None:
    model = loaded(folders[DENSE.name])
    assert model.integers is None
    assert not any(isinstance(weight, Fp8Weight | StackedWeight) for weight in model.modules())


@pytest.mark.usefixtures("card")
def test_several_cards_are_planned_for_what_fp8_takes(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[int, int]] = []

    def place(name: str, num_bytes: int, num_layers: int, skeleton: Any, request: DeviceRequest) -> DeviceMap:
        planned.append((num_bytes, compute_module_sizes(skeleton())[""]))
        return DeviceMap.on(request.devices[0], num_layers)

    monkeypatch.setattr(loading, "place", place)
    loaded(folders[DENSE.name])
    ((num_bytes, by_modules),) = planned
    assert num_bytes <= by_modules < 1.05 * num_bytes


@pytest.mark.parametrize("counts", [(256, 40), (40, 256), (130, 130)])
def test_matrices_one_under_the_other_keep_their_scales(counts: tuple[int, int]) -> None:
    """Blocks that begin where another matrix ends, between two blocks of the whole."""
    torch.manual_seed(0)
    weight = StoredWeight(sum(counts), 272, Factory(BFLOAT16, torch.device("cpu"), FP8))
    weight.lay_out([(count, Blocks(128)) for count in counts])
    (part,) = weight.parts
    assert isinstance(part, Fp8Weight)
    assert part.blocks.rows == (128 if counts[0] % 128 == 0 else 1)
    expected, first = [], 0
    for count in counts:
        codes = torch.randn(count, 272).to(torch.float8_e4m3fn)
        scales = (torch.rand(-(-count // 128), 3) + 0.1).repeat_interleave(128, 0)[:count]
        expected.append(codes.float() * scales.repeat_interleave(128, 1)[:, :272])
        for start in range(0, count, 100):  # pieces end inside blocks
            some = slice(start, start + 100)
            part.fill(first + start, GroupedRows(codes[some], scales[some]))
        first += count
    x = torch.randn(7, 272).bfloat16()
    values = torch.cat(expected)
    assert torch.equal(weight.rows(torch.arange(sum(counts))), values.bfloat16())
    wanted = reference.fp8_linear(x, part.values, part.scales)
    assert relative_error(weight.product(x), wanted) < 5e-3
    assert relative_error(wanted, (x.float() @ values.T).bfloat16()) < 0.05
    bias = torch.randn(sum(counts)).bfloat16()
    assert relative_error(weight.product(x, bias), wanted + bias) < 5e-3


def test_parts_that_are_not_fp8_stand_apart() -> None:
    weight = StoredWeight(300, 128, Factory(torch.float32, torch.device("meta"), FP8))
    weight.lay_out([(100, Blocks(128)), (100, None), (100, Blocks(1, is_whole=True))])
    assert [type(part) for part in weight.parts] == [Fp8Weight, PlainWeight, Fp8Weight]
    assert weight.parts[2].scales.shape == (100, 1)


def test_rows_are_rounded_as_they_come() -> None:
    values = torch.randn(77, 200).bfloat16() * torch.logspace(-3, 3, 77)[:, None].bfloat16()
    values[5] = 0
    weight = new_weight(77, 200, Factory(BFLOAT16, torch.device("cpu"), "fp8"))
    assert isinstance(weight, Fp8Weight)
    for start, stop in ((0, 50), (50, 77)):
        weight.fill(start, values[start:stop])
    rows = weight.rows(torch.arange(77))
    # Half of a step of three bits at most, of numbers near a group's largest.
    assert ((rows.float() - values.float()).abs() <= values.float().abs().amax(1, keepdim=True) / 16).all()
    assert relative_error(rows, values) < 0.03
    x = torch.randn(9, 200).bfloat16()
    assert relative_error(weight.product(x), reference.fp8_linear(x, weight.values, weight.scales)) < 5e-3
    told = ROUNDED_FORMATS["fp8"] / 8
    assert sum(x.nbytes for x in weight.buffers()) == pytest.approx(77 * 200 * told, rel=0.01)


@pytest.mark.parametrize("spec", [DENSE, MOE], ids=lambda spec: spec.name)
def test_a_checkpoint_of_floats_becomes_fp8_on_a_processor_too(
    spec: TinySpec, tiny: TinyCheckpoints, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.folder(spec)
    ours, theirs = (loaded(folder, weights) for weights in ("fp8", "bf16"))
    assert "fp8 weights are for cards" in caplog.text
    rounded = [name for name, x in matrices(ours).items() if isinstance(x, Fp8Weight)]
    assert len(rounded) > 5
    assert not any("visual" in name or "lm_head" in name for name in rounded)
    x = torch.randn(7, ours.config.text.hidden_size).bfloat16()
    for index in range(len(ours.layers)):
        both = (model.get_submodule(f"layers.{index}.mlp")(x) for model in (ours, theirs))
        assert 1e-3 < relative_error(*both) < 0.08
    assert logits_of(ours, torch.arange(3, 24)).isfinite().all()


def test_a_card_counts_and_holds_fp8_with_experts_of_eight_bits(tiny: TinyCheckpoints) -> None:
    folder = tiny.folder(MOE)
    config, stored = ModelConfig.from_pretrained(folder), read_checkpoint(folder, None)
    model = Qwen35Model(config, dtype=BFLOAT16, device=torch.device("meta"), integers="fp8")
    experts = [x for name, x in model.named_modules() if name.endswith("experts.down_proj")]
    assert experts
    assert all(isinstance(x, CardWeight) and x.groups.bits == 8 for x in experts)
    told = weights_bytes(stored, BFLOAT16, "fp8", [torch.device("cuda", 0)])
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert told <= held < 1.1 * told
    assert told < 1.02 * weights_bytes(stored, BFLOAT16, "int8", [torch.device("cuda", 0)])


def test_a_card_that_does_not_multiply_them_refuses_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [torch.device("cuda", index) for index in range(2)]
    monkeypatch.setattr(loading, "why_not_triton", lambda kind: None)
    monkeypatch.setattr(loading, "multiplies_fp8", lambda device: device.index == 0)
    check_integers("fp8", cards[:1])
    with pytest.raises(ConfigError, match=r"capability 8\.9 or newer; cuda:1 doesn't. Use --weights int8\."):
        check_integers("fp8", cards)
