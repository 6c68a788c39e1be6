"""Integer weights on a card: the products of a model's layers, its answers, and a packed checkpoint as it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.contract import SamplingParams
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.model import load
from qwen35mm.model.weight_formats import AS_STORED, CardWeight
from qwen35mm_kernels import cpu
from tests.checkpoints.packers import write_packed
from tests.engine.exact import Chat, cache_settings, results, user
from tests.gpu.test_fp8_on_a_card import greedy
from tests.kernels.compare import relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weights", ["int8", "int4", "awq"])
def test_a_model_is_the_one_that_torchs_products_make(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows as a prefill's piece has, a step of several replies, and of one; then the engine twice."""
    folder = demo_model_path()
    if weights == "awq":
        folder = tmp_path / "awq"
        write_packed("awq", demo_model_path(), folder, lambda name: name.endswith("mlp.down_proj.weight"))
    loaded = load(folder, device="cuda", weights="auto" if weights == "awq" else weights)
    assert loaded.weights == (AS_STORED if weights == "awq" else weights)
    matrices = [module for module in loaded.model.modules() if isinstance(module, CardWeight)]
    assert matrices
    for weight in matrices[:4]:
        how: dict[str, Any] = {"bits": weight.groups.bits, "width": weight.groups.width}
        for num_rows in (1, 3, 9, 70, 300):
            x = torch.randn(num_rows, weight.in_features, device="cuda", dtype=torch.bfloat16)
            expected = cpu.integer_linear(x, weight.words, weight.scales, weight.minima, **how)
            assert relative_error(weight.product(x).cpu(), expected.cpu()) < 1e-2
    found = greedy(loaded.model, 8)
    assert torch.equal(found, greedy(loaded.model, 8))
    request = Chat(loaded).request([user("hello")], params=SamplingParams(temperature=0.0, max_tokens=16))
    settings, cache = EngineSettings(context_length=2048, slots=2), cache_settings(loaded, num_tokens=8192)
    answers = [results(Engine(loaded, settings, cache), request)[request.id].token_ids for _ in range(2)]
    assert answers[0] == answers[1]
    for weight in matrices:
        monkeypatch.setattr(weight, "ops", cpu)
    assert relative_error(found[0], greedy(loaded.model, 8)[0]) < 0.05
