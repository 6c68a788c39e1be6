"""What a recording computes again, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from qwen35mm_kernels.cpu import native
from qwen35mm_kernels.cpu.native.library import Library
from qwen35mm_kernels.cpu.native.products import PackedMatrix
from qwen35mm_kernels.cpu.native.recording import Arena, record


def test_new_inputs_are_computed_where_the_old_ones_lay(native_library: Library) -> None:
    matrix = PackedMatrix(native_library, "float32", 48, 32)
    matrix.fill(0, torch.randn(48, 32))
    x, index, table, weight = torch.randn(3, 32), torch.tensor([2, 0, 2]), torch.randn(4, 24), torch.randn(24)
    results: list[torch.Tensor] = []

    def function() -> None:
        mixed = native.swiglu(matrix.linear(x[index]))
        table[index] = native.add_rms_norm(mixed, table[index].contiguous(), weight, 1e-6)
        results.append(torch.where(index == 2, mixed.to(torch.bfloat16)[:, 0], 0))

    start = table.clone()
    recording = record(function)
    assert recording is not None
    for _ in range(3):
        x.copy_(torch.randn(3, 32))
        index.copy_(torch.randint(0, 3, (3,)))
        table.copy_(start)
        recording.run()
        found = results[0].clone(), table.clone()
        table.copy_(start)
        function()
        assert torch.equal(found[0], results.pop())
        assert torch.equal(found[1], table)


def test_recordings_that_run_by_turns_share_memory(native_library: Library) -> None:
    matrix = PackedMatrix(native_library, "float32", 48, 32)
    matrix.fill(0, torch.randn(48, 32))
    arena, results = Arena(), {}
    inputs = {num_rows: torch.randn(num_rows, 32) for num_rows in (1, 300, 2)}

    def function(num_rows: int) -> None:
        results[num_rows] = native.swiglu(matrix.linear(inputs[num_rows]))

    recordings, sizes = {}, []
    for num_rows in inputs:
        recordings[num_rows] = record(functools.partial(function, num_rows), arena)
        sizes.append(arena.num_bytes)
    assert sizes[0] <= sizes[1] == sizes[2]
    for num_rows in (2, 1, 300, 1, 2):
        inputs[num_rows].normal_()
        recordings[num_rows].run()
        assert torch.equal(results[num_rows], native.swiglu(matrix.linear(inputs[num_rows])))
        assert results[num_rows].data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "strange",
    [lambda x: x.softmax(-1), lambda x: x.mul_(2), lambda x: x.nonzero(), lambda x: x.sum().item(), lambda x: x @ x],
)
def test_what_torch_computes_itself_is_not_recorded(strange: Callable[[torch.Tensor], object]) -> None:
    seen: list[object] = []
    assert record(lambda: seen.append(strange(torch.ones(2, 2)))) is None
    assert len(seen) == 1


def test_an_error_ends_a_recording() -> None:
    def fail() -> None:
        raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        record(fail)
    assert record(lambda: None) is not None
