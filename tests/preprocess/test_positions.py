"""M-RoPE positions against transformers' `get_rope_index`; `tests/prompt/test_media.py` has those of real prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm_preprocess import TextRun, VisionRun, mrope_positions
from qwen35mm_preprocess.positions import Run
from tests.preprocess import oracles

_texts = st.builds(TextRun, st.integers(0, 9))


def _check(runs: list[Run], types: list[int], images: list[list[int]], videos: list[list[int]]) -> None:
    positions, delta = mrope_positions(runs)
    if not types:
        assert positions.shape == (3, 0)
        assert delta == 0
        return
    expected, expected_delta = oracles.rope_index(types, images, videos)
    np.testing.assert_array_equal(positions, expected)
    assert positions.dtype == np.int64
    assert delta == expected_delta


@given(st.lists(st.tuples(_texts, st.booleans(), st.integers(1, 6), st.integers(1, 6)), max_size=6), _texts)
def test_vision_runs_without_text_between(items: list[tuple[TextRun, bool, int, int]], last: TextRun) -> None:
    """Empty text at the start, at the end and between two media; the oracle needs two kinds to tell them apart."""
    runs: list[Run] = []
    types: list[int] = []
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    for text, is_video, h, w in items:
        kind = 2 if is_video else 1
        types += [0] * text.num_tokens
        runs.append(text)
        if types and types[-1] == kind:
            continue
        grids[kind].append([1, 2 * h, 2 * w])
        runs.append(VisionRun(1, h, w))
        types += [kind] * (h * w)
    _check([*runs, last], types + [0] * last.num_tokens, grids[1], grids[2])


def test_two_images_in_a_row_worked_out_by_hand() -> None:
    positions, delta = mrope_positions([TextRun(2), VisionRun(1, 1, 3), VisionRun(1, 2, 1), TextRun(1)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 5, 5, 7],
        [0, 1, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 5, 7],
    ]
    assert delta == 0


@pytest.mark.parametrize("run", [TextRun(-1), VisionRun(1, 0, 2), VisionRun(0, 1, 1)])
def test_impossible_runs(run: Run) -> None:
    with pytest.raises(ValueError, match="run"):
        mrope_positions([run])
