"""A sequence's cache: what is written is read, a shared block is copied by the second to write, nothing leaks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.cache import CachePools, OutOfBlocksError, OutOfSlotsError, SequenceCache
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ContextTooLongError, RequestError
from tests.cache.conftest import BLOCK_SIZE

ATTENTION = 3
LINEAR = (0, 1, 2)


def values(start: int, count: int) -> torch.Tensor:
    """[count, 2, 64] rows that all differ."""
    return torch.arange(start, start + count).float()[:, None, None].expand(count, 2, 64)


def append(sequence: SequenceCache, start: int, count: int) -> SequenceCache:
    sequence.append({"k": values(start, count)[None], "v": -values(start, count)[None]})
    return sequence


def branch(pools: CachePools, sequence: SequenceCache) -> SequenceCache:
    """One that goes on from here, as the cache lets a conversation begin where another one stood."""
    other = pools.new_sequence()
    if sequence.length:
        blocks = sequence.share(0, sequence.length)
        other.adopt(blocks, sequence.length)
        pools.kv.allocator.release(blocks)
    pools.states.load(other.slot, pools.states.save(sequence.slot))
    other.rope_delta = sequence.rope_delta
    return other


def content(sequence: SequenceCache) -> list[float]:
    k, v = (tensor[0] for tensor in sequence.export().values())
    assert k.shape == v.shape == (sequence.length, 2, 64)
    assert torch.equal(k, -v)
    assert torch.equal(k, k[:, :1, :1].expand_as(k))
    return k[:, 0, 0].tolist()


def states(sequence: SequenceCache, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence's own conv and recurrent state, views of the pool."""
    conv, recurrent = sequence.layers[layer_idx]
    return conv[sequence.slot], recurrent[sequence.slot]


def test_states_start_at_zero_and_are_the_sequences_own(pools: CachePools) -> None:
    first = pools.new_sequence()
    for layer_idx in LINEAR:
        states(first, layer_idx)[0].fill_(1)
        states(first, layer_idx)[1].fill_(2)
    first.free()
    again, other = pools.new_sequence(), pools.new_sequence()
    assert again.slot == 0
    states(again, 1)[1].fill_(3)
    for layer_idx in LINEAR:
        assert states(other, layer_idx)[0].count_nonzero() == 0
        assert states(other, layer_idx)[1].count_nonzero() == 0
    assert states(again, 1)[1].unique().tolist() == [3]


def test_a_branch_goes_on_by_itself(pools: CachePools) -> None:
    sequence = append(pools.new_sequence(), 0, 6)
    sequence.rope_delta = -3
    states(sequence, 0)[1].fill_(7)
    other = branch(pools, sequence)
    assert (other.length, other.rope_delta, other.next_position) == (6, -3, 3)
    assert other.block_table == sequence.block_table
    append(other, 50, 3)
    states(other, 0)[1].zero_()
    append(sequence, 6, 1)
    assert content(sequence) == [0, 1, 2, 3, 4, 5, 6]
    assert content(other) == [0, 1, 2, 3, 4, 5, 50, 51, 52]
    assert states(sequence, 0)[1].unique().tolist() == [7]
    # The full block is still shared, the partial one is not.
    assert other.block_table[0] == sequence.block_table[0]
    assert set(other.block_table[1:]).isdisjoint(sequence.block_table[1:])
    pools.check_integrity([sequence, other])


def test_whoever_writes_first_goes_on_in_place_and_the_second_copies(pools: CachePools) -> None:
    sequence = append(pools.new_sequence(), 0, 6)
    other = branch(pools, sequence)
    before = sequence.block_table
    append(sequence, 6, 1)
    assert sequence.block_table == other.block_table == before
    assert content(other) == [0, 1, 2, 3, 4, 5]
    append(other, 50, 1)
    assert other.block_table[0] == before[0]
    assert other.block_table[1] != before[1]
    assert content(other) == [0, 1, 2, 3, 4, 5, 50]
    assert content(sequence) == [0, 1, 2, 3, 4, 5, 6]
    pools.check_integrity([sequence, other])


def test_a_cached_part_is_gone_on_with_in_place_once_its_writer_has_left(pools: CachePools) -> None:
    writer = append(pools.new_sequence(), 0, 6)
    kept = writer.share(0, 6)
    append(writer, 6, 5)  # what comes after the cached part is the writer's own
    assert tuple(writer.block_table[:2]) == kept
    pools.check_integrity([writer], [kept])
    writer.free()
    pools.check_integrity([], [kept])
    for start in (50, 60):
        follower = pools.new_sequence()
        follower.adopt(kept, 6)
        append(follower, start, 4)
        assert tuple(follower.block_table[:2]) == kept
        assert content(follower) == [0, 1, 2, 3, 4, 5, *range(start, start + 4)]
        follower.free()
    first, second = pools.new_sequence(), pools.new_sequence()
    for follower in (first, second):
        follower.adopt(kept, 6)
    append(first, 70, 1)
    append(second, 80, 1)
    assert content(first)[-1] == 70
    assert content(second)[-1] == 80
    pools.check_integrity([first, second], [kept])


def test_prepared_room_stays_the_preparers(pools: CachePools) -> None:
    sequence = append(pools.new_sequence(), 0, 2)
    kept = sequence.share(0, 2)
    sequence.prepare(1)
    table = sequence.block_table
    append(sequence, 2, 1)
    assert sequence.block_table == table
    other = pools.new_sequence()
    other.adopt(kept, 2)
    append(other, 50, 1)
    assert content(sequence) == [0, 1, 2]
    assert content(other) == [0, 1, 50]


def test_what_is_exported_can_be_appended(pools: CachePools) -> None:
    source = append(pools.new_sequence(), 0, 7)
    states(source, 0)[1].fill_(7)
    states(source, 2)[0].fill_(5)
    everything = source.export()
    part = pools.kv.export(source.block_table, 5, 7)
    assert pools.kv.fits(everything, 7)
    assert not pools.kv.fits(everything, 6)
    saved = pools.states.save(source.slot)
    assert pools.states.fits(saved)
    target = append(pools.new_sequence(), 0, 3)
    target.append(part)
    assert content(target) == [0, 1, 2, 5, 6]
    pools.states.load(target.slot, saved)
    assert states(target, 0)[1].unique().tolist() == [7]
    assert states(target, 2)[0].unique().tolist() == [5]
    target.append(everything)
    assert content(target) == [0, 1, 2, 5, 6, *range(7)]


def test_reclaim_is_asked_before_blocks_run_out(pools: CachePools) -> None:
    writer = append(pools.new_sequence(), 0, 20)
    kept = writer.share(0, 20)
    writer.free()
    asked: list[int] = []

    def reclaim(num_blocks: int) -> None:
        asked.append(num_blocks)
        pools.kv.allocator.release(kept)

    pools.kv.reclaim = reclaim
    sequence = append(pools.new_sequence(), 0, 28)
    assert asked == [4]
    pools.check_integrity([sequence])


def test_too_few_blocks_are_told_with_the_arithmetic(pools: CachePools) -> None:
    sequence = append(pools.new_sequence(), 0, 30)
    table = sequence.block_table
    # 30 tokens fill all 8 blocks.
    message = r"4 more tokens need 1 blocks of 4 tokens \(0\.0 MiB\), and 0 of 8 are free"
    with pytest.raises(OutOfBlocksError, match=message) as caught:
        sequence.prepare(3)
    assert isinstance(caught.value, ContextTooLongError)
    assert (sequence.length, sequence.block_table) == (30, table)
    sequence.prepare(2)
    with pytest.raises(OutOfBlocksError):
        pools.new_sequence().prepare(1)


def test_copy_on_write_without_a_free_block_changes_nothing(pools: CachePools) -> None:
    sequence = append(pools.new_sequence(), 0, 30)
    other = branch(pools, sequence)
    append(sequence, 30, 1)
    with pytest.raises(OutOfBlocksError):
        other.prepare(1)
    assert other.block_table == sequence.block_table
    assert content(other) == list(range(30))
    other.free()
    append(sequence, 31, 1)
    pools.check_integrity([sequence, other])


def test_too_few_slots(pools: CachePools) -> None:
    sequences = [pools.new_sequence() for _ in range(3)]
    with pytest.raises(OutOfSlotsError, match="All 3 slots are taken") as caught:
        pools.new_sequence()
    assert isinstance(caught.value, RequestError)
    pools.check_integrity(sequences)


def test_freeing_twice_does_nothing(pools: CachePools) -> None:
    sequence = append(pools.new_sequence(), 0, 5)
    sequence.free()
    sequence.free()
    assert sequence.freed
    assert (pools.kv.allocator.num_free, pools.states.num_free) == (8, 3)
    pools.check_integrity([sequence])
    with pytest.raises(AssertionError, match="freed"):
        sequence.prepare(1)


def test_leaks_are_noticed(pools: CachePools) -> None:
    kept, lost = pools.new_sequence(), pools.new_sequence()
    with pytest.raises(AssertionError, match="slots"):
        pools.check_integrity([kept])
    append(lost, 0, 1)
    with pytest.raises(AssertionError, match="block"):
        pools.check_integrity([kept])
    pools.check_integrity([kept, lost])


def test_bytes_are_those_of_the_config(pools: CachePools, config: ModelConfig) -> None:
    assert pools.kv.block_bytes == BLOCK_SIZE * config.kv_bytes_per_token(torch.float32)
    assert sum(tensor.nbytes for pair in pools.kv.layers.values() for tensor in pair) == 8 * pools.kv.block_bytes
    stored = sum(tensor.nbytes for pair in pools.states.layers.values() for tensor in pair)
    assert stored == 3 * pools.states.slot_bytes == 3 * config.state_bytes(torch.float32)


@given(
    st.lists(
        st.tuples(st.sampled_from(["new", "append", "branch", "free"]), st.integers(0, 2), st.integers(1, 9)),
        max_size=40,
    )
)
def test_any_history_keeps_contents_and_counts(config: ModelConfig, steps: list[tuple[str, int, int]]) -> None:
    """Against a plain list per sequence, with refusals changing nothing."""
    pools = CachePools(config, num_slots=3, num_tokens=32, dtype=torch.float32, block_size=BLOCK_SIZE)
    alive: list[tuple[SequenceCache, list[float]]] = []
    fresh = 0
    for action, index, count in steps:
        try:
            if action == "new":
                alive.append((pools.new_sequence(), []))
            elif alive:
                sequence, expected = alive[index % len(alive)]
                if action == "append":
                    append(sequence, fresh, count)
                    expected += range(fresh, fresh + count)
                    fresh += count
                elif action == "branch":
                    alive.append((branch(pools, sequence), list(expected)))
                else:
                    sequence.free()
                    alive.remove((sequence, expected))
        except (OutOfBlocksError, OutOfSlotsError):
            pass
        pools.check_integrity([sequence for sequence, _ in alive])
        for sequence, expected in alive:
            assert content(sequence) == expected
