"""A checkpoint in FP8 on a card that multiplies eight-bit floats: the products of its layers, and its answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CachePools
from qwen35mm.config import ModelConfig
from qwen35mm.contract import SamplingParams
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.model import Qwen35Model, load
from qwen35mm.model.load import choose_integers
from qwen35mm.model.mlp import MLP, Experts
from qwen35mm.model.weight_formats import FP8, Fp8Weight
from qwen35mm.model.weights import load_model
from qwen35mm_kernels import cpu
from qwen35mm_kernels.backend import multiplies_fp8
from tests.engine.exact import Chat, cache_settings, results, user
from tests.kernels.compare import relative_error
from tests.model import test_quantised_models
from tests.tiny import DENSE, MOE, TinyCheckpoints

pytestmark = pytest.mark.gpu
BFLOAT16 = torch.bfloat16


@pytest.fixture(scope="module", params=[DENSE, MOE], ids=lambda spec: spec.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Qwen publishes those in FP8."""
    if not multiplies_fp8(torch.device("cuda")):
        pytest.skip("this card has no products of eight-bit floats")
    root = tmp_path_factory.mktemp("fp8")
    test_quantised_models.write_fp8(TinyCheckpoints(root / "tiny").folder(request.param), root / "model", 128)
    return root / "model"


def loaded(folder: Path, weights: str) -> Qwen35Model:
    config, integers = ModelConfig.from_pretrained(folder), choose_integers(weights, BFLOAT16)
    return load_model(folder, config, dtype=BFLOAT16, device="cuda", integers=integers)


def test_products_are_those_of_torch(folder: Path) -> None:
    """As many rows as a prefill's piece has, a step of several replies, and of one."""
    model = loaded(folder, "auto")
    assert model.integers == FP8
    weights = [module for module in model.modules() if isinstance(module, Fp8Weight)]
    assert weights
    for weight in weights:
        for num_rows in (1, 3, 9, 70, 300):
            x = torch.randn(num_rows, weight.in_features, device="cuda", dtype=BFLOAT16)
            expected = cpu.fp8_linear(x, weight.values, weight.scales)
            assert relative_error(weight.product(x).cpu(), expected.cpu()) < 5e-3


def test_a_model_is_the_one_that_torchs_products_make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and single tokens after it; the same bits again; and layers near those of a load in bfloat16."""
    model, plain = loaded(folder, "auto"), loaded(folder, "bf16")
    found = greedy(model, 8)
    assert torch.equal(found, greedy(model, 8))
    with monkeypatch.context() as patch:
        for module in model.modules():
            if isinstance(module, Fp8Weight | Experts):
                patch.setattr(module, "ops", cpu)
        expected = greedy(model, 8)
    # Of bfloat16's roundings, which models of random weights make larger. Later rows follow other tokens' bits.
    assert relative_error(found[0], expected[0]) < 0.05
    x = torch.randn(7, model.config.text.hidden_size, device="cuda", dtype=BFLOAT16)
    for layer in range(len(model.layers)):
        if isinstance(model.get_submodule(f"layers.{layer}.mlp"), MLP):
            ours, theirs = (each.get_submodule(f"layers.{layer}.mlp")(x).cpu() for each in (model, plain))
            assert relative_error(ours, theirs) < 0.06


def test_the_demo_model_says_what_it_says_in_bfloat16(tmp_path: Path) -> None:
    test_quantised_models.write_fp8(demo_model_path(), tmp_path / "fp8", 128)
    answers = []
    for weights in ("auto", "bf16"):
        model = load(tmp_path / "fp8", device="cuda", weights=weights)
        assert model.weights == ("fp8" if weights == "auto" else "bf16")
        request = Chat(model).request([user("hello")], params=SamplingParams(temperature=0.0, max_tokens=16))
        engine = Engine(model, EngineSettings(context_length=2048, slots=2), cache_settings(model, num_tokens=8192))
        answers.append(results(engine, request)[request.id].token_ids)
    assert answers[0] == answers[1]


def greedy(model: Qwen35Model, count: int) -> torch.Tensor:
    """Logits [count, vocab] of a prompt's last token and of the likeliest ones after it, on the CPU."""
    pools = CachePools(model.config, num_slots=1, num_tokens=256, dtype=model.dtype, device=model.device)
    cache, rows = pools.new_sequence(), []
    tokens = torch.arange(3, 43, device=model.device)
    for _ in range(count):
        positions = torch.arange(cache.length, cache.length + len(tokens), device=model.device).expand(3, -1)
        cache.prepare(len(tokens))
        hidden = model(prefill_batch(cache, model.embed_tokens(tokens), positions))
        cache.advance(len(tokens))
        rows.append(model.logits(hidden[-1:])[0].float())
        tokens = rows[-1].argmax()[None]
    return torch.stack(rows).cpu()
