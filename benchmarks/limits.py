"""The machine's limits, and how much of them a model needs.

A prompt needs floating point operations; a decoded token needs bytes from memory. Counts products with weights,
attention over previous tokens, the recurrence as its formula says, states, keys and values. Norms, activations and
sampling don't count. So a share of the machine's rate is a share of what is possible.

Float products are PyTorch's. Integer products are those of a loop in registers, one for each instruction set.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.frame import synchronize
from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD, VISION_PREFIX, Target, checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.model.load import DTYPES
from qwen35mm.model.weights import bytes_read_per_token
from qwen35mm_kernels.cpu.native.library import NEEDS, find_library, processor_flags

# Rows of a measured product. More rows aren't faster, and with emulated bfloat16 each shape takes a second.
MAX_TOKENS = 512
# Larger than any cache.
READ_BYTES = 1 << 30
_MAX_RUNS, _RUNS_S = 5, 0.2
# Operations for each number of a recurrent state and token: 1 for the decay, 2 each for S^T k, the update and S^T q.
_RECURRENCE_FLOPS = 7

# The instruction sets of integer_peaks.cpp, and the processor flags that each needs.
_INTEGER_SETS = {
    "amx": NEEDS["amx"],
    "avx512_bf16": NEEDS["avx512_bf16"],
    "avx_vnni": ("avx2", "avx_vnni"),
    "avx512": NEEDS["avx512"],
    "avx2": NEEDS["avx2"],
}
_PEAK_ROUNDS = 1_000_000

Shapes = Counter[tuple[int, int]]


def product_shapes(config: ModelConfig) -> Shapes:
    """(rows, columns) of the matrices that multiply each token of a prompt, and how often.

    Matrices with the same input count as one stacked matrix. Excludes the output head: a prompt needs it once.
    """
    stacked: dict[str, list[Target]] = {}
    for target in _text_targets(config):
        if target.name not in (EMBEDDING, LM_HEAD) and len(target.shape) > 1 and "conv1d" not in target.name:
            stacked.setdefault(target.parameter, []).append(target)
    shapes: Shapes = Counter()
    for members in stacked.values():
        *experts, _, columns = members[0].shape
        rows = sum(member.shape[-2] for member in members)
        shapes[rows, columns] += config.text.moe.num_experts_per_tok if experts and config.text.moe else 1
    return shapes


def prefill_flops(config: ModelConfig, length: int) -> float:
    """Floating point operations of a prompt of `length` tokens, including the logits of the last one."""
    text = config.text
    products = sum(2 * rows * columns * count for (rows, columns), count in product_shapes(config).items())
    conv = 2 * text.conv_dim * text.linear_conv_kernel_dim
    state = _RECURRENCE_FLOPS * text.value_dim * text.linear_key_head_dim
    # q . k and p . v, for each query with itself and the tokens before it.
    attention = 4 * text.num_attention_heads * text.head_dim * (length + 1) / 2
    mixers = len(text.linear_layers) * (conv + state) + len(text.attention_layers) * attention
    return length * (products + mixers) + 2 * text.vocab_size * text.hidden_size


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, integers: str | None = None, devices: Sequence[torch.device] = ()
) -> float:
    """Bytes of weights that decoding a token reads; `integers` as for `load_model`."""
    targets = {target.name: target for target in _text_targets(config)}
    return bytes_read_per_token(config, targets, dtype, integers, devices)


def cache_bytes(config: ModelConfig, num_tokens: float, kv_dtype: torch.dtype, conv_dtype: torch.dtype) -> float:
    """Bytes of states, keys and values that decoding a token after `num_tokens` tokens reads."""
    return config.state_bytes(conv_dtype) + num_tokens * config.kv_bytes_per_token(kv_dtype)


def _text_targets(config: ModelConfig) -> list[Target]:
    targets = checkpoint_targets(config, separate_head=not config.tie_word_embeddings, split_experts=False)
    return [target for target in targets if not target.name.startswith(VISION_PREFIX)]


def integer_rate(name: str) -> str:
    """The title of an instruction set's rate."""
    return f"{name} integers, GOP/s"


def integer_peaks(num_threads: int) -> dict[str, float]:
    """Multiplications and additions of 8-bit integers a second by instruction set, in registers of all threads.

    Only this processor's sets. Empty without a compiler of C++.
    """
    functions = _peak_functions()
    rates: dict[str, float] = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for name, function in functions.items():
            runs: list[float] = []
            for _ in range(3):
                started_s = time.perf_counter()
                operations = sum(pool.map(function, [_PEAK_ROUNDS] * num_threads))
                runs.append(operations / (time.perf_counter() - started_s))
            rates[name] = max(runs)
    return rates


@functools.cache
def _peak_functions() -> dict[str, Callable[[int], float]]:
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    names = [name for name, flags in _INTEGER_SETS.items() if processor_flags().issuperset(flags)]
    if compiler is None or not names:
        return {}
    find_library()  # asks the system for AMX's tiles
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peaks.so"
        source = Path(__file__).with_name("integer_peaks.cpp")
        subprocess.run([compiler, "-std=c++17", "-O2", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
    functions: dict[str, Callable[[int], float]] = {}
    for name in names:
        function = library[f"peak_{name}"]
        function.argtypes, function.restype = [ctypes.c_long], ctypes.c_double
        functions[name] = function
    return functions


class Limits:
    """Measures the machine, in turns with the engines."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        config = ModelConfig.from_pretrained(arguments.model)
        self._shapes = product_shapes(config)
        self._device = torch.device(arguments.device)
        self._data = torch.ones(READ_BYTES // 4, device=self._device)

    @torch.inference_mode()
    def measure(self, length: int) -> dict[str, float]:
        """Rates by title: PyTorch's products at a prompt's shapes, in GFLOP/s, and reads of a sum, in GB/s."""
        # The fastest two of twenty ways to read. Which of them is faster depends on the processor.
        seconds = min(self._best_s(values.sum) for values in (self._data, self._data.view(torch.int64)))
        rates = {f"{name}, GFLOP/s": self._products(min(length, MAX_TOKENS), DTYPES[name]) / 1e9 for name in DTYPES}
        integers = integer_peaks(torch.get_num_threads()) if self._device.type == "cpu" else {}
        rates |= {integer_rate(name): rate / 1e9 for name, rate in integers.items()}
        return {**rates, "reads, GB/s": READ_BYTES / seconds / 1e9}

    def _products(self, num_tokens: int, dtype: torch.dtype) -> float:
        """Operations a second over all products, each computed in PyTorch's fastest way."""
        flops = seconds = 0.0
        for (rows, columns), count in self._shapes.items():
            weight = torch.randn(rows, columns, device=self._device).to(dtype)
            x = torch.randn(num_tokens, columns, device=self._device).to(dtype)
            flops += count * 2 * num_tokens * rows * columns
            seconds += count * min(self._best_s(product) for product in products(x, weight))
        return flops / seconds

    def _best_s(self, run: Callable[[], object]) -> float:
        """Seconds of the fastest run, without the first."""
        seconds = []
        for number in range(1 + _MAX_RUNS):
            started_s = time.perf_counter()
            run()
            synchronize(self._device)
            seconds += [time.perf_counter() - started_s] if number else []
            if sum(seconds) > _RUNS_S:
                break
        return min(seconds)


def products(x: torch.Tensor, weight: torch.Tensor) -> Iterator[Callable[[], object]]:
    """PyTorch's ways to multiply x [T, columns] by weight [rows, columns]."""
    yield lambda: F.linear(x, weight)
    if weight.dtype != torch.float32:
        # Faster if the processor only emulates the dtype.
        yield lambda: F.linear(x.float(), weight.float())
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
        except RuntimeError:
            return  # a processor without instructions for this dtype
        yield lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
