"""Rows to sample from, for the tests of both implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qwen35mm_kernels.sampling import SamplingRows

VOCAB = 97
# Parameters that take turns over the rows of a batch.
CASES: dict[str, dict[str, Sequence[float]]] = {
    "greedy": {"temperature": [0.0], "repetition_penalty": [1.0, 1.5], "presence_penalty": [0.0, 1.0]},
    "temperature": {"temperature": [0.7, 1.0, 3.0]},
    "top_k": {"top_k": [1, 2, 5, 20, 96, 97, 5000]},
    "top_p": {"top_p": [0.05, 0.5, 0.8, 0.95, 0.9999]},
    "min_p": {"min_p": [0.01, 0.2, 1.0]},
    "mixed": {
        "temperature": [1.0, 0.0, 0.6, 2.0],
        "top_k": [20, 0, 3],
        "top_p": [0.8, 1.0, 0.95, 0.3, 1.0],
        "min_p": [0.0, 0.05],
        "repetition_penalty": [1.0, 1.3, 0.7],
        "presence_penalty": [0.0, 1.5, -0.5],
    },
    "flat": {"top_k": [0, 5, 60], "top_p": [0.5, 1.0, 0.9]},
    "ties": {"top_k": [0, 3, 10], "top_p": [1.0, 0.7]},
}


def make_rows(batch: int, **values: float | Sequence[float]) -> SamplingRows:
    """Rows that filter nothing but where `values` says so, which are repeated up to `batch`."""

    def row_values(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        given = values.get(name, default)
        turns = list(given) if isinstance(given, Sequence) else [given]
        return torch.tensor([turns[row % len(turns)] for row in range(batch)], dtype=dtype)

    rows = SamplingRows(
        temperature=row_values("temperature", 1.0, torch.float32),
        top_k=row_values("top_k", 0, torch.int32),
        top_p=row_values("top_p", 1.0, torch.float32),
        min_p=row_values("min_p", 0.0, torch.float32),
        repetition_penalty=row_values("repetition_penalty", 1.0, torch.float32),
        presence_penalty=row_values("presence_penalty", 0.0, torch.float32),
        seeds=torch.arange(batch) * 0x1234567890AB,
        steps=torch.arange(batch) * 7919,
        slots=torch.arange(batch),
    )
    for name in ("seeds", "steps", "slots"):
        if name in values:
            getattr(rows, name).copy_(row_values(name, 0, torch.int64))
    return rows


def pools(num_slots: int, vocab: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing seen: text and reply."""
    return torch.zeros(num_slots, vocab, dtype=torch.bool), torch.zeros(num_slots, vocab, dtype=torch.bool)


def make_case(
    case: str, batch: int, vocab: int = VOCAB, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, SamplingRows, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Logits as a slice, rows with slots in a mixed order, pools with two slots too many, and banned ids per row."""
    rows = make_rows(batch, **CASES[case])
    rows.slots.copy_(torch.randperm(batch + 2)[:batch])
    logits = torch.randn(batch, vocab + 6)[:, 2:-4] * 2
    if case == "flat":
        logits = logits * 1e-3
    elif case == "ties":
        logits = logits.round()
    seen = torch.rand(batch + 2, vocab) < 0.3, torch.rand(batch + 2, vocab) < 0.2
    return logits.to(dtype), rows, seen, torch.rand(batch, vocab) < 0.1


def copied(seen: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return seen[0].clone(), seen[1].clone()
