"""A decode step on the device against the one that asks caches: the same tokens, states, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from qwen35mm.cache import SequenceCache
from qwen35mm.model.cache_protocol import DecodeInputs
from qwen35mm.model.decoder import Qwen35Model
from tests.model.layouts import new_pools, relative_error
from tests.tiny import MOE_TIED, NUM_TEXT_IDS, REAL_HEADS, SHALLOW, TinySpec

Loader = Callable[..., Any]

LENGTHS = (23, 1, 15, 64)
NUM_STEPS = 3
MAX_BLOCKS = 8


def start(model: Qwen35Model, caches: Sequence[SequenceCache]) -> None:
    """Prompts of different lengths, whose positions are not their places."""
    for name, cache in enumerate(caches):
        ids = torch.randint(0, NUM_TEXT_IDS, (LENGTHS[name],), generator=torch.Generator().manual_seed(name))
        cache.rope_delta = 3 * name
        model.prefill(model.embed_tokens(ids), torch.arange(len(ids)).expand(3, -1), cache)


def inputs_of(caches: Sequence[SequenceCache | None], token_ids: Sequence[int]) -> DecodeInputs:
    """A row for each cache; None is a row that nobody uses."""
    numbers, tables = [], []
    for cache, token_id in zip(caches, token_ids, strict=True):
        table = torch.full((MAX_BLOCKS,), 10**6, dtype=torch.int32)
        if cache is None:
            numbers.append((0, 0, -1, -1, 0))
        else:
            cache.prepare(1)
            blocks, size = cache.block_table, cache.block_size
            row = blocks[cache.length // size] * size + cache.length % size
            numbers.append((token_id, cache.next_position, cache.slot, row, cache.length + 1))
            table[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        tables.append(table)
    token, position, slot, row, length = torch.tensor(numbers).unbind(1)
    return DecodeInputs(token, position, slot, row, length.to(torch.int32), torch.stack(tables))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [SHALLOW, MOE_TIED, REAL_HEADS], ids=lambda spec: spec.name)
def test_a_step_on_the_device_does_what_decode_does(ours: Loader, spec: TinySpec, dtype: torch.dtype) -> None:
    model = ours(spec, dtype=dtype)
    pools, their_pools = new_pools(model, 6), new_pools(model, 6)
    rows = [pools.new_sequence() for _ in LENGTHS]
    expected_rows = [their_pools.new_sequence() for _ in LENGTHS]
    for caches in (rows, expected_rows):
        start(model, caches)
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    for number in range(NUM_STEPS):
        token_ids = [(37 * name + 11 * number) % NUM_TEXT_IDS for name in range(len(rows))]
        # In any order, with rows between that nobody uses.
        order = [rows[2], None, rows[0], rows[3], None, rows[1]]
        ids = [token_ids[2], 0, token_ids[0], token_ids[3], 0, token_ids[1]]
        hidden = model.decode_step(inputs_of(order, ids), pools)[[2, 5, 0, 3]]
        for cache in rows:
            cache.advance(1)
        positions = torch.tensor([cache.next_position for cache in expected_rows]).expand(3, -1)
        expected = model.decode(torch.tensor(token_ids), positions, expected_rows)
        assert relative_error(model.logits(hidden), model.logits(expected)) < limit, number
    text = model.config.text
    for cache, other in zip(rows, expected_rows, strict=True):
        for layer in text.linear_layers:
            assert relative_error(cache.recurrent_state(layer), other.recurrent_state(layer)) < limit
            assert relative_error(cache.conv_state(layer).float(), other.conv_state(layer).float()) < limit
        for layer in text.attention_layers:
            for actual, wanted in zip(cache.kv(layer), other.kv(layer), strict=True):
                assert relative_error(actual.float(), wanted.float()) < limit


def test_rows_that_nobody_uses_touch_nothing(ours: Loader) -> None:
    model = ours(SHALLOW)
    pools = new_pools(model, 3)
    caches = [pools.new_sequence() for _ in range(2)]
    start(model, caches)
    text = model.config.text

    def everything() -> list[torch.Tensor]:
        states = [pool(i) for pool in (pools.states.conv, pools.states.recurrent) for i in text.linear_layers]
        return [
            x.nan_to_num().clone() for x in (*states, *(x for i in text.attention_layers for x in pools.kv.layer(i)))
        ]

    before = everything()
    model.decode_step(inputs_of([None, None], [0, 0]), pools)
    assert all(map(torch.equal, everything(), before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [SHALLOW, REAL_HEADS], ids=lambda spec: spec.name)
def test_a_prefill_through_block_tables_does_what_one_without_does(
    ours: Loader, spec: TinySpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ours(spec, dtype=dtype)
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    ids = torch.randint(0, NUM_TEXT_IDS, (90,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(90).expand(3, -1)
    found = []
    for pages in (False, True):
        monkeypatch.setattr(model, "pages_prefill", frozenset(model.devices if pages else ()))
        pools = new_pools(model, 2)
        cache, hidden = pools.new_sequence(), []
        for start, stop in ((0, 16), (16, 33), (33, 34), (34, 90)):
            hidden.append(model.prefill(model.embed_tokens(ids[start:stop]), positions[:, start:stop], cache))
            # Somebody else takes the block behind.
            pools.kv.take(1, after=cache.block_table[-1])
        assert any(b != a + 1 for a, b in zip(cache.block_table, cache.block_table[1:], strict=False))
        kv = [x.float() for i in model.config.text.attention_layers for x in cache.kv(i)]
        found.append([torch.cat(hidden).float(), *kv])
    for expected, actual in zip(*found, strict=True):
        assert relative_error(actual, expected) < limit
