"""Formats of weights: filled in any pieces, multiplied and read as rows, they give what they hold."""

from __future__ import annotations

import pytest
import torch

from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ConfigError
from qwen35mm.model import weight_formats
from qwen35mm.model.load import load
from qwen35mm.model.weight_formats import Factory, PackedWeight, PlainWeight, QuantisedWeight, Weight, new_weight
from qwen35mm.model.weights import load_model, loaded_bytes, weights_bytes
from qwen35mm_kernels.cpu.native.library import find_library
from tests.model.layouts import relative_error
from tests.tiny import DENSE, MOE, TinyCheckpoints, TinySpec

CPU = torch.device("cpu")
# How far the kept values may be from the given ones, of random numbers, and a product beside.
ERRORS = {None: (4e-3, 6e-3), "int8": (6e-3, 1e-2), "int4": (9e-2, 9e-2)}


@pytest.fixture(params=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the compiled part and without."""
    if request.param == "torch":
        monkeypatch.setattr(weight_formats, "find_library", lambda: None)
    elif find_library() is None:
        pytest.skip("there is no compiled part for this processor")
    return request.param == "compiled"


def filled(weight: Weight, values: torch.Tensor, *cuts: int) -> Weight:
    for start, stop in zip((0, *cuts), (*cuts, len(values)), strict=True):
        weight.fill(start, values[start:stop].contiguous())
    return weight


@pytest.mark.parametrize("integers", ERRORS)
@pytest.mark.parametrize(
    ("dtype", "source"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32,) * 2]
)
def test_a_weight_gives_what_it_was_filled_with(
    compiled: bool, integers: str | None, dtype: torch.dtype, source: torch.dtype
) -> None:
    values = torch.randn(77, 72, generator=torch.Generator().manual_seed(0)).to(source)
    weight = filled(new_weight(77, 72, Factory(dtype, CPU, integers)), values, 5, 16, 50)
    expected = PackedWeight if compiled else PlainWeight if integers is None else QuantisedWeight
    assert type(weight) is expected
    kept_limit, product_limit = ERRORS[integers]
    kept = weight.rows(torch.arange(77))
    assert (kept.dtype, kept.shape) == (dtype, (77, 72))
    assert relative_error(kept, values) <= (0 if integers is None and dtype == torch.float32 else kept_limit)
    assert torch.equal(weight.rows(torch.tensor([40, 3, 40])), kept[[40, 3, 40]])
    x, bias = torch.randn(9, 72).to(dtype), torch.randn(77).to(dtype)
    exact = x.double() @ values.double().T + bias.double()
    assert relative_error(weight.product(x, bias), exact) <= product_limit
    wide = torch.full((9, 90), torch.nan, dtype=dtype)
    assert torch.equal(weight.product(x, bias, wide[:, 4:81]), weight.product(x, bias))
    assert wide[:, :4].isnan().all()
    assert wide[:, 81:].isnan().all()


@pytest.mark.parametrize("integers", ["int8", "int4"])
def test_the_last_rows_can_stay_as_they_are(compiled: bool, integers: str) -> None:
    values = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    weight = filled(new_weight(40, 64, Factory(torch.float32, CPU, integers), exact_rows=6), values, 10, 37)
    x = torch.randn(3, 64)
    product, exact = weight.product(x), x @ values.T
    kept = weight.rows(torch.tensor([38, 3, 34]))
    assert torch.equal(kept[[0, 2]], values[[38, 34]])
    assert 1e-4 < relative_error(kept[1], values[3]) <= 0.1
    assert relative_error(product[:, 34:], exact[:, 34:]) <= 1e-6
    assert 1e-4 < relative_error(product[:, :34], exact[:, :34]) <= 0.1


@pytest.mark.parametrize("integers", ["int8", "int4"])
def test_both_ways_to_quantise_are_equally_good(integers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_library() is None:
        pytest.skip("there is no compiled part for this processor")
    values = torch.randn(64, 320, generator=torch.Generator().manual_seed(2))
    factory = Factory(torch.float32, CPU, integers)
    ours = filled(new_weight(64, 320, factory), values).rows(torch.arange(64))
    monkeypatch.setattr(weight_formats, "find_library", lambda: None)
    theirs = filled(new_weight(64, 320, factory), values).rows(torch.arange(64))
    assert relative_error(ours, values) == pytest.approx(relative_error(theirs, values), rel=0.01)


@pytest.mark.parametrize(("spec", "weights", "limit"), [(DENSE, "int4", 0.2), (MOE, "int8", 0.02)])
def test_a_quantised_model_is_close_to_the_exact_one(
    compiled: bool, spec: TinySpec, weights: str, limit: float, tiny: TinyCheckpoints
) -> None:
    folder = tiny.folder(spec)
    config = ModelConfig.from_pretrained(folder)
    exact = load_model(folder, config, dtype=torch.float32)
    model = load_model(folder, config, dtype=torch.float32, integers=weights)
    x = torch.randn(7, config.text.hidden_size, generator=torch.Generator().manual_seed(3))
    for index in range(len(exact.layers)):
        mlp = f"layers.{index}.mlp"
        error = relative_error(model.get_submodule(mlp)(x), exact.get_submodule(mlp)(x))
        assert 1e-5 < error <= limit
    assert relative_error(model.logits(x), exact.logits(x)) <= 0.02


@pytest.mark.parametrize("spec", [DENSE, MOE], ids=lambda spec: spec.name)
@pytest.mark.parametrize("integers", [None, "int8", "int4"])
def test_the_bytes_are_those_that_loading_takes(spec: TinySpec, integers: str | None, tiny: TinyCheckpoints) -> None:
    folder = tiny.folder(spec)
    model = load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.bfloat16, integers=integers)
    kept = loaded_bytes(model)
    expected = weights_bytes(read_checkpoint(folder, None), torch.bfloat16, integers)
    # Rows of small matrices are padded to blocks of 16, and a model has tables of angles beside.
    assert expected <= kept < 1.05 * expected


def test_what_cannot_be_had_is_refused(tiny: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="weights must be auto, bf16, int8, int4 or fp8; got 'int3'"):
        load(tiny.folder(DENSE), weights="int3")
    with pytest.raises(ConfigError, match="bf16 weights need --dtype bfloat16"):
        load(tiny.folder(DENSE), dtype="float32", weights="bf16")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = ModelConfig.from_pretrained(tiny.folder(DENSE))
    monkeypatch.setattr("qwen35mm.model.weights.why_not_triton", lambda kind: "Triton isn't installed")
    with pytest.raises(ConfigError, match=r"int4 weights need Triton's kernels on cuda\. Triton isn't installed"):
        load_model(tiny.folder(DENSE), config, dtype=torch.bfloat16, device="cuda", integers="int4")
