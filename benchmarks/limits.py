"""What a machine can do: the rate of torch's products at a model's shapes, and how fast memory is read."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.work import product_shapes, vision_shapes
from qwen35mm.config import ModelConfig
from qwen35mm.model.load import DTYPES

# Rows of a product: more bring nothing, and where bfloat16 is emulated each shape takes a second.
MAX_TOKENS = 512
# More than any cache holds.
READ_BYTES = 1 << 30
_MAX_RUNS, _RUNS_S = 5, 0.2


class Limits:
    """Measured in turns with the engines, so that a machine that slows down does so for its limits too."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        config = ModelConfig.from_pretrained(arguments.model)
        self._shapes, self._vision_shapes = product_shapes(config), vision_shapes(config)
        self._patch_size = config.vision.patch_size
        self._device = torch.device(arguments.device)
        self._data = torch.ones(READ_BYTES // 4, device=self._device)

    @torch.inference_mode()
    def measure(self, length: int) -> dict[str, float]:
        """Operations a second of a prompt's products, and bytes a second that are read."""
        # Sums were the fastest of twenty ways to read. That of 64-bit integers reads several places at once, as a
        # processor's prefetchers like it, that of floats only one; which is faster differs.
        seconds = min(self._best_s(values.sum) for values in (self._data, self._data.view(torch.int64)))
        return {**self._both(self._shapes, length), "read_bytes_per_s": READ_BYTES / seconds}

    @torch.inference_mode()
    def measure_tower(self, side: int) -> dict[str, float]:
        """Operations a second of the vision tower's products, for a picture of so many pixels a side."""
        return self._both(self._vision_shapes, (side // self._patch_size) ** 2)

    def _both(self, shapes: Counter[tuple[int, int]], num_rows: int) -> dict[str, float]:
        num_tokens = min(num_rows, MAX_TOKENS)
        return {f"{name}_flops_per_s": self._products(shapes, num_tokens, dtype) for name, dtype in DTYPES.items()}

    def _products(self, shapes: Counter[tuple[int, int]], num_tokens: int, dtype: torch.dtype) -> float:
        """Each product the fastest way that torch has."""
        flops, seconds = 0.0, 0.0
        for (rows, columns), count in shapes.items():
            weight = torch.randn(rows, columns, device=self._device).to(dtype)
            x = torch.randn(num_tokens, columns, device=self._device).to(dtype)
            flops += count * 2 * num_tokens * rows * columns
            seconds += count * min(self._best_s(product) for product in products(x, weight))
        return flops / seconds

    def _best_s(self, run: Callable[[], object]) -> float:
        """Seconds of the fastest of some runs, after one that isn't counted."""
        seconds = []
        for round_number in range(1 + _MAX_RUNS):
            started_s = time.perf_counter()
            run()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds += [time.perf_counter() - started_s] if round_number else []
            if sum(seconds) > _RUNS_S:
                break
        return min(seconds)


def products(x: torch.Tensor, weight: torch.Tensor) -> Iterator[Callable[[], object]]:
    """The ways that torch has for x [T, columns] and weight [rows, columns]: as they are, in float32, and packed."""
    yield lambda: F.linear(x, weight)
    if weight.dtype != torch.float32:
        # Where a processor only emulates the dtype, far more.
        yield lambda: F.linear(x.float(), weight.float())
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
        except RuntimeError:
            return  # a processor without instructions for this dtype
        yield lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
