"""Prefill and decode speed and peak memory of ours, transformers and llama.cpp, and the machine's limits.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.prefill_decode --model /tmp/random-0.8B --peer transformers
    python -m benchmarks.prefill_decode --model /tmp/random-0.8B --weights bf16,int8,int4 --peer llama.cpp \\
        --llama-bench build/bin/llama-bench --gguf bf16.gguf --gguf q8_0.gguf

Arithmetic limits prefill and memory bandwidth limits decode. So both rates of the machine are measured, too, and the
table shows each engine's share of its limit (`limits`): the fastest float products, or with integer weights the integer
products of the instruction set that the engine uses. llama.cpp is taken to be built without AMX. 4 bits may exceed
100 % of AVX2's, since sums in 16 bits need fewer instructions. The prompt is random text, computed up to the logits of
its last token. Decoding is greedy. On a GPU ours runs as the engine does: with CUDA graphs, and decodes one step ahead
of the host.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.frame import Rows, Sample, Spread, Worker, ask_in_turns, numbers, parse, parser, report
from benchmarks.limits import Limits, cache_bytes, integer_rate, prefill_flops, weight_bytes
from benchmarks.peers import LLAMA_CPP, TRANSFORMERS, LlamaCpp, Transformers, peak_bytes, random_ids
from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.cache.kv_pool import DEFAULT_BLOCK_SIZE
from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.checkpoints.shards import GGUF_NOTE
from qwen35mm.config import ModelConfig
from qwen35mm.engine import EngineSettings
from qwen35mm.engine.pieces import Pieces
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.settings import chunk_tokens_at
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.errors import ConfigError
from qwen35mm.model import load
from qwen35mm.model.load import DTYPES, choose_integers, weights_name
from qwen35mm.model.weight_formats import AS_STORED
from qwen35mm.model.weights import as_stored, bytes_read_per_token
from qwen35mm_kernels.cpu.native.library import find_library

MACHINE, OURS = "the machine", "qwen35mm"
# Tokens in each sequence of a batch before decoding.
SLOT_TOKENS = 64


class Ours:
    """The model in one format of weights, with its cache and its decode step, but without an engine."""

    def __init__(self, arguments: argparse.Namespace, weights: str) -> None:
        self._num_decoded, dtype = arguments.decode_tokens, DTYPES[arguments.dtype]
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device, weights=weights)
        self.model, self._config = loaded.model, loaded.config
        self._piece_tokens = EngineSettings().chunk_tokens_on(self.model.device)
        num_slots, self._longest = max(arguments.slots), max(arguments.lengths)
        most = max(self._longest, SLOT_TOKENS) + self._num_decoded
        num_tokens = most + num_slots * (SLOT_TOKENS + self._num_decoded + DEFAULT_BLOCK_SIZE)
        devices = self.model.layer_devices
        self._pools = CachePools(self._config, num_slots=num_slots, num_tokens=num_tokens, dtype=dtype, device=devices)
        self._pieces = Pieces(self.model, self._pools, most, self._piece_tokens)
        # For a slot without a request, the sampler takes the most likely token.
        sampler = Sampler(num_slots, self._config.text.vocab_size, [], self.model.head_device)
        max_blocks = self._pools.kv.blocks_for(most)
        self._graphs = {size: StepGraph(self.model, self._pools, sampler, size, max_blocks) for size in arguments.slots}

    def measure(self, length: int) -> Sample:
        """Seconds for a prompt's prefill and for the tokens after it, and this process's peak memory."""
        started_s = time.perf_counter()
        cache, token_id = self._prefill(random_ids(length))
        prefill_s = time.perf_counter() - started_s
        decode_s = self._decode([cache], [token_id])
        return {"prefill_s": prefill_s, "decode_s": decode_s, "peak_bytes": peak_bytes(self.model.device)}

    def measure_pieces(self, piece_tokens: int) -> Sample:
        """Seconds for the longest prompt's prefill in pieces of so many tokens, as cuts make them."""
        started_s = time.perf_counter()
        cache, _ = self._prefill(random_ids(self._longest), piece_tokens)
        seconds = time.perf_counter() - started_s
        cache.free()
        return {"prefill_s": seconds}

    def measure_slots(self, num_slots: int) -> Sample:
        """Seconds of decoding `num_slots` sequences in one batch."""
        caches, token_ids = zip(*(self._prefill(random_ids(SLOT_TOKENS)) for _ in range(num_slots)), strict=True)
        return {"decode_s": self._decode(list(caches), list(token_ids))}

    def _prefill(self, token_ids: torch.Tensor, piece_tokens: int | None = None) -> tuple[SequenceCache, int]:
        cache = self._pools.new_sequence()
        positions = torch.arange(len(token_ids)).expand(3, -1)
        while cache.length < len(token_ids):
            stop = cache.length + chunk_tokens_at(cache.length, piece_tokens or self._piece_tokens, self.model.device)
            ids, places = token_ids[cache.length : stop], positions[:, cache.length : stop]
            cache.prepare(len(ids))
            hidden = self._pieces.run(cache, ids, places)
            cache.advance(len(ids))
        return cache, int(self.model.logits(hidden[-1:]).argmax())

    def _decode(self, caches: list[SequenceCache], token_ids: list[int]) -> float:
        """Seconds of decoding; frees the caches. On a GPU each step is launched before the previous one is read."""
        graph, ahead = self._graphs[len(caches)], self.model.device.type != "cpu"
        started_s = time.perf_counter()
        for step in range(self._num_decoded):
            inputs = graph.inputs(step % 2)
            for row, cache in enumerate(caches):
                cache.prepare(1)
                inputs.set(row, cache, token_id=None if step and ahead else token_ids[row], step=step + 1)
            graph.run(step % 2)
            for cache in caches:
                cache.advance(1)
            if not ahead:
                token_ids = graph.token_ids(step % 2)
            elif step:
                graph.token_ids(1 - step % 2)
        graph.token_ids((self._num_decoded - 1) % 2)
        seconds = time.perf_counter() - started_s
        for cache in caches:
            cache.free()
        return seconds


@dataclass(frozen=True)
class Engine:
    """An engine's worker and its format of weights.

    Attributes:
        weight_bytes: what decoding a token reads.
        has_integers: whether most weights are integers.
    """

    name: str
    weights: str
    worker: Worker
    weight_bytes: float = 0.0
    has_integers: bool = False

    def limit(self, rates: dict[str, Spread]) -> str:
        """Of the machine's rates, the title of the one that limits this engine's prefill."""
        if self.has_integers:
            library = find_library()
            own = library.name if self.name == OURS and library else None
            vectors = [name for name in ("avx512_bf16", "avx_vnni", "avx2") if integer_rate(name) in rates]
            for name in [own] if own else vectors:
                if integer_rate(name) in rates:
                    return integer_rate(name)
        # An engine may compute products in any precision.
        return max((f"{name}, GFLOP/s" for name in DTYPES), key=lambda title: rates[title].high)


class Bench:
    """The machine and the engines."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self._arguments, self._config = arguments, ModelConfig.from_pretrained(arguments.model)
        self._dtype = DTYPES[arguments.dtype]
        plain = weights_name(self._dtype)

        floats = weight_bytes(self._config, torch.bfloat16)

        def add(name: str, weights: str, num_bytes: float, make: Any, *options: Any) -> None:
            worker = stack.enter_context(Worker(make, arguments, *options))
            self.engines.append(Engine(name, weights, worker, num_bytes, has_integers=0 < num_bytes < floats))

        self.engines: list[Engine] = []
        self.limits: Rows = []
        add(MACHINE, "", 0, Limits)
        for weights in arguments.weights:
            integers, num_bytes = self._own_weights(weights)
            add(OURS, integers or plain, num_bytes, Ours, weights)
        if TRANSFORMERS in arguments.peer:
            add(TRANSFORMERS, plain, weight_bytes(self._config, self._dtype), Transformers)
        for path in arguments.gguf:
            add(LLAMA_CPP, path.stem, peers.gguf_bytes_read(self._config, path), LlamaCpp, path)

    def length(self, length: int) -> Rows:
        """The speed of each engine with a prompt of `length` tokens."""
        flops = prefill_flops(self._config, length) / length
        (_, limits), *runs = self._ask("measure", length)
        rates = {name: Spread.of(run[name] for run in limits) for name in limits[0]}
        self.limits.append({"prompt": length, "GFLOP a token": flops / 1e9, **rates})
        reads = 1e9 * rates["reads, GB/s"].high
        rows: Rows = []
        for engine, samples in runs:
            num_decoded, is_llama = self._arguments.decode_tokens, engine.name == LLAMA_CPP
            prefill = Spread.of(length / run["prefill_s"] for run in samples)
            decode = Spread.of(num_decoded / run["decode_s"] for run in samples)
            kept = (LlamaCpp.KV_DTYPE, LlamaCpp.CONV_DTYPE) if is_llama else (self._dtype, self._dtype)
            # On average, half of the decoded tokens are in the cache.
            read = engine.weight_bytes + cache_bytes(self._config, length + num_decoded / 2, *kept)
            row = {"engine": engine.name, "weights": engine.weights, "prompt": length, "prefill, tok/s": prefill}
            limit = engine.limit(rates)
            share = 100 * prefill.median * flops / (1e9 * rates[limit].high)
            row |= {"limit": limit.partition(",")[0], "of limit, %": share, "decode, tok/s": decode}
            row |= {"read a token, MB": read / 1e6, "of reads, %": 100 * decode.median * read / reads}
            row["peak memory, GiB"] = max(run["peak_bytes"] for run in samples) / 2**30
            # llama-bench loads the model again for every measurement and doesn't count that time.
            rows.append({**row, "load, s": None if is_llama else engine.worker.load_s})
        return rows

    def pieces(self) -> Rows:
        """What cutting the longest prompt costs ours."""
        rows: Rows = []
        uncut: dict[str, float] = {}
        length = max(self._arguments.lengths)
        for piece_tokens in sorted({*self._arguments.pieces, length}, reverse=True) if self._arguments.pieces else ():
            for engine, samples in self._ask("measure_pieces", piece_tokens, only=(OURS,)):
                seconds = Spread.of(run["prefill_s"] for run in samples)
                whole_s = uncut.setdefault(engine.weights, seconds.median)
                cut_ms = 1e3 * (seconds.median - whole_s) / max(-(-length // piece_tokens) - 1, 1)
                row = {"tokens a piece": piece_tokens, "weights": engine.weights, "prefill, s": seconds}
                rows.append({**row, "times uncut": seconds.median / whole_s, "ms a cut": cut_ms})
        return rows

    def slots(self) -> Rows:
        """Speed of ours with several sequences in one batch."""
        rows: Rows = []
        ones: dict[str, float] = {}
        for num_slots in self._arguments.slots if len(self._arguments.slots) > 1 else ():
            for engine, samples in self._ask("measure_slots", num_slots, only=(OURS,)):
                rate = Spread.of(num_slots * self._arguments.decode_tokens / run["decode_s"] for run in samples)
                times = rate.median / ones.setdefault(engine.weights, rate.median)
                row = {"sequences": num_slots, "weights": engine.weights, "all together, tok/s": rate}
                rows.append({**row, "times one's": times})
        return rows

    def _ask(self, method: str, value: int, only: tuple[str, ...] = ()) -> list[tuple[Engine, list[Sample]]]:
        asked = {f"{engine.name} {engine.weights}": engine for engine in self.engines if engine.name in (only or _ALL)}
        warm = [key for key, engine in asked.items() if engine.name == LLAMA_CPP]
        workers = {key: engine.worker for key, engine in asked.items()}
        samples = ask_in_turns(workers, self._arguments.repeats, method, value, warm=warm)
        return [(engine, samples[key]) for key, engine in asked.items()]

    def _own_weights(self, weights: str) -> tuple[str | None, float]:
        """What `--weights` means for this checkpoint, and the bytes that decoding a token reads."""
        integers, folder = choose_integers(weights, self._dtype), Path(self._arguments.model)
        devices = [torch.device(self._arguments.device)]
        if integers != AS_STORED:
            return integers, weight_bytes(self._config, self._dtype, integers, devices)
        if self._config.quantization is None and not (folder / GGUF_NOTE).is_file():
            return None, weight_bytes(self._config, self._dtype, None, devices)
        stored = read_checkpoint(folder, self._config.quantization)
        integers = as_stored(stored, self._dtype, devices)
        return integers, bytes_read_per_token(self._config, stored, self._dtype, integers, devices)


_ALL = (MACHINE, OURS, TRANSFORMERS, LLAMA_CPP)


def main() -> None:
    options = parser(__doc__)
    peers.add_options(options, "llama-bench")
    options.add_argument("--weights", default="auto", help="our formats, as bf16,int8")
    options.add_argument("--lengths", type=numbers, default=[512], help="tokens of the prompts, as 512,8192")
    options.add_argument("--pieces", type=numbers, default=[], help="the longest prompt in pieces of, as 64,128")
    options.add_argument("--decode-tokens", type=int, default=16, help="after each prompt")
    options.add_argument("--slots", type=numbers, default=[], help="our sequences in one batch, as 1,4")
    arguments = parse(options)
    arguments.weights = arguments.weights.split(",")
    arguments.slots = sorted({1, *arguments.slots})
    try:
        for weights in arguments.weights:
            choose_integers(weights, DTYPES[arguments.dtype])
    except ConfigError as error:
        options.error(str(error))
    peers.check_options(options, arguments, "llama-bench")
    if arguments.gguf and arguments.device != "cpu":
        options.error("llama.cpp is measured on the CPU only")
    if len({path.stem for path in arguments.gguf}) < len(arguments.gguf):
        options.error("each --gguf needs a different file name: the table has no folders")
    with ExitStack() as stack:
        bench = Bench(arguments, stack)
        operations = [engine.worker.ask("operations") for engine in bench.engines if engine.name == TRANSFORMERS]
        tables = {
            "The machine": bench.limits,
            "Prompts, and tokens decoded behind them": [
                row for each in arguments.lengths for row in bench.length(each)
            ],
            "The longest prompt in pieces, ours": bench.pieces(),
            "Sequences decoded in one batch, ours": bench.slots(),
        }
    report("prefill_decode", arguments, tables, peer_operations="\n".join(operations))


if __name__ == "__main__":
    main()
