"""Tokens a second and the longest stall with several requests at once, and a long prompt arriving in their midst.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.batching --model /tmp/random-0.8B

A number of requests begin to answer; when each has a third of its tokens, one with a long prompt joins them. A decode
step reads every weight once for all rows, so that more requests give more tokens a second, until arithmetic is the
limit; the long prompt is prefilled a piece at a time with a decode step after each, so that the longest stall is one
piece. In the batch-invariant mode a GPU runs every step with as many rows as there are slots, whoever is there, and a
processor runs a step for each request; each mode lives in a process of its own, and they are measured in turns. Both
modes compute the same requests.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from benchmarks.worker import Worker, in_turns, numbers, parser, set_threads
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import Finished, SamplingParams
from qwen35mm.engine import Engine, EngineSettings, Request
from qwen35mm.engine.reply import Reply
from qwen35mm.model import LoadedModel, load
from qwen35mm.prompt import Prompt

MODES = {"invariant": True, "plain": False}


class Bench:
    """One engine with one mode, which measures one number of requests at a time."""

    def __init__(self, arguments: argparse.Namespace, invariant: bool) -> None:
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
        # No reply may end before its last token: the load would change.
        self.loaded: LoadedModel = replace(loaded, eos_ids=frozenset())
        self.arguments = arguments
        slots = arguments.slots
        context_length = max(arguments.long_tokens, arguments.prompt_tokens) + arguments.decode_tokens + 1
        kv_bytes = (context_length + 128) * (slots + 1) * loaded.config.kv_bytes_per_token(loaded.model.dtype)
        settings = EngineSettings(context_length=context_length, slots=slots, batch_invariant=invariant)
        self.engine = Engine(self.loaded, settings, CacheSettings(kv_bytes=kv_bytes, reuse=False))
        self.token_times: dict[str, list[float]] = {}
        self._take = _note_tokens(self.token_times)

    def close(self) -> None:
        Reply.take = self._take

    def measure(self, num_requests: int) -> dict[str, Any]:
        """Runs the requests and the long one; seconds and tokens a second."""
        engine, arguments = self.engine, self.arguments
        self.token_times.clear()
        requests = [self._request(arguments.prompt_tokens, seed) for seed in range(num_requests)]
        long = self._request(arguments.long_tokens, num_requests, max_tokens=1)
        for request in requests:
            engine.add(request)
        # The first third without the long prompt, the rest with it.
        self._run(lambda: all(self._count(r) >= arguments.decode_tokens // 3 for r in requests))
        before = {r.id: list(self.token_times[r.id]) for r in requests}
        arrived_s = time.perf_counter()
        engine.add(long)
        self._run(lambda: not engine.has_requests)
        ended_s = max(self.token_times[r.id][-1] for r in requests)
        # Until the last of them has begun to answer, the others share their steps with a prefill.
        begun_s = max(times[0] for times in before.values())
        steady = [t for times in before.values() for t in times if t > begun_s]
        after = [t for r in requests for t in self.token_times[r.id] if t > arrived_s]
        return {
            "steady_tokens_per_s": len(steady) / (max(steady) - begun_s),
            "mixed_tokens_per_s": len(after) / (ended_s - arrived_s),
            "steady_stall_s": max(_longest_gap(times, begun_s) for times in before.values()),
            "mixed_stall_s": max(_longest_gap(self.token_times[r.id], arrived_s) for r in requests),
            "long_ttft_s": self.token_times[long.id][0] - arrived_s,
        }

    def _request(self, num_tokens: int, seed: int, max_tokens: int | None = None) -> Request:
        vocabulary = min(self.loaded.tokenizer.vocab_size, self.loaded.config.text.vocab_size)
        # Ordinary tokens: the control tokens have the vocabulary's last ids.
        ids = np.random.default_rng(seed).integers(0, vocabulary * 9 // 10, num_tokens)
        positions = np.broadcast_to(np.arange(num_tokens), (3, num_tokens)).copy()
        prompt = Prompt(ids, (), positions, 0, (), 0)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens or self.arguments.decode_tokens)
        return Request(prompt, params=params, retain="nothing")

    def _count(self, request: Request) -> int:
        return len(self.token_times.get(request.id, ()))

    def _run(self, until: Callable[[], bool]) -> None:
        while not until():
            for output in self.engine.step():
                if isinstance(output.event, Exception):
                    raise SystemExit(f"a request failed: {output.event}")
                assert not isinstance(output.event, Finished) or output.event.result.finish_reason == "length"


def _note_tokens(token_times: dict[str, list[float]]) -> Any:
    """Notes when each token is chosen: a token needn't complete a character, so that events don't tell.

    Returns:
        `Reply.take` as it was.
    """
    original = Reply.take

    def take(self: Reply, *args: Any) -> Any:
        deltas = original(self, *args)
        token_times.setdefault(self.request.id, []).append(time.perf_counter())
        return deltas

    Reply.take = take  # pyright: ignore[reportAttributeAccessIssue]
    return original


def _longest_gap(times: list[float], since_s: float) -> float:
    """Seconds of the longest wait between two tokens of which the later one came after `since_s`."""
    return max((b - a for a, b in pairwise(times) if b > since_s), default=0.0)


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--requests", type=numbers, default=[1, 2, 4, 8])
    options.add_argument("--slots", type=int, help="one more than the most requests if left out")
    options.add_argument("--prompt-tokens", type=int, default=64, help="of each request")
    options.add_argument("--long-tokens", type=int, default=4000, help="of the prompt that arrives in the middle")
    options.add_argument("--decode-tokens", type=int, default=36, help="of each request's reply, 6 or more")
    options.add_argument("--repeats", type=int, default=3)
    arguments = options.parse_args(argv)
    if arguments.decode_tokens < 6:
        options.error("--decode-tokens must be at least 6")
    arguments.slots = arguments.slots or max(arguments.requests) + 1
    if arguments.slots < max(arguments.requests) + 1:
        options.error("--slots must be greater than the most requests: the long one needs a slot too")
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    set_threads(arguments)
    info = machine()
    workers = {mode: Worker(Bench, arguments, invariant) for mode, invariant in MODES.items()}
    results = [
        {
            "mode": mode,
            "num_requests": num_requests,
            **{name: Spread.of([run[name] for run in runs]) for name in runs[0]},
        }
        for num_requests in arguments.requests
        for mode, runs in in_turns(workers, arguments.repeats, "measure", num_requests).items()
    ]
    for worker in workers.values():
        worker.close()
    print(
        f"{arguments.model}, {arguments.dtype} on {arguments.device}, {arguments.slots} slots, one prompt of "
        f"{arguments.long_tokens:,} tokens arriving; median (lowest-highest)"
    )
    print_machine(info)
    steady = {(r["mode"], r["num_requests"]): r["steady_tokens_per_s"].median for r in results}
    print_table(
        [
            "requests",
            "mode",
            "tok/s alone",
            "cost",
            "tok/s with the long one",
            "stall alone, s",
            "stall, s",
            "its TTFT, s",
        ],
        [
            [
                r["num_requests"],
                r["mode"],
                r["steady_tokens_per_s"].text(),
                f"{steady['plain', r['num_requests']] / steady[r['mode'], r['num_requests']] - 1:+.1%}",
                r["mixed_tokens_per_s"].text(),
                r["steady_stall_s"].text(3),
                r["mixed_stall_s"].text(3),
                r["long_ttft_s"].text(),
            ]
            for r in results
        ],
    )
    print_json("batching", arguments, machine=info, results=results)


if __name__ == "__main__":
    main()
