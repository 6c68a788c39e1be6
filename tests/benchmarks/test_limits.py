"""The limits: sums by hand from the sizes of the family, rates of work that was done, and the bytes of a GGUF."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from safetensors import safe_open

from benchmarks import limits
from benchmarks.limits import Limits, cache_bytes, prefill_flops, product_shapes, products, weight_bytes
from benchmarks.make_random import make_config
from qwen35mm.assets import demo_model_path
from qwen35mm.checkpoints.tensor_names import MTP_PREFIX
from qwen35mm.config import ModelConfig
from qwen35mm.model.load import DTYPES
from qwen35mm_kernels.cpu.native.library import processor_flags

# As llama-bench counts the parameters of its GGUF of 0.8B.
NUM_PARAMETERS = 752_393_024


def config_of(size: str) -> ModelConfig:
    return ModelConfig.from_dict(make_config(size, "bfloat16"))


def test_products_are_stacked_by_their_input() -> None:
    assert product_shapes(config_of("0.8B")) == {
        (2 * 16 * 128 + 2 * 16 * 128 + 2 * 16, 1024): 18,  # q, k; v, z; b, a
        (1024, 2048): 18 + 6,  # both mixers' last product
        (2 * 8 * 256 + 2 * 2 * 256, 1024): 6,  # queries and gates; keys and values
        (2 * 3584, 1024): 24,
        (1024, 3584): 24,
    }
    # Experts count as often as they are chosen, and the shared one is as wide as the others.
    shapes = product_shapes(config_of("35B-A3B"))
    assert (shapes[2 * 512, 2048], shapes[2048, 512]) == (40 * 9, 40 * 9)
    assert (shapes[256, 2048], shapes[1, 2048]) == (40, 40)


def test_operations_of_a_prompt() -> None:
    weights = 497_614_848  # the sum of the shapes above
    conv, state, head = 18 * 6144 * 4, 18 * 16 * 128 * 128, 248_320 * 1024
    for length, num_pairs in ((1, 1), (512, 131_328)):
        attention = 6 * 8 * 256 * num_pairs
        operations = length * (2 * weights + 2 * conv + 7 * state) + 4 * attention + 2 * head
        assert prefill_flops(config_of("0.8B"), length) == operations


def test_bytes_that_a_token_reads() -> None:
    config = config_of("0.8B")
    assert weight_bytes(config, torch.bfloat16) == 2 * NUM_PARAMETERS, "the embedding table is the head"
    state, conv = 18 * 16 * 128 * 128 * 4, 18 * 6144 * 3
    assert cache_bytes(config, 100.5, torch.float16, torch.float32) == state + 4 * conv + 100.5 * 12 * 1024
    untied = weight_bytes(config_of("9B"), torch.float32) / 4
    assert untied == pytest.approx(9.4e9 - 0.46e9 - 248_320 * 4096, rel=0.02), "all but the tower and the table"
    chosen = weight_bytes(config_of("35B-A3B"), torch.bfloat16) / 2
    assert chosen == pytest.approx(2.95e9, rel=0.01), "the A3B of its name"


def test_the_bundled_checkpoint_has_so_many_bytes() -> None:
    with safe_open(demo_model_path() / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".visual." not in name]  # noqa: SIM118
        tensors = [file.get_tensor(name) for name in names if not name.startswith(MTP_PREFIX)]
    config = ModelConfig.from_pretrained(demo_model_path())
    assert weight_bytes(config, torch.bfloat16) == sum(2 * tensor.numel() for tensor in tensors)


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
    assert [rates[f"{name}, GFLOP/s"] * 1e9 for name in DTYPES] == pytest.approx([flops / shapes.total()] * len(DTYPES))
    assert rates["reads, GB/s"] * 1e9 == 1 << 20
    assert machine.measure(16)["float32, GFLOP/s"] == pytest.approx(rates["float32, GFLOP/s"] * 16 / 512)


def test_integer_peaks_are_this_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_PEAK_ROUNDS", 1000)
    peaks = limits.integer_peaks(2)
    if not peaks:
        pytest.skip("needs a compiler of C++ and x86")
    assert peaks.keys() == {n for n, flags in limits._INTEGER_SETS.items() if processor_flags().issuperset(flags)}
    assert all(rate > 0 for rate in peaks.values())
