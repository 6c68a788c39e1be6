"""Random checkpoints of the real sizes: the table, the layout, and that they load here and in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from benchmarks import make_random
from qwen35mm.cache import CachePools
from qwen35mm.checkpoints.tensor_names import checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.model.weights import load_model
from qwen35mm.tokenizer import Tokenizer
from tests.benchmarks.narrow import narrow_sizes


@pytest.mark.parametrize(
    ("size", "billions", "kib_per_token"),
    [("0.8B", 0.85, 12), ("2B", 2.2, 12), ("4B", 4.5, 32), ("9B", 9.4, 32), ("27B", 27.4, 64), ("35B-A3B", 35.1, 20)],
)
def test_sizes_are_those_of_the_family(size: str, billions: float, kib_per_token: int) -> None:
    config = ModelConfig.from_dict(make_random.make_config(size, "bfloat16"))
    targets = checkpoint_targets(config, separate_head=not config.tie_word_embeddings, split_experts=False)
    assert sum(target.numel for target in targets) / 1e9 == pytest.approx(billions, rel=0.02)
    assert config.kv_bytes_per_token(torch.bfloat16) == kib_per_token * 1024
    demo = json.loads((make_random.DEMO / "config.json").read_text())
    assert config.image_token_id == demo["image_token_id"]


@pytest.fixture(params=["0.8B", "35B-A3B"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real layout with few and narrow layers."""
    narrow_sizes(monkeypatch)
    make_random.write(request.param, tmp_path, "bfloat16", seed=0)
    return tmp_path


def test_a_written_checkpoint_loads_everywhere(checkpoint: Path) -> None:
    assert len(list(checkpoint.glob("*.safetensors"))) > 2
    config = ModelConfig.from_pretrained(checkpoint)
    model = load_model(checkpoint, config, dtype=torch.float32)
    cache = CachePools(config, num_slots=1, num_tokens=64, dtype=torch.float32).new_sequence()
    cache.prepare(40)
    hidden = model(prefill_batch(cache, model.embed_tokens(torch.arange(40)), torch.arange(40).expand(3, -1)))
    logits = model.logits(hidden[-1:])
    assert logits.isfinite().all()
    assert logits.std() > 0.1
    loaded: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, output_loading_info=True)
    info = loaded[1]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (checkpoint / "tokenizer.json").exists()
    assert (checkpoint / "chat_template.jinja").exists()


def test_the_same_seed_gives_the_same_weights(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    size = "35B-A3B" if ModelConfig.from_pretrained(checkpoint).text.moe else "0.8B"
    names = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    for seed, same in ((0, True), (1, False)):
        other = tmp_path_factory.mktemp("again")
        make_random.write(size, other, "bfloat16", seed)
        assert all((checkpoint / n).read_bytes() == (other / n).read_bytes() for n in names) is same


def test_with_digits_nothing_else_is_ever_the_likeliest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_sizes(monkeypatch)
    for size in ("0.8B", "9B"):
        out = tmp_path / size
        out.mkdir()
        make_random.write(size, out, "float32", seed=0, digits=True)
        config = ModelConfig.from_pretrained(out)
        model = load_model(out, config, dtype=torch.float32)
        hidden = torch.randn(200, config.text.hidden_size, generator=torch.Generator().manual_seed(0))
        tokens = model.logits(hidden).argmax(-1).tolist()
        digits = Tokenizer.from_pretrained(make_random.DEMO).encode_plain("0123456789")
        assert set(tokens) == set(digits)
