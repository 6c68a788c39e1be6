"""Prefill and decode speed and peak memory: ours, transformers' and llama.cpp's, beside what the machine can.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.prefill_decode --model /tmp/random-0.8B --peer transformers
    python -m benchmarks.prefill_decode --model /tmp/random-0.8B --weights bf16,int8,int4 --peer transformers \\
        --peer llama.cpp --llama-bench build/bin/llama-bench --gguf bf16.gguf --gguf q8_0.gguf --gguf q4_0.gguf

Prefill multiplies large matrices and is bound by arithmetic; decode reads every weight for one token and is bound by
memory bandwidth. So the rate of torch's products at the model's shapes and the rate of reading memory are measured
too, and each engine's share of the highest that were seen is told: of the products a prompt needs, and of the weights,
states, keys and values that a token needs (`work`). Each engine lives in a process of its own; they and the machine
are measured in turns, one length after the other, so that a machine that slows down does so for all.
What is known after each round stands on the standard error, whole tables on the standard output.

The prompt is random text in one piece, ending in the logits of its last token; then tokens are decoded greedily. A
run's rate is its tokens over its time. On a GPU ours decodes as the engine does, by CUDA graphs and one step ahead of
the host; transformers takes flash-linear-attention and causal-conv1d where they are installed, and where it takes each
operation of a Gated DeltaNet layer from is told. `--steps 65536` has the engine, with its cache, read one prompt of
that length and tells at every depth how long its steps were: whoever is being answered waits for each of them. Their
CPU time for each thread stands beside it, which a busy machine changes less. How to make the GGUFs and llama-bench, and
what else to do on a busy machine: docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import llama_cpp
from benchmarks.engines import print_operations
from benchmarks.forward import Ours, Transformers
from benchmarks.limits import Limits
from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from benchmarks.work import cache_bytes, prefill_flops, vision_flops, weight_bytes
from benchmarks.worker import Worker, numbers, parser, rounds, set_threads
from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.shards import GGUF_NOTE
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ConfigError
from qwen35mm.model.load import DTYPES, choose_integers, weights_name
from qwen35mm.model.weight_formats import AS_STORED
from qwen35mm.model.weights import as_stored, bytes_read_per_token

MACHINE, OURS, TRANSFORMERS, LLAMA_CPP = "the machine", "qwen35mm", "transformers", "llama.cpp"
Runs = list[dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    """An engine in a process of its own, or what measures the machine.

    Attributes:
        weight_bytes: that decoding a token reads.
    """

    name: str
    weights: str
    worker: Worker
    weight_bytes: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.name} {self.weights}"


class Bench:
    """The engines and the machine, asked in turns; results are yielded as they stand after each round."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments, self._config = arguments, ModelConfig.from_pretrained(arguments.model)
        self._dtype = DTYPES[arguments.dtype]
        self.measured = [Measured(MACHINE, "", Worker(Limits, arguments)), *self._engines()]

    def close(self) -> None:
        for measured in self.measured:
            measured.worker.close()

    def operations(self) -> dict[str, str]:
        """See `TransformersPeer.operations`; {} without it."""
        found = [measured.worker.ask("operations") for measured in self.measured if measured.name == TRANSFORMERS]
        return found[0] if found else {}

    def length(self, length: int) -> Iterator[Runs]:
        """What the machine can, and then what each engine does with a prompt of this length."""
        flops = prefill_flops(self._config, length) / length
        for (_, runs), *engines in self._ask([MACHINE, OURS, TRANSFORMERS, LLAMA_CPP], "measure", length):
            limits = spreads(runs)
            result = {"engine": MACHINE, "weights": "", "length": length, **limits, "flops_per_prompt_token": flops}
            yield [result, *(self._rates(engine, length, runs, flops, limits) for engine, runs in engines)]

    def slots(self) -> Runs:
        """Ours with several sequences in one batch: tokens a second of all together, and how many times one's."""
        results: Runs = []
        ones: dict[str, float] = {}
        for num_slots in self._arguments.slots:
            *_, samples = self._ask([OURS], "measure_slots", num_slots)
            for engine, runs in samples:
                rate = Spread.of([num_slots * self._arguments.decode_tokens / run["decode_s"] for run in runs])
                multiple = rate.median / ones.setdefault(engine.key, rate.median)
                result = {"weights": engine.weights, "num_slots": num_slots, "tokens_per_s": rate}
                results.append({**result, "multiple": multiple})
        return results

    def steps(self, length: int) -> Runs:
        """The engine's steps of one long prompt, by eighths of it."""
        results: Runs = []
        for measured in self.measured:
            if measured.name == OURS:
                steps = measured.worker.ask("measure_steps", length)
                for part in range(8):
                    low, high = part * length // 8, (part + 1) * length // 8
                    found = [step for step in steps if low < step["stop"] <= high]
                    result: dict[str, Any] = {"weights": measured.weights, "stop": high, "num_steps": len(found)}
                    result["peak_bytes"] = found[-1]["peak_bytes"]
                    result["tokens_per_s"] = (high - low) / sum(step["step_s"] for step in found)
                    seconds = {name: Spread.of([step[name] for step in found]) for name in ("step_s", "cpu_s")}
                    results.append(result | seconds)
        return results

    def tower(self, side: int) -> Iterator[Runs]:
        """What the machine can at the vision tower's shapes, and then each engine's time for a picture."""
        rows = side // self._config.vision.patch_size
        flops = vision_flops(self._config, rows, rows)
        for (_, runs), *engines in self._ask([MACHINE, OURS, TRANSFORMERS], "measure_tower", side):
            limits = spreads(runs)
            results: Runs = [{"engine": MACHINE, "weights": "", **limits, "flops": flops}]
            for engine, runs in engines:
                seconds = Spread.of([run["tower_s"] for run in runs])
                share = flops / seconds.median / fastest_products(limits)
                results.append({"engine": engine.name, "weights": engine.weights, "tower_s": seconds, "share": share})
            yield results

    def _rates(
        self, engine: Measured, length: int, runs: Runs, flops: float, limits: dict[str, Spread]
    ) -> dict[str, Any]:
        num_decoded = self._arguments.decode_tokens
        prefill = Spread.of([length / run["prefill_s"] for run in runs])
        decode = Spread.of([num_decoded / run["decode_s"] for run in runs])
        kept = (llama_cpp.KV_DTYPE, llama_cpp.CONV_DTYPE) if engine.name == LLAMA_CPP else (self._dtype, self._dtype)
        # In the middle of what is decoded the sequence is half of it longer.
        read = engine.weight_bytes + cache_bytes(self._config, length + num_decoded / 2, *kept)
        return {
            "engine": engine.name,
            "weights": engine.weights,
            "length": length,
            "prefill_tokens_per_s": prefill,
            "prefill_share": prefill.median * flops / fastest_products(limits),
            "decode_tokens_per_s": decode,
            "decode_share": decode.median * read / limits["read_bytes_per_s"].high,
            "bytes_read_per_token": read,
            "peak_gib": max(run["peak_bytes"] for run in runs) / 2**30,
            "load_s": engine.worker.load_s,
            "build": runs[0].get("build"),
        }

    def _ask(self, names: list[str], method: str, value: int) -> Iterator[list[tuple[Measured, Runs]]]:
        asked = {measured.key: measured for measured in self.measured if measured.name in names}
        workers = {key: measured.worker for key, measured in asked.items()}
        warm = [key for key, measured in asked.items() if measured.name == LLAMA_CPP]
        for samples in rounds(workers, self._arguments.repeats, method, value, warm=warm):
            yield [(measured, samples[key]) for key, measured in asked.items()]

    def _as_stored(self, plain_bytes: float) -> tuple[str | None, float]:
        """What a quantised checkpoint is kept as, and the bytes of it that a token reads; else these bytes."""
        folder = Path(self._arguments.model)
        if self._config.quantization is None and not (folder / GGUF_NOTE).is_file():
            return None, plain_bytes
        stored = read_checkpoint(folder, self._config.quantization)
        devices = [torch.device(self._arguments.device)]
        integers = as_stored(stored, self._dtype, devices)
        return integers, bytes_read_per_token(self._config, stored, self._dtype, integers, devices)

    def _engines(self) -> Iterator[Measured]:
        arguments, plain = self._arguments, weights_name(self._dtype)
        for weights in arguments.weights:
            integers = choose_integers(weights, self._dtype)
            devices = [torch.device(arguments.device)]
            num_bytes = weight_bytes(self._config, self._dtype, None if integers == AS_STORED else integers, devices)
            if integers == AS_STORED:
                integers, num_bytes = self._as_stored(num_bytes)
            yield Measured(OURS, integers or plain, Worker(Ours, arguments, weights), num_bytes)
        if TRANSFORMERS in arguments.peer:
            num_bytes = weight_bytes(self._config, self._dtype)
            yield Measured(TRANSFORMERS, plain, Worker(Transformers, arguments), num_bytes)
        for path in arguments.gguf:
            num_bytes = llama_cpp.weight_bytes(self._config, llama_cpp.gguf_tensors(path))
            yield Measured(LLAMA_CPP, path.stem, Worker(llama_cpp.LlamaCpp, arguments, path), num_bytes)


def spreads(runs: Runs) -> dict[str, Spread]:
    return {name: Spread.of([run[name] for run in runs]) for name in runs[0]}


def fastest_products(limits: dict[str, Spread]) -> float:
    """Operations a second: a product may be computed in any precision, and what else runs makes no machine's limit."""
    return max(limits[f"{name}_flops_per_s"].high for name in DTYPES)


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--peer", choices=[TRANSFORMERS, LLAMA_CPP], action="append", default=[], help="measure this engine as well"
    )
    options.add_argument("--llama-bench", type=Path, metavar="BIN", help="llama.cpp's own benchmark")
    options.add_argument(
        "--gguf", type=Path, action="append", default=[], metavar="FILE", help="the model for llama.cpp"
    )
    options.add_argument(
        "--weights", default="auto", help="ours in these formats, as bf16,int8; auto is the dtype's own"
    )
    options.add_argument("--lengths", type=numbers, default=[512], help="of prompts, as 512,8192")
    options.add_argument("--decode-tokens", type=int, default=16, help="after each prompt")
    options.add_argument("--slots", type=numbers, default=[], help="sequences in one batch, ours alone, as 1,4")
    options.add_argument("--steps", type=int, help="tokens of a prompt that the engine reads, ours alone, as 65536")
    options.add_argument("--picture", type=int, help="pixels a side of a picture for the vision tower, as 1024")
    options.add_argument("--repeats", type=int, default=3)
    arguments = options.parse_args(argv)
    arguments.weights = arguments.weights.split(",")
    try:
        for weights in arguments.weights:
            choose_integers(weights, DTYPES[arguments.dtype])
    except ConfigError as error:
        options.error(str(error))
    if (LLAMA_CPP in arguments.peer) != bool(arguments.gguf and arguments.llama_bench):
        options.error("--peer llama.cpp, --llama-bench and --gguf go together")
    if arguments.gguf and arguments.device != "cpu":
        options.error("llama.cpp is measured on the CPU alone")
    for path in [*arguments.gguf, *([arguments.llama_bench] if arguments.llama_bench else [])]:
        if not path.is_file():
            options.error(f"{path} is no file")
    if len({path.stem for path in arguments.gguf}) < len(arguments.gguf):
        options.error("each --gguf needs a name of its own: the table has no folders")
    if arguments.steps is not None and arguments.steps < 4096:
        options.error("--steps must be at least 4096: each eighth of it needs a step")
    if arguments.slots:
        # What the others are multiples of comes first.
        arguments.slots = sorted({1, *arguments.slots})
    if arguments.picture is not None and (arguments.picture < 32 or arguments.picture % 32):
        options.error("--picture must be a multiple of 32")
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    set_threads(arguments)
    info = machine()
    bench = Bench(arguments)
    operations = bench.operations()
    print(f"{arguments.model}, {arguments.dtype} on {arguments.device}, median (lowest-highest)")
    print_machine(info)
    print_operations(operations)
    results: Runs = []
    for length in arguments.lengths:
        results += shown(bench.length(length), arguments.repeats, print_length)
    slots = bench.slots()
    print_slots(slots)
    steps = bench.steps(arguments.steps) if arguments.steps else []
    print_steps(steps)
    towers = shown(bench.tower(arguments.picture), arguments.repeats, print_tower) if arguments.picture else []
    bench.close()
    values = {"results": results, "slots_results": slots, "steps_results": steps, "tower_results": towers}
    print_json("prefill_decode", arguments, machine=info, peer_operations=operations, **values)


def shown(results: Iterator[Runs], num_rounds: int, show: Callable[[Runs], None]) -> Runs:
    """Shows results after each round, before the last one where progress is told."""
    found: Runs = []
    for round_number, found in enumerate(results, 1):
        with contextlib.redirect_stdout(sys.stdout if round_number == num_rounds else sys.stderr):
            show(found)
            sys.stdout.flush()
    return found


def print_length(results: Runs) -> None:
    """The machine's limits in words, and the engines' table."""
    limits, *engines = results
    print(
        f"\n{limits['length']} tokens, {limits['flops_per_prompt_token'] / 1e9:.2f} GFLOP each. {limits_text(limits)}"
    )
    print_table(
        [
            "engine",
            "weights",
            "prefill, tok/s",
            "of products",
            "decode, tok/s",
            "read a token, MB",
            "of reads",
            "peak memory, GiB",
            "load, s",
        ],
        [
            [
                result["engine"],
                result["weights"],
                result["prefill_tokens_per_s"].text(),
                f"{result['prefill_share']:.0%}",
                result["decode_tokens_per_s"].text(2),
                f"{result['bytes_read_per_token'] / 1e6:,.0f}",
                f"{result['decode_share']:.0%}",
                f"{result['peak_gib']:.2f}",
                # llama-bench loads the model each time, outside of what it measures.
                "" if result["engine"] == LLAMA_CPP else f"{result['load_s']:.1f}",
            ]
            for result in engines
        ],
    )


def limits_text(limits: dict[str, Any]) -> str:
    """What the machine can, in words."""
    rates = [f"{limits[f'{name}_flops_per_s'].scaled(1e-9).text(0)} GFLOP/s in {name}" for name in DTYPES]
    reads = limits.get("read_bytes_per_s")
    memory = f", its reads {reads.scaled(1e-9).text()} GB/s" if reads else ""
    return f"This machine's products reach {' and '.join(rates)}{memory}."


def print_slots(results: Runs) -> None:
    """Decode of several sequences in one batch."""
    if results:
        print("\nSequences decoded in one batch, ours:")
        print_table(
            ["sequences", "weights", "all together, tok/s", "times one's"],
            [
                [result["num_slots"], result["weights"], result["tokens_per_s"].text(2), f"{result['multiple']:.2f}"]
                for result in results
            ],
        )


def print_steps(results: Runs) -> None:
    """The engine's steps at the depths of one long prompt."""
    if results:
        print("\nSteps of a long prompt's prefill by the engine, ours:")
        print_table(
            ["up to token", "weights", "steps", "tok/s", "a step, s", "its CPU, s", "peak memory, GiB"],
            [
                [
                    f"{r['stop']:,}",
                    r["weights"],
                    r["num_steps"],
                    f"{r['tokens_per_s']:.0f}",
                    r["step_s"].text(2),
                    r["cpu_s"].text(2),
                    f"{r['peak_bytes'] / 2**30:.2f}",
                ]
                for r in results
            ],
        )


def print_tower(results: Runs) -> None:
    """The vision tower."""
    limits, *engines = results
    print(f"\nThe picture, {limits['flops'] / 1e12:.2f} TFLOP in the tower. {limits_text(limits)}")
    print_table(
        ["engine", "weights", "tower, s", "of products"],
        [[r["engine"], r["weights"], r["tower_s"].text(2), f"{r['share']:.0%}"] for r in engines],
    )


if __name__ == "__main__":
    main()
