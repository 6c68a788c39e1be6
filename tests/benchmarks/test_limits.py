"""The machine's limits are rates of work that was done: of every way that torch has, and of memory that was read."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from benchmarks import limits
from benchmarks.limits import Limits, products
from qwen35mm.assets import demo_model_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_computes_the_product(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(48, 64).to(dtype)
    ways = [run() for run in products(x, weight)]
    assert len(ways) >= (1 if dtype == torch.float32 else 2)
    for out in ways:
        assert isinstance(out, torch.Tensor)
        assert torch.allclose(out.float(), x.float() @ weight.float().T, rtol=0.02, atol=0.1)


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    machine = Limits(Namespace(model=str(demo_model_path()), device="cpu"))
    # Each product and each read takes a second.
    monkeypatch.setattr(machine, "_best_s", lambda run: 1.0)
    rates, shapes = machine.measure(8192), machine._shapes
    flops = sum(2 * limits.MAX_TOKENS * rows * columns * count for (rows, columns), count in shapes.items())
    assert rates["float32_flops_per_s"] == rates["bfloat16_flops_per_s"] == pytest.approx(flops / shapes.total())
    assert rates["read_bytes_per_s"] == 1 << 20
    assert machine.measure(16)["float32_flops_per_s"] == pytest.approx(rates["float32_flops_per_s"] * 16 / 512)


def test_everything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_RUNS_S", 0.0)
    machine = Limits(Namespace(model=str(demo_model_path()), device="cpu"))
    assert set(machine.measure_tower(64)) == {"bfloat16_flops_per_s", "float32_flops_per_s"}
    assert all(rate > 0 for rate in (*machine.measure(20).values(), *machine.measure_tower(64).values()))
