"""The mixture of experts against transformers' block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen35mm.config import ModelConfig
from qwen35mm.model import mlp, weight_formats
from qwen35mm.model.weight_formats import CardWeight
from qwen35mm.model.weights import load_model, loaded_bytes
from tests.model.layouts import relative_error
from tests.tiny import MOE, TinyCheckpoints

Loader = Callable[..., Any]


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 200])
def test_output_equals_transformers(num_tokens: int, ours: Loader, theirs: Loader) -> None:
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(num_tokens))
    with torch.no_grad():
        expected = theirs(MOE).model.language_model.layers[0].mlp(x[None])[0]
    assert relative_error(ours(MOE).layers[0].mlp(x), expected) <= 1e-6


def test_a_token_does_not_depend_on_its_company(ours: Loader) -> None:
    block = ours(MOE).layers[0].mlp
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([block(row[None]) for row in x])
    assert relative_error(block(x), alone) <= 1e-6
    assert relative_error(block(x.flip(0)).flip(0), alone) <= 1e-6


@pytest.mark.parametrize(("shared_width", "is_joined"), [(32, True), (48, False)])
def test_on_a_card_the_shared_expert_is_one_of_the_others_where_it_is_as_wide(
    shared_width: int, is_joined: bool, tiny: TinyCheckpoints, theirs: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(MOE, name=f"shared-{shared_width}", shared_width=shared_width)
    folder = tiny.folder(spec)
    config = ModelConfig.from_pretrained(folder)
    monkeypatch.setattr(weight_formats, "find_library", lambda: None)
    plain = load_model(folder, config, dtype=torch.float32)
    monkeypatch.setattr(mlp, "why_not_triton", lambda device_type: None)
    model = load_model(folder, config, dtype=torch.float32)
    assert loaded_bytes(model) == loaded_bytes(plain)
    block: Any = model.layers[0].mlp
    calls: list[object] = []
    block.shared_expert.register_forward_hook(lambda *arguments: calls.append(arguments))
    x = torch.randn(63, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(spec).model.language_model.layers[0].mlp(x[None])[0]
    assert relative_error(block(x), expected) <= 1e-6
    assert bool(calls) != is_joined


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_shared_expert_of_integers_is_one_of_the_others_too(
    weights: str, tiny: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.folder(replace(MOE, name="shared-32", shared_width=32))
    config = ModelConfig.from_pretrained(folder)
    monkeypatch.setattr(weight_formats, "find_library", lambda: None)
    apart = load_model(folder, config, dtype=torch.float32, integers=weights)
    monkeypatch.setattr(weight_formats, "QuantisedWeight", CardWeight)
    for name, passes in (("why_not_triton", None), ("_are_grouped", True)):
        monkeypatch.setattr(mlp, name, lambda device, passes=passes: passes)
    model = load_model(folder, config, dtype=torch.float32, integers=weights)
    assert loaded_bytes(model) == loaded_bytes(apart)
    x = torch.randn(63, 64, generator=torch.Generator().manual_seed(0))
    for index in range(config.text.num_layers):
        ours, theirs = (each.get_submodule(f"layers.{index}.mlp") for each in (model, apart))
        assert isinstance(ours, mlp.SparseMoE)
        assert ours.is_joined
        assert relative_error(ours(x), theirs(x)) <= 1e-5
