"""Each of these breaks the model in a way that was seen in the wild; the parity tests' comparison must notice.

Were one of them not noticed, a test elsewhere that passes would mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qwen35mm.cache import SequenceCache
from qwen35mm.model.decoder import Qwen35Model
from tests.model.layouts import (
    FOUR_TURNS,
    Prompt,
    make_prompt,
    new_cache,
    our_decode,
    our_greedy,
    our_prefill,
    our_prefill_of,
    relative_error,
    their_greedy,
    their_logits,
    their_positions,
)
from tests.model.test_parity import FP32_TOLERANCE
from tests.tiny import ALL_SPECS, DENSE, MOE, REAL_HEADS, TinySpec

Loader = Callable[..., Any]
# Far beyond rounding: the mutation itself is seen, not noise.
NOTICED = 100 * FP32_TOLERANCE
SPECS = pytest.mark.parametrize("spec", [MOE, REAL_HEADS], ids=lambda spec: spec.name)


def zero_recurrent_states(model: Qwen35Model, cache: SequenceCache) -> None:
    for layer_idx in model.config.text.linear_layers:
        cache.layers[layer_idx][1][cache.slot].zero_()


def drop_conv_states(model: Qwen35Model, cache: SequenceCache) -> None:
    for layer_idx in model.config.text.linear_layers:
        cache.layers[layer_idx][0][cache.slot].zero_()


def forget_rope_delta(model: Qwen35Model, cache: SequenceCache) -> None:
    cache.rope_delta = 0


def broken_greedy(
    model: Qwen35Model,
    prompt: Prompt,
    positions: torch.Tensor,
    delta: int,
    break_cache: Callable[..., None],
    count: int,
) -> tuple[list[int], torch.Tensor]:
    """Greedy decoding where the cache is broken once, after the prompt."""
    cache = new_cache(model)
    cache.rope_delta = delta
    row = our_prefill(model, prompt, positions, cache)[-1]
    break_cache(model, cache)
    tokens, rows = [], []
    for _ in range(count):
        rows.append(row)
        tokens.append(int(row.argmax()))
        row = our_decode(model, tokens[-1:], [cache])[0]
    return tokens, torch.stack(rows)


@SPECS
def test_a_broken_cache_changes_logits(spec: TinySpec, ours: Loader, theirs: Loader) -> None:
    prompt = make_prompt(FOUR_TURNS, seed=3)
    positions, delta = their_positions(theirs(spec), prompt)
    _, expected = their_greedy(theirs(spec), prompt, 4)
    _, right = our_greedy(ours(spec), prompt, positions, delta, 4)
    assert relative_error(right, expected) <= FP32_TOLERANCE
    for break_cache in (zero_recurrent_states, drop_conv_states, forget_rope_delta):
        _, broken = broken_greedy(ours(spec), prompt, positions, delta, break_cache, 4)
        assert relative_error(broken, expected) > NOTICED, break_cache


@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: spec.name)
def test_zeroed_states_change_greedy_tokens(spec: TinySpec, ours: Loader, theirs: Loader) -> None:
    """transformers' own initialisation fails this one: nothing of the past is left in its states."""
    prompt = make_prompt(FOUR_TURNS, seed=3)
    positions, delta = their_positions(theirs(spec), prompt)
    right, _ = our_greedy(ours(spec), prompt, positions, delta, 8)
    broken, _ = broken_greedy(ours(spec), prompt, positions, delta, zero_recurrent_states, 8)
    assert right != broken


@SPECS
def test_a_state_lost_between_pieces_changes_logits(spec: TinySpec, ours: Loader, theirs: Loader) -> None:
    prompt = make_prompt(FOUR_TURNS, seed=3)
    positions, _ = their_positions(theirs(spec), prompt)
    model = ours(spec)
    # The placeholders' own rows stand for the media here: both runs have the same.
    embeds = model.embed_tokens(prompt.token_ids)
    whole = model.logits(our_prefill_of(model, embeds, positions, new_cache(model)))[70:]
    for break_cache in (zero_recurrent_states, drop_conv_states):
        cache = new_cache(model)
        our_prefill_of(model, embeds[:70], positions[:, :70], cache)
        break_cache(model, cache)
        broken = model.logits(our_prefill_of(model, embeds[70:], positions[:, 70:], cache))
        assert relative_error(broken, whole) > NOTICED, break_cache


@SPECS
def test_swapped_height_and_width_change_logits(spec: TinySpec, ours: Loader, theirs: Loader) -> None:
    prompt = make_prompt(FOUR_TURNS, seed=3)
    positions, _ = their_positions(theirs(spec), prompt)
    expected = their_logits(theirs(spec), prompt)
    swapped = positions[[0, 2, 1]]
    model = ours(spec)
    assert relative_error(our_prefill(model, prompt, positions, new_cache(model)), expected) <= FP32_TOLERANCE
    assert relative_error(our_prefill(model, prompt, swapped, new_cache(model)), expected) > NOTICED


def test_a_grid_with_height_and_width_swapped_changes_embeddings(ours: Loader) -> None:
    visual = ours(DENSE).visual
    pixels = torch.rand((24, visual.config.patch_dim), generator=torch.Generator().manual_seed(0))
    assert relative_error(visual(pixels, (1, 6, 4)), visual(pixels, (1, 4, 6))) > NOTICED
