"""Our model against transformers', on models that can fail: see tests/tiny.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qwen35mm.model.decoder import Qwen35Model
from tests.model.layouts import (
    ALL_LAYOUTS,
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
from tests.tiny import ALL_SPECS, DEEP, DENSE, MOE, MOE_TIED, REAL_HEADS, SHALLOW, TinySpec

Loader = Callable[..., Any]
FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 2e-2


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
def test_logits_equal_transformers(spec: TinySpec, layout: str, ours: Loader, theirs: Loader) -> None:
    prompt = make_prompt(ALL_LAYOUTS[layout])
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
    tokens, logits = our_greedy(ours(spec), prompt, positions, rope_delta, 32)
    expected_tokens, expected_logits = their_greedy(theirs(spec), prompt, 32)
    assert tokens == expected_tokens
    assert relative_error(logits, expected_logits) <= FP32_TOLERANCE
    # A near tie would make the choice a matter of rounding.
    top = expected_logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-4
    # A model that says one word again and again would pass with a wrong cache.
    assert len(set(tokens)) > 8


@pytest.mark.parametrize("spec", [SHALLOW, REAL_HEADS], ids=lambda spec: spec.name)
def test_bfloat16_is_close(spec: TinySpec, ours: Loader, theirs: Loader) -> None:
    """Against transformers in float32 on the same bfloat16 weights: our rounding alone."""
    actual, expected = run_bfloat16(spec, ours, theirs)
    assert relative_error(actual, expected) <= BF16_TOLERANCE


@pytest.mark.parametrize("spec", [DENSE, DEEP, MOE, MOE_TIED], ids=lambda spec: spec.name)
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
