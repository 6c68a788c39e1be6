"""Prefill and decode speed and peak memory, ours and transformers' in one run.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.prefill_decode --model /tmp/random-0.8B --peer transformers

Prefill multiplies large matrices and is bound by arithmetic; decode reads every weight for one token and is bound by
memory bandwidth. Each engine lives in a process of its own; they are measured in turns, one length after the other,
so that a machine that slows down does so for both. The prompt is random text in one piece, ending in the logits of
its last token; then tokens are decoded greedily. On a GPU ours decodes as the engine does, by CUDA graphs and one step
ahead of the host; the peer takes flash-linear-attention and causal-conv1d where they are installed, and where it takes
each operation of a Gated DeltaNet layer from is told.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

import torch

from benchmarks.engines import TransformersPeer, print_operations
from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from benchmarks.worker import Worker, in_turns, numbers, parser, set_threads
from qwen35mm.cache import CachePools
from qwen35mm.config import ModelConfig
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.model.load import DTYPES
from qwen35mm.model.weights import load_model


class Ours:
    """The model, its cache and its decode step, without an engine around them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._num_decoded, dtype = arguments.decode_tokens, DTYPES[arguments.dtype]
        config = ModelConfig.from_pretrained(arguments.model)
        self.model = load_model(arguments.model, config, dtype=dtype, device=arguments.device)
        max_tokens = max(arguments.lengths) + self._num_decoded
        devices = self.model.layer_devices
        self.pools = CachePools(config, num_slots=1, num_tokens=max_tokens, dtype=dtype, device=devices)
        self.cache = self.pools.new_sequence()
        # A slot that nobody was admitted to takes the likeliest token.
        sampler = Sampler(1, config.text.vocab_size, [], self.model.head_device)
        self.graph = StepGraph(self.model, self.pools, sampler, 1, self.pools.kv.blocks_for(max_tokens))

    def measure(self, length: int) -> dict[str, Any]:
        """Seconds of a prompt's prefill and of each token after it, and this process's peak memory."""
        ids, started_s = random_ids(length), time.perf_counter()
        token_id = self._prefill(ids)
        prefill_s = time.perf_counter() - started_s
        decode = self._decode_one_by_one if self.model.device.type == "cpu" else self._decode_ahead
        return {"prefill_s": prefill_s, "decode_s": decode(token_id), "peak_bytes": peak_bytes(self.model.device)}

    def _prefill(self, token_ids: torch.Tensor) -> int:
        self.cache.free()
        self.cache = self.pools.new_sequence()
        self.cache.prepare(len(token_ids))
        positions = torch.arange(len(token_ids)).expand(3, -1).to(self.model.device)
        embeds = self.model.embed_tokens(token_ids.to(self.model.device))
        hidden = self.model(prefill_batch(self.cache, embeds, positions))
        self.cache.advance(len(token_ids))
        return int(self.model.logits(hidden[-1:]).argmax())

    def _decode_one_by_one(self, token_id: int) -> list[float]:
        seconds = []
        for _ in range(self._num_decoded):
            started_s = time.perf_counter()
            self._launch(token_id, 0)
            token_id = self.graph.token_ids(0)[0]
            seconds.append(time.perf_counter() - started_s)
        return seconds

    def _decode_ahead(self, token_id: int) -> list[float]:
        """As the engine does on a GPU: a step is launched before the one before is read."""
        started_s = time.perf_counter()
        for step in range(self._num_decoded):
            self._launch(token_id if step == 0 else None, step)
            if step:
                self.graph.token_ids(1 - step % 2)
        self.graph.token_ids((self._num_decoded - 1) % 2)
        # Steps overlap: only all of them together have a time.
        return [(time.perf_counter() - started_s) / self._num_decoded] * self._num_decoded

    def _launch(self, token_id: int | None, step: int) -> None:
        self.cache.prepare(1)
        self.graph.inputs(step % 2).set(0, self.cache, token_id=token_id, step=step + 1)
        self.graph.run(step % 2)
        self.cache.advance(1)


class Transformers(TransformersPeer):
    """The model's own forward, with its cache."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self._num_decoded = arguments.decode_tokens

    @torch.inference_mode()
    def measure(self, length: int) -> dict[str, Any]:
        """Like `Ours.measure`."""
        ids, past, seconds = random_ids(length)[None], None, []
        for _ in range(1 + self._num_decoded):
            started_s = time.perf_counter()
            output = self.hf_model(ids.to(self.device), past_key_values=past, use_cache=True, logits_to_keep=1)
            past, ids = output.past_key_values, torch.tensor([[int(output.logits[0, -1].argmax())]])
            seconds.append(time.perf_counter() - started_s)
        peak = peak_bytes(torch.device(self.device))
        return {"prefill_s": seconds[0], "decode_s": seconds[1:], "peak_bytes": peak}


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(0, 900, (length,), generator=torch.Generator().manual_seed(length))


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process so far: of the GPU where it runs on one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


ENGINES = {"qwen35mm": Ours, "transformers": Transformers}


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--peer", choices=["transformers"], help="measure this engine as well")
    options.add_argument("--lengths", type=numbers, default=[128, 512, 2048])
    options.add_argument("--decode-tokens", type=int, default=16)
    options.add_argument("--repeats", type=int, default=3)
    return options.parse_args(argv)


def main() -> None:
    arguments = parse(sys.argv[1:])
    set_threads(arguments)
    info = machine()
    workers = {name: Worker(ENGINES[name], arguments) for name in ("qwen35mm", arguments.peer) if name}
    results = [
        {
            "engine": engine,
            "length": length,
            "prefill_tokens_per_s": Spread.of([length / run["prefill_s"] for run in runs]),
            "decode_tokens_per_s": Spread.of([1 / second for run in runs for second in run["decode_s"]]),
            "peak_gib": max(run["peak_bytes"] for run in runs) / 2**30,
            "load_s": workers[engine].load_s,
        }
        for length in arguments.lengths
        for engine, runs in in_turns(workers, arguments.repeats, "measure", length).items()
    ]
    operations = workers[arguments.peer].ask("operations") if arguments.peer else {}
    for worker in workers.values():
        worker.close()
    print(f"{arguments.model}, {arguments.dtype} on {arguments.device}, median (lowest-highest)")
    print_machine(info)
    print_operations(operations)
    print_table(
        ["engine", "prompt tokens", "prefill, tok/s", "decode, tok/s", "peak memory, GiB", "load, s"],
        [
            [
                result["engine"],
                result["length"],
                result["prefill_tokens_per_s"].text(),
                result["decode_tokens_per_s"].text(2),
                f"{result['peak_gib']:.2f}",
                f"{result['load_s']:.1f}",
            ]
            for result in results
        ],
    )
    print_json("prefill_decode", arguments, machine=info, peer_operations=operations, results=results)


if __name__ == "__main__":
    main()
