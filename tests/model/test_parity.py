"""Our model against transformers', on models that can fail: see tests/tiny.py."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from qwen35mm.config import ModelConfig
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.weights import load_model
from tests.model.layouts import (
    FOUR_TURNS,
    IMAGES,
    ONE_IMAGE,
    TEXT,
    VIDEO,
    Layout,
    make_prompt,
    new_cache,
    our_greedy,
    our_prefill,
    relative_error,
    their_greedy,
    their_logits,
    their_positions,
)
from tests.tiny import ALL_SPECS, DEEP, DENSE, MOE, MOE_TIED, REAL_HEADS, SHALLOW, TinyCheckpoints, TinySpec

Loader = Callable[..., Any]
FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 2e-2


@pytest.mark.parametrize(
    ("spec", "layout"),
    [(spec, FOUR_TURNS) for spec in ALL_SPECS]
    + [(SHALLOW, TEXT), (MOE_TIED, ONE_IMAGE), (DENSE, IMAGES), (MOE, VIDEO)],
)
def test_logits_equal_transformers(spec: TinySpec, layout: Layout, ours: Loader, theirs: Loader) -> None:
    prompt = make_prompt(layout)
    positions, _ = their_positions(theirs(spec), prompt)
    model: Qwen35Model = ours(spec)
    actual = our_prefill(model, prompt, positions, new_cache(model))
    assert relative_error(actual, their_logits(theirs(spec), prompt)) <= FP32_TOLERANCE


@pytest.mark.parametrize(
    ("spec", "layout"),
    [(DENSE, FOUR_TURNS), (SHALLOW, ONE_IMAGE), (DEEP, TEXT), (MOE, IMAGES), (REAL_HEADS, VIDEO)],
    ids=["dense", "shallow", "deep", "moe", "real-heads"],
)
def test_greedy_tokens_equal_transformers(spec: TinySpec, layout: Layout, ours: Loader, theirs: Loader) -> None:
    prompt = make_prompt(layout, seed=1)
    positions, rope_delta = their_positions(theirs(spec), prompt)
    tokens, logits = our_greedy(ours(spec), prompt, positions, rope_delta, 20)
    expected_tokens, expected_logits = their_greedy(theirs(spec), prompt, 20)
    assert tokens == expected_tokens
    assert relative_error(logits, expected_logits) <= FP32_TOLERANCE
    # A near tie would make the choice a matter of rounding.
    top = expected_logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-4
    # A model that says one word again and again would pass with a wrong cache.
    assert len(set(tokens)) > 8


# What a config.json may say of more positions, each of its keys at least once; the tiny models were made for 48.
ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48},
    "yarn with all settings": {
        **{"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 32, "attention_factor": 0.8},
        **{"beta_fast": 6.0, "beta_slow": 0.5, "truncate": False},
    },
    "yarn with mscale": {
        **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 48},
        **{"mscale": 0.9, "mscale_all_dim": 0.4},
    },
    "yarn without a factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024},
    "linear": {"rope_type": "linear", "factor": 3.0},
}


@pytest.mark.parametrize(
    ("rope", "key"), [(rope, ("rope_parameters", "rope_scaling")[index % 2]) for index, rope in enumerate(ROPES)]
)
def test_more_positions_equal_transformers(rope: str, key: str, tiny: TinyCheckpoints, tmp_path: Path) -> None:
    """Images and a video lie beyond the original positions; `rope_scaling` stands beside `rope_parameters`."""
    folder = shutil.copytree(tiny.folder(SHALLOW), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text[key] = {name: x for name, x in text["rope_parameters"].items() if name != "rope_type"} | ROPES[rope]
    plain = load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.float32)
    (folder / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model = load_model(folder, ModelConfig.from_pretrained(folder), dtype=torch.float32)
    prompt = make_prompt(FOUR_TURNS, seed=2)
    positions, rope_delta = their_positions(theirs, prompt)
    assert positions.max() > 100
    expected = their_logits(theirs, prompt)
    assert relative_error(our_prefill(model, prompt, positions, new_cache(model)), expected) <= FP32_TOLERANCE
    assert relative_error(our_prefill(plain, prompt, positions, new_cache(plain)), expected) > 100 * FP32_TOLERANCE
    tokens, logits = our_greedy(model, prompt, positions, rope_delta, 8)
    expected_tokens, expected_logits = their_greedy(theirs, prompt, 8)
    assert tokens == expected_tokens
    assert relative_error(logits, expected_logits) <= FP32_TOLERANCE


@pytest.mark.parametrize("spec", [SHALLOW, REAL_HEADS], ids=lambda spec: spec.name)
def test_bfloat16_is_close(spec: TinySpec, ours: Loader, theirs: Loader) -> None:
    """Against transformers in float32 on the same bfloat16 weights: our rounding alone."""
    actual, expected = run_bfloat16(spec, ours, theirs)
    assert relative_error(actual, expected) <= BF16_TOLERANCE


@pytest.mark.parametrize("spec", [DEEP, MOE], ids=lambda spec: spec.name)
def test_bfloat16_is_as_close_as_transformers(spec: TinySpec, ours: Loader, theirs: Loader) -> None:
    """Where depth or routing multiplies rounding beyond that, for transformers as well as for us."""
    actual, expected = run_bfloat16(spec, ours, theirs)
    their_bfloat16 = their_logits(theirs(spec, torch.bfloat16), make_prompt(FOUR_TURNS, seed=2))
    assert usual_error(actual, expected) <= 1.25 * usual_error(their_bfloat16, expected)


def usual_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """What nine of ten tokens' relative errors are within: at a few, two experts are even, and rounding chooses."""
    return statistics.quantiles(map(relative_error, actual, expected), n=10)[-1]


def run_bfloat16(spec: TinySpec, ours: Loader, theirs: Loader) -> tuple[torch.Tensor, torch.Tensor]:
    """Our bfloat16 logits, and the exact ones of the same weights."""
    prompt = make_prompt(FOUR_TURNS, seed=2)
    reference = rounded_to_bfloat16(theirs(spec))
    positions, _ = their_positions(reference, prompt)
    model: Qwen35Model = ours(spec, torch.bfloat16)
    return our_prefill(model, prompt, positions, new_cache(model)), their_logits(reference, prompt)


def rounded_to_bfloat16(model: Any) -> Any:
    """A float32 copy whose weights went through bfloat16."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    return copy
