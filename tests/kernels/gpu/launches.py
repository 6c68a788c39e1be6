"""Which variants of which kernels are launched, found without a card: on meta tensors, which have shapes alone.

All is as on a card, up to where Triton would compile: its own launcher decides which arguments become constants, and
which are known to be divisible by 16. Whatever would wait for the device (a number read back, a mask that decides a
shape) is an error on meta tensors. Runs as a child, because here kernels are interpreted.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tests.kernels.gpu.compiled import SHARED_BYTES, Variant, run_child

NUM_LAYERS = 4
# What a warm turn goes on from.
HISTORY = 16_384
# One for each form of a product with eight-bit floats.
FP8_ROWS = (1, 3, 16, 100, 2048)
# The same with integers: rows, bits, columns of a group, and whether it has a minimum.
INTEGERS = (
    (1, 8, 32, False),
    (3, 8, 32, False),
    (1, 4, 128, True),
    (3, 4, 128, True),
    (16, 4, 32, False),
    (64, 8, 128, False),
    (2048, 4, 128, True),
)
# Tokens for each number of rows of an expert's tile, of 8 in 256 experts.
EXPERT_ROWS = (1, 2048, 4096)

# What is run, and its name.
Runs = Iterator[tuple[str, Callable[[], object]]]


def launched(
    size: str,
    *,
    lengths: Sequence[int],
    batches: Sequence[int],
    dtype: str = "bfloat16",
    kv_dtype: str = "auto",
    capability: int = 90,
) -> dict[str, list[Variant]]:
    """The variants that some layers of a model launch, by "prefill T", "turn", "step B" and "vision".

    Args:
        size: of `benchmarks.make_random`.
        lengths: tokens of the prefills, which sampling the first token follows.
        batches: rows of the decode steps.
        kv_dtype: what keys and values are kept as.
    """
    task = {"size": size, "lengths": [*lengths], "batches": [*batches], "dtype": dtype, "capability": capability}
    task["kv_dtype"] = kv_dtype
    answer = run_child(__file__, task)
    return {name: [Variant(**variant) for variant in variants] for name, variants in answer.items()}


def _record(runs: Runs, capability: int) -> dict[str, list[dict[str, Any]]]:
    """Each run's variants, every one once and in one order; nothing is compiled."""
    from triton import knobs, runtime

    from benchmarks.tuning import TargetDriver
    from qwen35mm_kernels import backend
    from qwen35mm_kernels.gpu import launch

    variants: dict[str, dict[str, Any]] = {}

    def before_compilation(**launched: Any) -> bool:
        variant = asdict(_variant(launched["fn"], launched["compile"]))
        variants[json.dumps(variant, sort_keys=True)] = variant
        return True  # as if it were compiled already, so that nothing runs

    launch._INTERPRETED_CAPABILITY = capability
    launch._INTERPRETED_SHARED_BYTES = SHARED_BYTES[capability]
    driver: Any = TargetDriver(capability)
    runtime.driver.set_active(driver)
    knobs.runtime.jit_cache_hook = before_compilation
    backend.why_not_triton = lambda device_type: None
    # The model's modules take `why_not_triton` as they are imported.
    from qwen35mm.engine import pieces

    pieces.pads_pieces = lambda devices: True
    found = {}
    for name, run in runs:
        variants.clear()
        run()
        found[name] = [variants[key] for key in sorted(variants)]
    return found


def _variant(fn: Any, compile: dict[str, Any]) -> Variant:
    names = list(compile["signature"])
    constants = {names[path[0]]: value for path, value in compile["constants"].items()}
    signature = {name: kind for name, kind in compile["signature"].items() if name not in constants}
    for path, attributes in compile["configs"][0].items():
        if ["tt.divisibility", 16] in attributes:
            signature[names[path[0]]] += ":16"
    return Variant(f"{fn.module}:{fn.name}", signature, constants, compile["num_warps"], compile["num_stages"])


def _multiply_fp8(num_in: int, num_rows: int) -> None:
    """A product with a matrix of blocks; what a model of such matrices launches besides."""
    import torch

    from qwen35mm_kernels import gpu

    meta = torch.device("meta")
    values = torch.empty(2048, num_in, dtype=torch.float8_e4m3fn, device=meta)
    scales = torch.empty(16, num_in // 128, device=meta)
    gpu.fp8_linear(torch.empty(num_rows, num_in, dtype=torch.bfloat16, device=meta), values, scales)


def _multiply_integers(num_in: int, num_rows: int, bits: int, width: int, has_minima: bool, dtype: Any) -> None:
    """A product with a matrix of integers; what a model of such matrices launches besides."""
    import torch

    from qwen35mm_kernels import gpu

    meta = torch.device("meta")
    words = torch.empty(2048, num_in // 32 * bits, dtype=torch.int32, device=meta)
    scales = torch.empty(2048, num_in // width, device=meta)
    minima = torch.empty_like(scales) if has_minima else None
    x = torch.empty(num_rows, num_in, dtype=dtype, device=meta)
    gpu.integer_linear(x, words, scales, minima, bits=bits, width=width)


def _multiply_experts(text: Any, num_rows: int, integers: str, dtype: Any) -> None:
    """A layer's experts in integers, or in FP8 as checkpoints have it."""
    import torch

    from qwen35mm.model.mlp import Experts
    from qwen35mm.model.weight_formats import Factory, StoredWeight
    from qwen35mm_kernels.reference.fp8 import Blocks

    meta, count = torch.device("meta"), text.moe.num_experts_per_tok
    experts = Experts(text.hidden_size, text.moe, Factory(dtype, meta, integers), None)
    for weight in (experts.gate_up_proj, experts.down_proj):
        if isinstance(weight, StoredWeight):
            each = weight.out_features // text.moe.num_experts
            weight.lay_out([(each, Blocks(128))] * text.moe.num_experts)
    x, weights = (torch.empty(num_rows, width, dtype=dtype, device=meta) for width in (text.hidden_size, count))
    experts(x, torch.empty(num_rows, count, dtype=torch.int64, device=meta), weights)


def _piece(engine: Any, length: int, history: int = 0) -> None:
    with engine.piece(length, history) as run:
        run()


def _engine_runs(size: str, dtype: str, lengths: list[int], batches: list[int], capability: int, kv_dtype: str) -> Runs:
    import torch

    from benchmarks.launch_counts import META, BareEngine, shallow
    from qwen35mm.model.mlp import MLP
    from qwen35mm.model.weight_formats import FP8, Factory

    engine = BareEngine(shallow(size, NUM_LAYERS, 1, dtype), kv_dtype=kv_dtype, num_rows=max(batches))
    config, model = engine.config, engine.model
    for length in lengths:
        yield f"prefill {length}", functools.partial(_piece, engine, length)
    yield "turn", functools.partial(_piece, engine, 64, HISTORY)
    for batch in batches:
        yield f"step {batch}", lambda batch=batch: engine.step(batch).compute()
    if capability >= 89:
        for rows in FP8_ROWS:
            yield f"fp8 {rows}", functools.partial(_multiply_fp8, config.text.hidden_size, rows)
    for kind in INTEGERS:
        run = functools.partial(_multiply_integers, config.text.hidden_size, *kind, model.dtype)
        yield f"integers {kind}", run
    if config.text.moe is not None:
        for rows, integers in itertools.product(EXPERT_ROWS, ("int8", "int4") + (FP8,) * (capability >= 89)):
            yield (
                f"experts {rows} {integers}",
                functools.partial(_multiply_experts, config.text, rows, integers, model.dtype),
            )
    embeds = torch.empty(3, config.text.hidden_size, dtype=model.dtype, device=META)
    # What a mixture's layer launches where its shared expert stands apart, and a dense one's.
    yield "mlp", functools.partial(MLP(config.text.hidden_size, 512, Factory(model.dtype, META)), embeds)
    yield "vision", functools.partial(engine.embed, (8, 32, 32))


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps(_record(_engine_runs(**task), task["capability"])))
