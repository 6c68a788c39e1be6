"""Which blocks of a pool are in use and by how many: pure bookkeeping, no tensors.

Consecutive blocks matter: a sequence whose blocks lie side by side is read as one view of the pool, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class BlockAllocator:
    """Reference counts of `num_blocks` blocks, and the choice of free ones."""

    def __init__(self, num_blocks: int) -> None:
        self._counts = [0] * num_blocks
        self._num_free = num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return self._num_free

    def count(self, block: int) -> int:
        """How many hold this block; 0 is free."""
        return self._counts[block]

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one holder to each block; they must be in use."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is free and can't be shared"
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one holder from each block; a block without holders is free."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is released more often than it was taken"
            self._counts[block] -= 1
            self._num_free += self._counts[block] == 0

    def take(self, count: int, *, after: int | None = None, exact: bool = False) -> list[int]:
        """Takes `count` free blocks, side by side where that can be.

        First choice: right behind the block `after`, so that a growing sequence stays in one run. Next, one run
        that holds them all: the smallest that fits where the size is final (`exact`), else in the middle of the
        largest, which leaves room to grow to this sequence and to the one before it. Last, the largest runs.

        Args:
            after: the sequence's last block so far.
            exact: the sequence won't grow beyond these blocks.
        """
        assert 0 < count <= self._num_free, f"take({count}) with {self._num_free} free blocks"
        taken: list[int] = []
        block = self.num_blocks if after is None else after + 1
        while len(taken) < count and block < self.num_blocks and self._counts[block] == 0:
            taken.append(block)
            block += 1
        for chosen in taken:
            self._counts[chosen] = 1
        while len(taken) < count:
            wanted = count - len(taken)
            runs = self._free_runs()
            fitting = [run for run in runs if run[1] >= wanted]
            if fitting and exact:
                start, _ = min(fitting, key=lambda run: run[1])
            elif fitting:
                start, length = max(fitting, key=lambda run: run[1])
                # At the pool's very start nobody else grows towards us.
                start += 0 if start == 0 else (length - wanted) // 2
            else:
                start, wanted = max(runs, key=lambda run: run[1])
            for chosen in range(start, start + wanted):
                self._counts[chosen] = 1
                taken.append(chosen)
        self._num_free -= count
        return taken

    def _free_runs(self) -> list[tuple[int, int]]:
        """(start, length) of every run of free blocks."""
        runs: list[tuple[int, int]] = []
        start = None
        for block, count in enumerate([*self._counts, 1]):
            if count == 0 and start is None:
                start = block
            elif count != 0 and start is not None:
                runs.append((start, block - start))
                start = None
        return runs

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Asserts that the counts are exactly `holders` (block -> how many sequences and cached segments list it)."""
        expected = [0] * self.num_blocks
        for block, count in holders.items():
            expected[block] = count
        if self._counts != expected:  # told block by block only where something is wrong
            wrong = [
                f"block {block} is counted {count} times and held {held} times"
                for block, (count, held) in enumerate(zip(self._counts, expected, strict=True))
                if count != held
            ]
            raise AssertionError("; ".join(wrong[:8]))
        assert self._num_free == self._counts.count(0), "the number of free blocks is off"
