"""Sampling's Triton kernels against the twin: the same ids, whichever way the search goes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwen35mm_kernels.gpu import sampling
from qwen35mm_kernels.gpu.launch import Config
from qwen35mm_kernels.gpu.sampling import sample
from qwen35mm_kernels.sampling import SamplingRows, naive_sample
from qwen35mm_kernels.sampling import sample as sample_in_torch
from tests.kernels.compare import moved
from tests.kernels.sampling_cases import CASES, VOCAB, copied, make_case, make_rows, pools


@pytest.fixture(params=[(128, 32), (32, 4)], ids=["one_block", "short_of_candidates"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    block, capacity = request.param
    monkeypatch.setattr(sampling, "_DEFAULT", Config({"BLOCK": block, "CAPACITY": capacity}, 4))


def rows_on(device: torch.device, rows: SamplingRows) -> SamplingRows:
    return SamplingRows(*(tensor.to(device) for tensor in vars(rows).values()))


def on(device: torch.device, seen: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return seen[0].to(device), seen[1].to(device)


def wide_pool(pool: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same pool as a slice of one with longer rows."""
    wide = torch.zeros(pool.shape[0], pool.shape[1] + 9, dtype=torch.bool, device=device)
    wide[:, 4:-5] = pool.to(device)
    return wide[:, 4:-5]


def check_against_twin(case: str, dtype: torch.dtype, device: torch.device) -> None:
    logits, rows, seen, banned = make_case(case, batch=7, dtype=dtype)
    state = wide_pool(seen[0], device), wide_pool(seen[1], device)
    chosen = sample(moved(logits, device), rows_on(device, rows), *state, banned.to(device)).cpu()
    assert torch.equal(chosen, naive_sample(logits, rows, *seen, banned))
    for pool, expected in zip(state, seen, strict=True):
        # Nothing but the chosen ids has changed, nor what lies beside a row of the pool.
        assert torch.equal(pool.cpu(), expected)
        assert pool._base is not None
        assert pool._base.sum() == pool.sum()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("_blocks")
def test_sampling_equals_its_twin(case: str, device: torch.device) -> None:
    check_against_twin(case, torch.float32, device)


@pytest.mark.parametrize("case", ["greedy", "mixed", "ties"])
def test_bfloat16_logits(case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_DEFAULT", Config({"BLOCK": 16, "CAPACITY": 16}, 4))
    check_against_twin(case, torch.bfloat16, device)


def test_many_draws_equal_the_torch_implementation(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_DEFAULT", Config({"BLOCK": 64, "CAPACITY": 16}, 4))
    batch = 40 if device.type == "cpu" else 5000
    logits = torch.randn(VOCAB) * 2
    rows = make_rows(batch, temperature=[0.7, 1.5], top_k=[0, 7, 20], top_p=[1.0, 0.9, 0.6, 0.95, 1.0])
    banned = torch.zeros(VOCAB, dtype=torch.bool).expand(batch, -1)
    expected = sample_in_torch(logits.expand(batch, -1), rows, *pools(batch), banned)
    seen = on(device, pools(batch))
    chosen = sample(logits.to(device).expand(batch, -1), rows_on(device, rows), *seen, banned.to(device))
    assert torch.equal(chosen.cpu(), expected)


def check_real_vocabulary(rows: SamplingRows, device: torch.device) -> None:
    batch, vocab = len(rows.slots), 248_320
    logits = torch.randn(batch, vocab) * 3
    logits[:, 200_000:200_030] += 12
    seen, banned = pools(batch, vocab), (torch.rand(vocab) < 0.01).expand(batch, -1)
    expected = sample_in_torch(logits, rows, *copied(seen), banned)
    assert torch.equal(
        sample(logits.to(device), rows_on(device, rows), *on(device, seen), banned.to(device)).cpu(), expected
    )


def test_the_real_vocabulary_in_the_default_blocks(device: torch.device) -> None:
    check_real_vocabulary(make_rows(2, temperature=[1.0, 0.8], top_k=[20, 0], top_p=[0.95, 1.0]), device)


@pytest.mark.slow
def test_the_real_vocabulary_where_candidates_run_short(device: torch.device) -> None:
    check_real_vocabulary(make_rows(3, temperature=[2.0, 3.0], top_k=[0, 5000, 0], top_p=[0.9, 0.99]), device)


def test_a_draw_depends_on_its_own_row_alone(device: torch.device) -> None:
    logits, rows, seen, banned = make_case("mixed", 3)
    logits, rows, seen, banned = logits.to(device), rows_on(device, rows), on(device, seen), banned.to(device)
    together = sample(logits, rows, *copied(seen), banned)
    for row in range(3):
        alone = SamplingRows(*(tensor[row : row + 1] for tensor in vars(rows).values()))
        assert sample(logits[row : row + 1], alone, *copied(seen), banned[row : row + 1]) == together[row]


def test_zeros_of_both_signs_are_equal(device: torch.device) -> None:
    """-0.0 isn't below 0.0: both pass top-p, and greedy takes the first."""
    logits = torch.full((16, VOCAB), -50.0)
    logits[:, [4, 9]] = torch.tensor([-0.0, 0.0])
    rows, banned = make_rows(16, top_p=0.4), torch.zeros(16, VOCAB, dtype=torch.bool)
    rows = replace(rows, temperature=torch.tensor([0.0] + [1.0] * 15))
    seen = on(device, pools(16))
    chosen = sample(logits.to(device), rows_on(device, rows), *seen, banned.to(device)).tolist()
    assert chosen[0] == 4
    assert set(chosen) == {4, 9}


def test_logits_of_nan_choose_a_token_that_there_is(device: torch.device) -> None:
    logits = torch.full((3, VOCAB), torch.nan, device=device)
    rows = rows_on(device, make_rows(3, temperature=[0.0, 1.0, 1.0], top_k=[0, 0, 5]))
    banned = torch.zeros(3, VOCAB, dtype=torch.bool, device=device)
    chosen = sample(logits, rows, *on(device, pools(3)), banned)
    assert chosen.min() >= 0
    assert chosen.max() < VOCAB


def test_rows_that_are_not_dense_are_refused(device: torch.device) -> None:
    logits, rows, seen, banned = make_case("greedy", 2)
    with pytest.raises(ValueError, match="logits must be dense in its last dimension"):
        sample(logits.t().contiguous().t().to(device), rows_on(device, rows), *on(device, seen), banned.to(device))
