from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.cache.kv_pool import BlockAllocator


def test_a_new_sequence_starts_the_pool_and_grows_in_place() -> None:
    allocator = BlockAllocator(10)
    assert allocator.take(2) == [0, 1]
    assert allocator.take(3, after=1) == [2, 3, 4]
    assert allocator.num_free == 5


def test_a_second_sequence_leaves_room_for_both() -> None:
    allocator = BlockAllocator(20)
    first = allocator.take(2)
    second = allocator.take(2)
    assert second == [10, 11]
    assert allocator.take(8, after=first[-1]) == list(range(2, 10))
    assert allocator.take(8, after=second[-1]) == list(range(12, 20))


def test_a_sequence_that_can_not_grow_in_place_goes_on_elsewhere() -> None:
    allocator = BlockAllocator(8)
    first = allocator.take(3)
    allocator.take(2, after=first[-1])
    assert allocator.take(2, after=first[-1]) == [5, 6]


def test_scattered_blocks_are_taken_where_no_run_is_long_enough() -> None:
    allocator = BlockAllocator(9)
    blocks = allocator.take(9)
    allocator.release([0, 2, 3, 4, 6, 8])
    taken = allocator.take(6)
    assert sorted(taken) == [0, 2, 3, 4, 6, 8]
    assert taken[:3] == [2, 3, 4]
    assert allocator.num_free == 0
    assert len(blocks) == 9


def test_shared_blocks_are_free_after_the_last_release() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.take(2)
    allocator.share(blocks)
    allocator.release(blocks)
    assert (allocator.num_free, allocator.count(blocks[0])) == (2, 1)
    allocator.release(blocks)
    assert (allocator.num_free, allocator.count(blocks[0])) == (4, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 6)), max_size=60))
def test_blocks_are_never_given_out_twice(steps: list[tuple[bool, int, int]]) -> None:
    """Six sequences that grow and end in any order."""
    allocator = BlockAllocator(16)
    held: list[list[int]] = [[] for _ in range(6)]
    for ends, index, count in steps:
        blocks = held[index]
        if ends:
            allocator.release(blocks)
            held[index] = []
        elif count <= allocator.num_free:
            blocks += allocator.take(count, after=blocks[-1] if blocks else None)
        everything = [block for sequence in held for block in sequence]
        assert len(everything) == len(set(everything))
        allocator.check_integrity(dict.fromkeys(everything, 1))
