"""What the engine chooses where nothing is asked for."""

from __future__ import annotations

import pytest
import torch

from qwen35mm.engine import EngineSettings
from qwen35mm.engine.settings import decode_rows

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "asked", "rows"),
    [
        (CPU, torch.float32, None, 3),
        (CPU, torch.bfloat16, None, None),
        (CUDA, torch.bfloat16, None, None),
        (CPU, torch.bfloat16, True, 3),
        (CUDA, torch.bfloat16, True, 3),
        (CPU, torch.float32, False, None),
    ],
)
def test_the_batch_invariant_mode_is_on_where_it_costs_little(
    device: torch.device, dtype: torch.dtype, asked: bool | None, rows: int | None
) -> None:
    assert decode_rows(EngineSettings(slots=3, batch_invariant=asked), device, dtype) == rows


def test_pieces_are_larger_on_a_gpu() -> None:
    assert EngineSettings().piece_tokens_on(CPU) == 512
    assert EngineSettings().piece_tokens_on(CUDA) == 2048
    assert EngineSettings(piece_tokens=64).piece_tokens_on(CUDA) == 64
