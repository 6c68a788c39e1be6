"""What a prompt costs beside the model: its cuts, addresses, blocks, cached segments, the disk's index. No model runs.

    python -m benchmarks.bookkeeping --tokens 250000,1000000

The prefill, its caches and the disk tier are the engine's own; the model is one that gives back what it gets, with one
layer of each kind and keys and values of a few bytes. So all that is measured is work for each token, turn, block and
segment, which has to grow no faster than their number: four times the tokens may take four times as long. Each length
lives in a process of its own; its memory is told with Python, torch and the model's pools in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks import make_random
from benchmarks.forward import peak_bytes
from benchmarks.report import machine, print_json, print_machine, print_table
from benchmarks.worker import Worker, numbers, parser
from qwen35mm.cache import CachePools, DiskStore, DiskTier, PrefixCache
from qwen35mm.config import ModelConfig
from qwen35mm.engine import CachedPrompt
from qwen35mm.engine.batches import StepInputs
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.runtime import InlineExecutor
from qwen35mm.prompt import Prompt, cut_segments

TURN_TOKENS, PIECE_TOKENS, DECODED = 130, 512, 1000
ROOT = b"0" * 32


class Identity:
    """Stands for a model: gives back what it gets."""

    device = torch.device("cpu")

    def embed_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1)

    def __call__(self, batch: Any) -> torch.Tensor:
        return batch.embeds


class Conversation:
    """A conversation of turns of `TURN_TOKENS`, and the caches that it goes through; with a folder, a disk, too."""

    def __init__(self, num_tokens: int, folder: Path | None = None) -> None:
        self._num_tokens, self._folder = num_tokens, folder
        config = ModelConfig.from_dict(make_random.make_config("0.8B", "bfloat16"))
        kinds = ("linear_attention", "full_attention")
        sizes = {"num_key_value_heads": 1, "head_dim": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
        self._config = replace(config, text=replace(config.text, layer_types=kinds, **sizes))
        self.restart()

    def restart(self) -> None:
        """A new process's caches over the folder that the last one left."""
        most = self._num_tokens + 8 * TURN_TOKENS + DECODED
        self._pools = CachePools(self._config, num_slots=2, num_tokens=most, dtype=torch.bfloat16)
        for keys, values in self._pools.kv.layers.values():
            keys.zero_()  # nobody writes them, and what is no number isn't kept
            values.zero_()
        self.disk, files = None, InlineExecutor()
        if self._folder is not None:
            store = DiskStore(self._folder, max_bytes=1 << 30)
            self.disk = DiskTier(store, ROOT, self._pools, reader=files, writer=files)
        self.prefixes = PrefixCache(self._pools, state_bytes=1 << 24, disk=self.disk)

    def prompt(self, num_tokens: int) -> Prompt:
        """Its first `num_tokens`."""
        ids = np.random.default_rng(0).integers(0, 900, self._num_tokens + 8 * TURN_TOKENS)[:num_tokens]
        segments, tail_start = cut_segments(num_tokens, range(0, num_tokens, TURN_TOKENS), ())
        positions = np.broadcast_to(np.arange(num_tokens), (3, num_tokens)).copy()
        return Prompt(ids, (), positions, 0, segments, tail_start)

    def prefill(self, prompt: Prompt) -> Prefill:
        """Brings a prompt into the caches; returns what holds it."""
        parts: dict[str, Any] = {
            **{"root": ROOT, "reuse": True, "pools": self._pools, "prefixes": self.prefixes, "disk": self.disk},
            **{"model": Identity(), "piece_tokens": PIECE_TOKENS, "vision": None, "reader": InlineExecutor()},
        }
        runtime: Any = SimpleNamespace(**parts)
        work = Prefill(runtime, CachedPrompt(prompt))
        while not work.done:
            work.step()
        return work

    def decode(self, work: Prefill) -> None:
        """What a reply's steps note of its blocks."""
        inputs = StepInputs.unused(1, self._pools.kv.allocator.num_blocks)
        for _ in range(DECODED):
            work.cache.prepare(1)
            inputs.set(0, work.cache, token_id=1)
            work.cache.advance(1)

    def evict(self) -> None:
        """Lets go of everything, a block at a time, as a long prompt of somebody else's would have it."""
        allocator = self._pools.kv.allocator
        while allocator.num_free < allocator.num_blocks:
            before = allocator.num_free
            self.prefixes.reclaim(PIECE_TOKENS // 64)
            assert allocator.num_free > before, "everything can be evicted"


class Bench:
    """One length."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._start_bytes = peak_bytes(torch.device("cpu"))

    def measure(self, num_tokens: int) -> dict[str, Any]:
        """Seconds of each step of the conversation's life, and the peak memory."""
        seconds: dict[str, float] = {}

        @contextmanager
        def timed(name: str) -> Iterator[None]:
            started_s = time.perf_counter()
            yield
            seconds[name] = time.perf_counter() - started_s

        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            conversation = Conversation(num_tokens, Path(folder))
            with timed("cuts"):
                prompt = conversation.prompt(num_tokens)
            with timed("prefill"):
                work = conversation.prefill(prompt)
            with timed("decode"):
                conversation.decode(work)
            work.close()
            with timed("next turn"):
                prompt = conversation.prompt(num_tokens + 4 * TURN_TOKENS)
                conversation.prefill(prompt).close()
            with timed("to disk"):
                assert conversation.disk is not None
                conversation.disk.flush()
            with timed("from disk"):
                conversation.restart()
                work = conversation.prefill(prompt)
            assert work.start is not None
            assert work.start.num_segments == len(prompt.segments), "the disk has all of it"
            work.close()
            with timed("eviction"):
                conversation.evict()
        peak = peak_bytes(torch.device("cpu"))
        return {
            "num_segments": len(prompt.segments),
            "seconds": seconds,
            "start_bytes": self._start_bytes,
            "peak_bytes": peak,
        }


def main() -> None:
    options = parser(__doc__, needs_model=False)
    options.add_argument("--tokens", type=numbers, default=[250_000, 1_000_000])
    arguments = options.parse_args(sys.argv[1:])
    results = []
    for num_tokens in arguments.tokens:
        with Worker(Bench, arguments) as worker:
            results.append({"num_tokens": num_tokens, **worker.ask("measure", num_tokens)})
    info = machine()
    print_machine(info)
    names = list(results[0]["seconds"])
    print_table(
        ["tokens", "segments", *(f"{name}, s" for name in names), "all, s", "peak memory, MB", "at the start, MB"],
        [
            [
                f"{result['num_tokens']:,}",
                f"{result['num_segments']:,}",
                *(f"{result['seconds'][name]:.2f}" for name in names),
                f"{sum(result['seconds'].values()):.1f}",
                f"{result['peak_bytes'] / 1e6:,.0f}",
                f"{result['start_bytes'] / 1e6:,.0f}",
            ]
            for result in results
        ],
    )
    print_json("bookkeeping", arguments, machine=info, results=results)


if __name__ == "__main__":
    main()
