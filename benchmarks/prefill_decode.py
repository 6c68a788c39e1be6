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
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "preprocess")]

import torch  # noqa: E402

from benchmarks.peers import print_operations, transformers_operations  # noqa: E402
from benchmarks.report import Spread, machine, print_json, print_machine, print_table  # noqa: E402
from benchmarks.worker import Served, Worker, numbers, parser, serves  # noqa: E402

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ENGINES = ("qwen35mm", "transformers")


class Runner(Served):
    """One loaded engine, which prefills a prompt and decodes after it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self._num_decoded = arguments.device, arguments.decode_tokens
        started = time.perf_counter()
        self.load(
            arguments.model, DTYPES[arguments.dtype], arguments.device, max(arguments.lengths) + self._num_decoded
        )
        super().__init__({"load_s": time.perf_counter() - started, "peak_bytes": peak_bytes(arguments.device)})

    def load(self, folder: str, dtype: torch.dtype, device: str, max_tokens: int) -> None:
        raise NotImplementedError

    def prefill(self, token_ids: torch.Tensor) -> int:
        """Starts a new sequence with the prompt [T]; returns the likeliest next token."""
        raise NotImplementedError

    def decode(self, token_id: int, num_tokens: int) -> list[float]:
        """Runs so many tokens, each the likeliest one after the last; seconds of each."""
        raise NotImplementedError

    def answer(self, length: int) -> dict[str, Any]:
        ids = torch.randint(0, 900, (length,), generator=torch.Generator().manual_seed(length))
        started = time.perf_counter()
        token = self.prefill(ids)
        prefill_s = time.perf_counter() - started
        tokens_s = self.decode(token, self._num_decoded)
        return {"prefill_s": prefill_s, "decode_s": tokens_s, "peak_bytes": peak_bytes(self.device)}


class OurRunner(Runner):
    def load(self, folder: str, dtype: torch.dtype, device: str, max_tokens: int) -> None:
        from qwen35mm.cache import CachePools
        from qwen35mm.config import ModelConfig
        from qwen35mm.engine.sampler import Sampler
        from qwen35mm.engine.step_graph import StepGraph
        from qwen35mm.model.weights import load_model

        config = ModelConfig.from_pretrained(folder)
        self.model = load_model(folder, config, dtype=dtype, device=device)
        self.pools = CachePools(
            config, num_slots=1, num_tokens=max_tokens, dtype=dtype, device=self.model.layer_devices
        )
        self.cache = self.pools.new_sequence()
        # A slot that nobody was admitted to takes the likeliest token.
        sampler = Sampler(1, config.text.vocab_size, [], self.model.head_device)
        self.graph = StepGraph(self.model, self.pools, sampler, 1, self.pools.kv.blocks_for(max_tokens))

    def prefill(self, token_ids: torch.Tensor) -> int:
        from qwen35mm.engine.batches import prefill_batch

        self.cache.free()
        self.cache = self.pools.new_sequence()
        self.cache.prepare(len(token_ids))
        positions = torch.arange(len(token_ids)).expand(3, -1).to(self.model.device)
        embeds = self.model.embed_tokens(token_ids.to(self.model.device))
        hidden = self.model(prefill_batch(self.cache, embeds, positions))
        self.cache.advance(len(token_ids))
        return int(self.model.logits(hidden[-1:]).argmax())

    def decode(self, token_id: int, num_tokens: int) -> list[float]:
        """As the engine does: on a GPU a step is launched before the one before is read."""
        if self.model.device.type == "cpu":
            return decode_one_by_one(self._step, token_id, num_tokens)
        started = time.perf_counter()
        for step in range(num_tokens):
            self._launch(token_id if step == 0 else None, step)
            if step:
                self.graph.token_ids(1 - step % 2)
        self.graph.token_ids((num_tokens - 1) % 2)
        # Steps overlap: only all of them together have a time.
        return [(time.perf_counter() - started) / num_tokens] * num_tokens

    def _step(self, token_id: int) -> int:
        self._launch(token_id, 0)
        return self.graph.token_ids(0)[0]

    def _launch(self, token_id: int | None, step: int) -> None:
        self.cache.prepare(1)
        self.graph.inputs(step % 2).set(0, self.cache, token_id=token_id, step=step + 1)
        self.graph.run(step % 2)
        self.cache.advance(1)


class TransformersRunner(Runner):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.ready["operations"] = transformers_operations()

    def load(self, folder: str, dtype: torch.dtype, device: str, max_tokens: int) -> None:
        from transformers import AutoModelForImageTextToText

        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval()
        self.past: Any = None

    def prefill(self, token_ids: torch.Tensor) -> int:
        self.past = None
        return self._run(token_ids[None].to(self.device))

    def decode(self, token_id: int, num_tokens: int) -> list[float]:
        return decode_one_by_one(
            lambda last: self._run(torch.tensor([[last]], device=self.device)), token_id, num_tokens
        )

    @torch.inference_mode()
    def _run(self, ids: torch.Tensor) -> int:
        output = self.model(ids, past_key_values=self.past, use_cache=True, logits_to_keep=1)
        self.past = output.past_key_values
        return int(output.logits[0, -1].argmax())


def decode_one_by_one(step: Callable[[int], int], token_id: int, num_tokens: int) -> list[float]:
    """Runs tokens each of which is read before the next begins; seconds of each."""
    seconds = []
    for _ in range(num_tokens):
        started = time.perf_counter()
        token_id = step(token_id)
        seconds.append(time.perf_counter() - started)
    return seconds


def make_worker(role: str, arguments: argparse.Namespace) -> Runner:
    """The engine of a role."""
    return OurRunner(arguments) if role == ENGINES[0] else TransformersRunner(arguments)


def peak_bytes(device: str) -> int:
    """Peak memory of this process so far: of the GPU where it runs on one, else resident."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(workers: dict[str, Worker], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry per engine and length; the first round warms up and isn't counted."""
    results = []
    for length in arguments.lengths:
        samples: dict[str, list[dict[str, Any]]] = {engine: [] for engine in workers}
        for round_number in range(arguments.repeats + 1):
            for engine, worker in workers.items():
                sample = worker.ask(length=length)
                if round_number > 0:
                    samples[engine].append(sample)
        for engine, runs in samples.items():
            results.append(
                {
                    "engine": engine,
                    "length": length,
                    "prefill_tokens_per_s": Spread.of([length / run["prefill_s"] for run in runs]),
                    "decode_tokens_per_s": Spread.of([1 / second for run in runs for second in run["decode_s"]]),
                    "peak_gib": max(run["peak_bytes"] for run in runs) / 2**30,
                    "load_s": workers[engine].ready["load_s"],
                }
            )
    return results


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--peer", choices=["transformers"], help="measure this engine as well")
    options.add_argument("--lengths", type=numbers, default=[128, 512, 2048])
    options.add_argument("--decode-tokens", type=int, default=16)
    options.add_argument("--repeats", type=int, default=3)
    return options.parse_args(argv)


def main() -> None:
    arguments = parse(sys.argv[1:])
    if serves(arguments, make_worker):
        return
    info = machine()
    engines = [ENGINES[0], *([arguments.peer] if arguments.peer else [])]
    workers = {engine: Worker(__file__, sys.argv[1:], engine) for engine in engines}
    results = measure(workers, arguments)
    for worker in workers.values():
        worker.close()
    print(f"{arguments.model}, {arguments.dtype} on {arguments.device}, median (lowest-highest)")
    print_machine(info)
    operations = workers[arguments.peer].ready["operations"] if arguments.peer else {}
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
    print_json(
        "prefill_decode",
        model=arguments.model,
        dtype=arguments.dtype,
        machine=info,
        peer_operations=operations,
        results=results,
    )


if __name__ == "__main__":
    main()
