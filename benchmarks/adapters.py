"""What adapters beside the weights cost: a decode step of four replies with none, one and four of them, and a prefill.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.adapters --model /tmp/random-0.8B

The adapters are random, for every linear layer of the decoder. A merged adapter costs nothing, so it isn't measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.frame import Rows, Spread, parse, parser, report, synchronize
from benchmarks.peers import random_ids
from qwen35mm.cache import CachePools
from qwen35mm.checkpoints.tensor_names import TEXT_PREFIX, checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.model import load
from qwen35mm.model.load import DTYPES

ROWS, PROMPT = 4, 512
# By case, each row's adapter.
STEPS = {"0 adapters": None, "1 adapter": (1,) * ROWS, "4 adapters": (1, 2, 3, 4)}


def write_adapter(folder: Path, config: ModelConfig, rank: int) -> Path:
    """A random adapter for every linear layer of the decoder."""
    folder.mkdir()
    names = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(names), encoding="utf-8")
    tensors = {}
    for target in checkpoint_targets(config, separate_head=False, split_experts=False):
        module, mark, _ = target.name.rpartition("_proj")
        is_linear = mark or ".linear_attn.in_proj_" in target.name
        if not target.name.startswith(f"{TEXT_PREFIX}layers.") or len(target.shape) != 2 or not is_linear:
            continue
        module = f"base_model.model.{target.name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = (torch.randn(rank, target.shape[1]) * 0.01).bfloat16()
        tensors[f"{module}.lora_B.weight"] = (torch.randn(target.shape[0], rank) * 0.01).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class Bench:
    """A model with four adapters, its cache, and a step for each case."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        config = ModelConfig.from_pretrained(arguments.model)
        with tempfile.TemporaryDirectory() as folder:
            lora = {str(n): write_adapter(Path(folder) / str(n), config, arguments.rank) for n in range(1, 5)}
            how = {"dtype": arguments.dtype, "device": arguments.device, "weights": arguments.weights}
            self.model = load(arguments.model, lora=lora, **how).model
        num_tokens = ROWS * (PROMPT + 64)
        devices = self.model.layer_devices
        self.pools = CachePools(
            config, num_slots=ROWS, num_tokens=num_tokens, dtype=DTYPES[arguments.dtype], device=devices
        )
        self._sampler = Sampler(ROWS, config.text.vocab_size, [], self.model.head_device)
        self._steps: dict[tuple[int, str], StepGraph] = {}

    def step(self, rows: int, case: str) -> float:
        """Seconds of a decode step."""
        adapters = STEPS[case]
        if (rows, case) not in self._steps:
            how: dict[str, Any] = {"adapters": adapters and adapters[:rows]}
            self._steps[rows, case] = StepGraph(self.model, self.pools, self._sampler, rows, 16, **how)
        graph, caches = self._steps[rows, case], [self.pools.new_sequence() for _ in range(rows)]
        inputs = graph.inputs(0)
        for row, cache in enumerate(caches):
            cache.prepare(1)
            inputs.set(row, cache, token_id=7 + row)
        return self._timed(lambda: (graph.run(0), graph.token_ids(0)), caches)

    def prefill(self, case: str) -> float:
        """Seconds of a chunk."""
        cache, device = self.pools.new_sequence(), self.model.device
        cache.prepare(PROMPT)
        embeds = self.model.embed_tokens(random_ids(PROMPT).to(device))
        positions = torch.arange(PROMPT, device=device).expand(3, -1)
        groups = () if case == "0 adapters" else self.model.routes.groups_of([1])
        batch = prefill_batch(cache, embeds, positions, groups)
        return self._timed(lambda: self.model(batch), [cache])

    def _timed(self, run: Any, caches: list[Any]) -> float:
        synchronize(self.model.device)
        started_s = time.perf_counter()
        run()
        synchronize(self.model.device)
        seconds = time.perf_counter() - started_s
        for cache in caches:
            cache.free()
        return seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--weights", default="bf16", help="As for chat.")
    options.add_argument("--rank", type=int, default=16, help="Of the adapters.")
    arguments = parse(options)
    with torch.inference_mode():
        bench = Bench(arguments)
        cases = [
            *itertools.product(("step of 4 rows", "step of 1 row"), STEPS),
            *itertools.product(("prefill",), STEPS),
        ]
        cases = [(what, case) for what, case in cases if what == "step of 4 rows" or case != "4 adapters"]
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in cases}
        # In turns, so that a machine that slows down slows all; the first turn warms up.
        for turn in range(1 + 8 * arguments.repeats):
            for what, case in cases:
                rows = 4 if what == "step of 4 rows" else 1
                found = bench.prefill(case) if what == "prefill" else bench.step(rows, case)
                if turn:
                    seconds[what, case].append(found)
    table: Rows = []
    for (what, case), found in seconds.items():
        own = Spread.of(1000 * each for each in found)
        plain = Spread.of(1000 * each for each in seconds[what, "0 adapters"])
        table.append({"what": what, "adapters": case, "ms": own, "times": own.median / plain.median})
    report("adapters", arguments, {"adapters beside the weights": table})


if __name__ == "__main__":
    main()
