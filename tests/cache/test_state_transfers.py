"""A sequence's states go to a card and back in one copy, whatever the number of layers; and nobody waits on the way
there, nor for keys, values and features from the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qwen35mm.cache import CachePools, Chain, DiskStore, PrefixCache, StatePool, VisionCache
from qwen35mm.cache.placement import to_host
from qwen35mm.config import ModelConfig
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.vision import VisionUnit
from qwen35mm.prompt import Prompt, Segment
from qwen35mm_preprocess import GridTHW
from tests.cache.conftest import BLOCK_SIZE
from tests.card import CARD, Card, Transfer

CPU, ROOT = torch.device("cpu"), bytes(32)
# The last of four layers has keys and values.
SPLIT = [CARD, CPU, CARD, CPU]


@pytest.fixture
def card() -> Iterator[Card]:
    with torch.inference_mode(), Card() as card:
        yield card


def filled(config: ModelConfig, kept: torch.dtype, device: torch.device | list[torch.device]) -> tuple[StatePool, int]:
    """A pool whose second slot has numbers of its own in every layer."""
    pool = StatePool(config, num_slots=3, dtype=torch.bfloat16, device=device, kept_dtype=kept)
    slots = [pool.take(), pool.take()]
    for conv, recurrent in pool.layers.values():
        conv[slots[1]] = torch.rand(conv.shape[1:]).to(conv)
        recurrent[slots[1]] = torch.rand(recurrent.shape[1:]).to(recurrent)
    return pool, slots[1]


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_state_is_one_copy_there_and_one_wait_back(config: ModelConfig, card: Card, kept: torch.dtype) -> None:
    pool, slot = filled(config, kept, CARD)
    pool.round_to_kept(slot)
    card.transfers.clear()
    kept_there = pool.keep(slot)
    assert {each.device for each in kept_there.values()} == {CARD}
    assert pool.fits(kept_there)
    assert not card.transfers
    on_host = pool.save(slot)
    assert {each.device for each in on_host.values()} == {CPU}
    assert [each.waits for each in card.transfers] == [False, False]
    assert sum(each.num_bytes for each in card.transfers) == pool.slot_bytes
    assert card.num_waits == 1

    card.transfers.clear()
    other = pool.take()
    pool.load(other, on_host)
    assert [(each.to_card, each.waits) for each in card.transfers] == [(True, False)]
    assert card.num_waits == 1
    again = pool.save(other)
    assert all(torch.equal(on_host[name], again[name]) for name in again)
    first_two = pool.save(0)
    assert not any(each.any() for each in first_two.values())
    pool.load(0, kept_there)
    assert all(torch.equal(on_host[name], each) for name, each in pool.save(0).items())


def test_layers_on_two_devices_are_one_copy_to_each(config: ModelConfig, card: Card) -> None:
    pool, slot = filled(config, torch.float32, SPLIT)
    saved = pool.keep(slot)
    assert {each.device for each in saved.values()} == {CPU}, "where states of several devices are together"
    card.transfers.clear()
    other = pool.take()
    pool.load(other, saved)
    assert [(each.to_card, each.waits) for each in card.transfers] == [(True, False)]
    for index, (conv, recurrent) in enumerate(pool.layers.values()):
        assert torch.equal(conv[other].cpu(), saved["conv"][index])
        assert torch.equal(recurrent[other].cpu(), saved["recurrent"][index])


def test_what_came_from_a_card_in_one_piece_is_written_and_read(
    config: ModelConfig, card: Card, tmp_path: Path
) -> None:
    pool, slot = filled(config, torch.bfloat16, CARD)
    pool.round_to_kept(slot)
    saved, store = to_host(pool.keep(slot)), DiskStore(tmp_path / "cache", max_bytes=1 << 30)
    pieces = {each.untyped_storage().data_ptr() for each in saved.values()}
    assert len(pieces) == 1
    assert store.write("state", bytes(32), saved)
    found = store.read("state", bytes(32))
    assert found is not None
    assert pool.fits(found)
    assert all(torch.equal(saved[name], each) for name, each in found.items())


def test_a_warm_turn_copies_the_newest_cut_on_the_card_alone(config: ModelConfig, card: Card) -> None:
    pools = CachePools(config, num_slots=2, num_tokens=128, dtype=torch.bfloat16, device=CARD, block_size=BLOCK_SIZE)
    prefixes = PrefixCache(pools, state_bytes=1 << 24, device_state_bytes=4 * pools.states.slot_bytes)
    newest: dict[int, dict[str, torch.Tensor]] = {}

    def turn(chat: int, num_turns: int) -> list[Transfer]:
        """Goes on with a chat; the copies to the card that were made of what it began with."""
        chain = Chain.of(prompt(chat, num_turns), ROOT)
        before = len(card.transfers)
        start = prefixes.begin(chain)
        copied, sequence = [each for each in card.transfers[before:] if each.to_card], start.sequence
        assert start.num_segments == num_turns - 1
        if start.num_segments:
            begun = pools.states.save(sequence.slot)
            assert all(torch.equal(begun[name], each) for name, each in newest[chat].items())
        sequence.prepare(BLOCK_SIZE)
        for pair in pools.states.layers.values():
            for states in pair:
                states[sequence.slot] = torch.rand(states.shape[1:]).to(states)
        sequence.advance(BLOCK_SIZE)
        prefixes.publish(chain, num_turns - 1, sequence, start, keep_state=True)
        newest[chat] = pools.states.save(sequence.slot)
        prefixes.unpin(start)
        sequence.free()
        assert prefixes.states.num_on_device <= 4
        prefixes.check_integrity([])
        return copied

    for num_turns in (1, 2, 3):
        assert [turn(chat, num_turns) for chat in range(3)] == [[]] * 3
    # A cut leaves before the one that follows it is there.
    turn(3, 1)
    turn(4, 1)
    # The longest ago has been written to the host, and comes back in one transfer. Then it is there again.
    for num_turns, expected in ((4, [(True, False)]), (5, [])):
        assert [(each.to_card, each.waits) for each in turn(0, num_turns)] == expected
    prefixes.states.leave_device()
    assert [(each.to_card, each.waits) for each in turn(0, 6)] == [(True, False)]


def test_keys_and_values_from_the_host_are_few_transfers(
    config: ModelConfig, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = CachePools(config, num_slots=2, num_tokens=64, dtype=torch.bfloat16, device=CARD, block_size=BLOCK_SIZE).kv
    monkeypatch.setattr("qwen35mm.cache.kv_pool.STAGED_BYTES", 5 * pool.token_bytes)
    shape = (len(pool.layers), 11, *next(iter(pool.layers.values()))[0].shape[1:])
    given = {name: torch.rand(shape).to(torch.bfloat16) for name in ("k", "v")}
    blocks = pool.take(4)[::-1]
    pool.restore(blocks, 3, given)
    assert [(each.to_card, each.waits) for each in card.transfers] == [(True, False)] * 3
    card.transfers.clear()
    found = pool.export(blocks, 3, 14)
    assert all(torch.equal(given[name], found[name]) for name in given)
    # Where the rows lie goes there; what comes back is waited for.
    assert [(each.to_card, each.waits) for each in card.transfers] == [(True, False), (False, True), (False, True)]


def test_kept_features_go_to_the_card_without_a_wait(card: Card) -> None:
    vision, features = VisionCache(max_bytes=1 << 20), torch.rand(4, 8)
    vision.keep(b"a", features)
    model = SimpleNamespace(tower=SimpleNamespace(device=CARD))
    prefill: Any = SimpleNamespace(_runtime=SimpleNamespace(reuse=True, disk=None, vision=vision, model=model))
    units = [VisionUnit(0, 0, 1, GridTHW(1, 4, 4), b"a")]
    with pytest.raises(StopIteration) as found:
        next(Prefill._find_features(prefill, units))
    there = found.value.value[b"a"]
    assert there.device == CARD
    assert [(each.to_card, each.waits) for each in card.transfers] == [(True, False)]
    assert torch.equal(there.cpu(), features)


def prompt(chat: int, num_turns: int) -> Prompt:
    """A chat's turns of one block each."""
    num_tokens = num_turns * BLOCK_SIZE
    segments = tuple(Segment(at, at + BLOCK_SIZE, end="turn") for at in range(0, num_tokens, BLOCK_SIZE))
    positions = np.broadcast_to(np.arange(num_tokens), (3, num_tokens)).copy()
    return Prompt(np.arange(num_tokens) + 1000 * chat, (), positions, 0, segments, num_tokens)
