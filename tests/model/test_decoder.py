"""One prompt, many ways to run it: in one piece, in pieces, token by token, alone and in company."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from qwen35mm.engine.batches import StepInputs
from qwen35mm.model.decoder import Qwen35Model
from tests.model.layouts import (
    FOUR_TURNS,
    IMAGES,
    MAX_BLOCKS,
    ONE_IMAGE,
    TEXT,
    VIDEO,
    make_prompt,
    new_cache,
    new_pools,
    our_decode,
    our_embeds,
    our_prefill,
    our_prefill_of,
    relative_error,
    their_positions,
)
from tests.tiny import DENSE, MOE, REAL_HEADS, SHALLOW, TinySpec

Loader = Callable[..., Any]
TOLERANCE = 1e-5
SPECS = pytest.mark.parametrize("spec", [MOE, REAL_HEADS], ids=lambda spec: spec.name)

# FOUR_TURNS has its first image at places 13 to 16; 64 is the chunk length of the delta rule.
CUTS = [[1], [2, 3, 4, 5], [14], [63, 65, 129], list(range(16, 160, 16))]


@SPECS
def test_any_cut_gives_the_same_logits_and_cache(spec: TinySpec, ours: Loader, theirs: Loader) -> None:
    model: Qwen35Model = ours(spec)
    prompt = make_prompt(FOUR_TURNS, seed=6)
    positions, _ = their_positions(theirs(spec), prompt)
    whole = new_cache(model)
    expected = our_prefill(model, prompt, positions, whole)
    for cuts in CUTS:
        cache = new_cache(model)
        assert relative_error(our_prefill(model, prompt, positions, cache, cuts), expected) <= TOLERANCE, cuts
        assert cache.length == whole.length == prompt.num_tokens
        for layer_idx in model.config.text.linear_layers:
            for actual, wanted in zip(cache.layers[layer_idx], whole.layers[layer_idx], strict=True):
                assert relative_error(actual[cache.slot], wanted[whole.slot]) <= TOLERANCE, (cuts, layer_idx)
        for actual, wanted in zip(cache.export().values(), whole.export().values(), strict=True):
            for layer_actual, layer_wanted in zip(actual, wanted, strict=True):
                assert relative_error(layer_actual, layer_wanted) <= TOLERANCE, cuts


@SPECS
def test_decode_equals_prefill(spec: TinySpec, ours: Loader, theirs: Loader) -> None:
    """Text decoded token by token behind media, where position and cache_position differ."""
    model: Qwen35Model = ours(spec)
    prompt = make_prompt([*IMAGES, 24], seed=5)
    positions, rope_delta = their_positions(theirs(spec), prompt)
    assert rope_delta != 0
    expected = our_prefill(model, prompt, positions, new_cache(model))
    start, cache = prompt.num_tokens - 24, new_cache(model)
    cache.rope_delta = rope_delta
    our_prefill_of(model, our_embeds(model, prompt)[:start], positions[:, :start], cache)
    rows = [our_decode(model, [token], [cache]) for token in prompt.token_ids[start:].tolist()]
    assert relative_error(torch.cat(rows), expected[start:]) <= TOLERANCE
    assert cache.length == prompt.num_tokens


@SPECS
def test_a_batch_equals_each_alone(spec: TinySpec, ours: Loader, theirs: Loader) -> None:
    """Different lengths and rope_deltas, slots out of order and with a gap, and rows that nobody uses."""
    model: Qwen35Model = ours(spec)
    pools = new_pools(model, num_slots=5)
    slots = [pools.new_sequence() for _ in range(5)]
    slots[1].free()
    together = [slots[2], slots[3], slots[4], slots[0]]
    alone = []
    for seed, (layout, cache) in enumerate(zip((TEXT, ONE_IMAGE, VIDEO, IMAGES), together, strict=True)):
        prompt = make_prompt(layout, seed=seed)
        positions, rope_delta = their_positions(theirs(spec), prompt)
        alone.append(new_cache(model))
        for target in (cache, alone[-1]):
            target.rope_delta = rope_delta
            our_prefill(model, prompt, positions, target)
    for step in range(6):
        tokens = [100 * step + row for row in range(4)]
        batch = our_decode(model, [*tokens[:2], 0, *tokens[2:], 0], [*together[:2], None, *together[2:], None])
        for row, token in enumerate(tokens):
            single = our_decode(model, [token], [alone[row]])
            assert relative_error(batch[row + (row > 1)], single[0]) <= TOLERANCE, (step, row)
    pools.check_integrity(slots)


@SPECS
def test_scattered_blocks_are_read_as_neighbours_are(spec: TinySpec, ours: Loader) -> None:
    model: Qwen35Model = ours(spec)
    embeds, positions = model.embed_tokens(torch.arange(90)), torch.arange(90).expand(3, -1)
    pools, neighbours = new_pools(model, 1), new_cache(model)
    scattered, hidden = pools.new_sequence(), []
    for start, stop in pairwise([0, 16, 33, 34, 90]):
        hidden.append(our_prefill_of(model, embeds[start:stop], positions[:, start:stop], scattered))
        # Somebody else takes the block behind.
        pools.kv.take(1, after=scattered.block_table[-1])
    assert any(b != a + 1 for a, b in pairwise(scattered.block_table))
    expected = our_prefill_of(model, embeds, positions, neighbours)
    assert relative_error(torch.cat(hidden), expected) <= TOLERANCE
    tokens = our_decode(model, [5], [scattered]), our_decode(model, [5], [neighbours])
    assert relative_error(*tokens) <= TOLERANCE


def test_rows_that_nobody_uses_touch_nothing(ours: Loader) -> None:
    model: Qwen35Model = ours(SHALLOW)
    pools = new_pools(model, 3)
    our_prefill_of(model, model.embed_tokens(torch.arange(9)), torch.arange(9).expand(3, -1), pools.new_sequence())
    before = [x.nan_to_num() for pair in pools.layers.values() for x in pair]
    inputs = StepInputs.unused(2, MAX_BLOCKS)
    model(inputs.batch(pools, model.embed_tokens(inputs.numbers[0])))
    after = [x.nan_to_num() for pair in pools.layers.values() for x in pair]
    assert all(map(torch.equal, after, before))


def test_logits_are_those_of_the_rows_asked(ours: Loader) -> None:
    model: Qwen35Model = ours(DENSE, torch.bfloat16)
    embeds, positions = model.embed_tokens(torch.arange(10)), torch.arange(10).expand(3, -1)
    hidden = our_prefill_of(model, embeds, positions, new_cache(model))
    logits = model.logits(hidden[-2:])
    # Who compares or adds them up makes float32 of them.
    assert logits.dtype == torch.bfloat16
    assert logits.shape == (2, model.config.text.vocab_size)
    assert hidden.dtype == model.dtype == torch.bfloat16
    assert model.device == torch.device("cpu")


def test_states_stay_float32_in_a_bfloat16_model(ours: Loader) -> None:
    model: Qwen35Model = ours(DENSE, torch.bfloat16)
    cache = new_cache(model)
    our_prefill_of(model, model.embed_tokens(torch.arange(10)), torch.arange(10).expand(3, -1), cache)
    our_decode(model, [3], [cache])
    layer_idx = model.config.text.linear_layers[0]
    conv, recurrent = cache.layers[layer_idx]
    assert recurrent.dtype == torch.float32
    assert conv.dtype == torch.bfloat16
    # A state kept in bfloat16 anywhere on the way would have no bits beyond it.
    state = recurrent[cache.slot]
    assert not torch.equal(state, state.bfloat16().float())
