"""Which variants of which kernels a model launches, found without a card: on meta tensors, which have shapes alone.

Whatever would wait for the device (a number read back, a mask that decides a shape) is an error on them. Runs as a
child, because here kernels are interpreted.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
NUM_LAYERS = 4
CONTEXT_LENGTH = 4096


def launched(size: str, *, lengths: list[int], batches: list[int]) -> dict[str, list[str]]:
    """The variants that prefills and decode steps of some layers of a model launch, by "prefill T" and "step B".

    Args:
        size: of `benchmarks.make_random`.
        lengths: tokens of the prefills.
        batches: rows of the steps.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "preprocess")])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    task = json.dumps({"size": size, "lengths": lengths, "batches": batches})
    done = subprocess.run(
        [sys.executable, __file__], input=task, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _run(size: str, lengths: list[int], batches: list[int]) -> dict[str, list[str]]:
    import torch

    from benchmarks.make_random import make_config
    from qwen35mm.cache import CachePools
    from qwen35mm.config import ModelConfig
    from qwen35mm.engine.slot_tables import SlotTables
    from qwen35mm.engine.step_graph import StepGraph
    from qwen35mm.model import Qwen35Model
    from qwen35mm_kernels import dispatch

    variants: set[str] = set()
    _record_launches(variants)
    dispatch._BACKENDS = {"triton": lambda device_type: None, "torch": lambda device_type: None}
    data = make_config(size, "bfloat16")
    text = data["text_config"]
    text["num_hidden_layers"], text["layer_types"] = NUM_LAYERS, text["layer_types"][:NUM_LAYERS]
    config, device = ModelConfig.from_dict(data), torch.device("meta")
    model = Qwen35Model(config, dtype=torch.bfloat16, device=device)
    pools = CachePools(config, num_slots=1, num_tokens=CONTEXT_LENGTH, dtype=torch.bfloat16, device=device)
    tables = SlotTables(1, config.text.vocab_size, [], device)
    found = {}
    for length in lengths:
        variants.clear()
        cache = pools.new_sequence()
        positions = torch.zeros(3, length, dtype=torch.int64, device=device)
        model.prefill(model.embed_tokens(positions[0]), positions, cache)
        cache.free()
        found[f"prefill {length}"] = sorted(variants)
    for batch in batches:
        variants.clear()
        StepGraph(model, pools, tables, batch, pools.kv.blocks_for(CONTEXT_LENGTH))
        found[f"step {batch}"] = sorted(variants)
    return found


def _record_launches(variants: set[str]) -> None:
    """Has every kernel note its variant in `variants` in place of running."""
    from qwen35mm_kernels.gpu import launch as launching

    def launch(kernel: Any, grid: Any, *args: Any, config: Any, **constants: Any) -> None:
        described = [_variant(parameter, value) for parameter, value in zip(kernel.params, args, strict=False)]
        options = {**config.blocks, **constants, "warps": config.num_warps, "stages": config.num_stages}
        variants.add(f"{kernel.fn.__name__}({', '.join(described)}; {options})")

    launching.launch = launch
    importlib.import_module("qwen35mm_kernels.gpu.all")  # takes the function from there


def _variant(parameter: Any, value: Any) -> str:
    """What Triton compiles a kernel anew for: types, None, multiples of 16 bytes, and whole numbers' kinds."""
    import torch

    if isinstance(value, torch.Tensor):
        start = value.storage_offset() * value.element_size()
        aligned = start % 16 == 0 and not parameter.do_not_specialize_on_alignment
        return f"{parameter.name}: {value.dtype}{' x 16' if aligned else ''}"
    if isinstance(value, int) and not parameter.do_not_specialize:
        return f"{parameter.name}: {1 if value == 1 else 'x 16' if value % 16 == 0 else 'int'}"
    return f"{parameter.name}: {type(value).__name__}"


if __name__ == "__main__":
    print(json.dumps(_run(**json.load(sys.stdin))))
