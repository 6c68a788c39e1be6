"""What the whole model launches: the same kernels for every length and every batch, and nothing that waits."""

from __future__ import annotations

import pytest

from tests.kernels.gpu.launches import launched


@pytest.mark.parametrize("size", ["0.8B", "35B-A3B"])
def test_no_length_and_no_batch_is_compiled_for_by_itself(size: str) -> None:
    """A compiler that runs in the middle of a chat is seconds of silence; and other code may round otherwise."""
    # Of these lengths an expert's tiles have the same number of rows.
    found = launched(size, lengths=[2048, 2049, 2100], batches=[1, 2, 3, 4, 8])
    for kind in ("prefill", "step"):
        first, *others = (variants for name, variants in found.items() if name.startswith(kind))
        assert len(first) >= 9
        for variants in others:
            assert variants == first
