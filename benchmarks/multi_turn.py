"""A chat of many turns with one picture: what each turn's first token waits for, with and without a cache.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.multi_turn --model /tmp/random-0.8B --peer transformers
    python -m benchmarks.multi_turn --model DIR --peer-url http://127.0.0.1:8000/v1 --peer-model NAME

Every word is scripted, replies too: each turn generates one token, and then the scripted reply becomes history. All
engines answer a turn before any begins the next, so that a machine that slows down does so for all.

- cold: a new engine for every turn.
- warm: one engine; after each turn its history commit is waited for, as while a person reads.
- restart: a new process for every turn, which finds on disk what the one before left.
- transformers: a fresh `generate` for every turn. Its way to go on from a kept cache needs a prompt that begins with
  the tokens in that cache; the table's last lines say for how many turns that was so.

A second table has the prefill of the last prompt in one piece and with cuts, and what each least length of a segment
costs: more cuts are more and smaller products when cold, fewer tokens to compute again when warm, and each cut that is
kept costs a state.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines import ONE_TOKEN, PictureInputs, ServerPeer, TransformersPeer, last_result, rest
from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from benchmarks.scripted_chat import ScriptedChat
from benchmarks.worker import Worker, numbers, parser, set_threads
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import Finished, GenerationRequest, Image, Message, Text
from qwen35mm.engine import Engine, EngineSettings, Request
from qwen35mm.model import load
from qwen35mm.prompt import DEFAULT_MIN_SEGMENT

WARM_UP_TOKENS = 600
CONVERSATION = "benchmark"
Samples = dict[str, list[dict[str, Any]]]


class Ours:
    """Cold and warm backends on one loaded model, and the prefill of the last prompt.

    Args:
        directory: a disk tier's: the end of the process writes there what the next one finds.
    """

    def __init__(self, arguments: argparse.Namespace, directory: str | None = None) -> None:
        self.chat = ScriptedChat(arguments)
        self.loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
        self._image_side: int = arguments.image_side
        self._cache = CacheSettings(directory=None if directory is None else Path(directory))
        self._warm: dict[int, LocalBackend] = {}
        if directory is not None:
            self._warm[arguments.shown] = self._backend(arguments.shown)

    def cold(self, turn: int, min_segment: int) -> dict[str, Any]:
        with closing(self._backend(min_segment)) as backend:
            return self._answer(backend, turn)

    def warm(self, turn: int, min_segment: int) -> dict[str, Any]:
        """One backend for all turns; after each, the scripted reply becomes history, and that is waited for."""
        if min_segment not in self._warm:
            self._warm[min_segment] = self._backend(min_segment)
        backend = self._warm[min_segment]
        sample, started_s = self._answer(backend, turn), time.perf_counter()
        options = {"conversation": CONVERSATION, "enable_thinking": self.chat.thinking}
        backend.commit_history(GenerationRequest(self.chat.history(turn), **options))
        rest(backend)
        return {**sample, "commit_s": time.perf_counter() - started_s}

    def prefill(self, min_segment: int | None) -> dict[str, Any]:
        """The last prompt from nothing: without cuts in one piece (None) or in the usual pieces (0), or with cuts."""
        prompt = self.chat.prompt(len(self.chat.turns), min_segment or DEFAULT_MIN_SEGMENT)
        num_tokens = len(prompt.token_ids)
        if not min_segment:
            prompt = replace(prompt, segments=(), tail_start=0)
        piece_tokens = num_tokens if min_segment is None else None
        settings = EngineSettings(context_length=num_tokens + 1, piece_tokens=piece_tokens, slots=1)
        engine = Engine(self.loaded, settings, CacheSettings(reuse=False))
        engine.add(Request(prompt, (self.chat.media,), "nothing", params=ONE_TOKEN))
        result = None
        while result is None:
            for output in engine.step():
                if isinstance(output.event, Exception):
                    raise SystemExit(f"the request failed: {output.event}")
                if isinstance(output.event, Finished):
                    result = output.event.result
        piece = engine.settings.piece_tokens_on(self.loaded.model.device)
        bounds = [(s.start, s.stop) for s in prompt.segments] + [(prompt.tail_start, num_tokens)]
        return {
            "prefill_s": result.cache.prefill_s,
            "token_id": result.token_ids[0],
            "num_tokens": num_tokens,
            "num_segments": len(prompt.segments),
            "num_pieces": sum(-(-(stop - start) // piece) for start, stop in bounds),
        }

    def facts(self) -> dict[str, Any]:
        """What is known of the chat without running it."""
        return {
            "num_extending": self.chat.num_extending(),
            "state_bytes": self.loaded.config.state_bytes(self.loaded.model.dtype),
            "image_tokens": self.chat.media.plan.num_tokens,
        }

    def close(self) -> None:
        for backend in self._warm.values():
            backend.close()

    def _backend(self, min_segment: int) -> LocalBackend:
        """After a request of the chat's sizes with nothing else in common, so that libraries and memory are ready."""
        backend = LocalBackend(self.loaded, cache=self._cache, commit_history=False, min_segment=min_segment)
        words = np.random.default_rng(1).integers(0, 10, WARM_UP_TOKENS)
        picture = Image(ScriptedChat.picture(self._image_side, seed=1))
        message = Message("user", (picture, Text(" ".join(str(word) for word in words))))
        last_result(
            backend, backend.stream(GenerationRequest([message], ONE_TOKEN, enable_thinking=False, retain="nothing"))
        )
        return backend

    def _answer(self, backend: LocalBackend, turn: int) -> dict[str, Any]:
        """Streams one token of a turn's reply; seconds and the cache's report."""
        options = {"conversation": CONVERSATION, "enable_thinking": self.chat.thinking}
        result, _ = last_result(
            backend, backend.stream(GenerationRequest(self.chat.messages(turn), ONE_TOKEN, **options))
        )
        cache = result.cache
        return {
            "ttft_s": result.ttft_s,
            "num_prompt_tokens": result.num_prompt_tokens,
            "num_cached_tokens": cache.num_cached_tokens,
            "num_prefilled_tokens": cache.num_prefilled_tokens,
            "num_encoded_units": cache.num_encoded_units,
            "cached_from": dict(cache.cached_from),
            "miss": cache.miss,
            "token_id": result.token_ids[0],
        }


class Transformers(TransformersPeer):
    """It gets a prompt's ids and pixels ready-made: its own tokenizing and image processing are not in its time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.chat = ScriptedChat(arguments)
        self.cold(1)

    def cold(self, turn: int) -> dict[str, Any]:
        """Generates one token."""
        prompt, media = self.chat.prompt(turn), self.chat.media
        started_s = time.perf_counter()
        grid_thw = torch.tensor([list(media.plan.grid_thw)])
        inputs = PictureInputs(torch.tensor(prompt.token_ids), torch.from_numpy(media.pixel_values), grid_thw)
        (token_id,), _ = self.generate(inputs, max_tokens=1)
        ttft_s = time.perf_counter() - started_s
        return {"ttft_s": ttft_s, "num_prompt_tokens": len(inputs.ids), "token_id": token_id}


def measure_chat(arguments: argparse.Namespace, turns: list[dict[str, Any]]) -> None:
    """Runs the chat once with each engine; adds one sample of each to every turn."""
    server = ServerPeer(arguments.peer_url, arguments.peer_model) if arguments.peer_url else None
    chat = ScriptedChat(arguments)
    with ExitStack() as stack:
        ours = stack.enter_context(Worker(Ours, arguments))
        peer = stack.enter_context(Worker(Transformers, arguments)) if arguments.peer else None
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for entry in turns:
            turn = entry["turn"]
            samples = {"cold": ours.ask("cold", turn, arguments.shown)}
            for length in arguments.min_segment:
                samples[f"warm-{length}"] = ours.ask("warm", turn, length)
            if not arguments.no_restart:
                with Worker(Ours, arguments, folder) as restarted:
                    samples["restart"] = restarted.ask("warm", turn, arguments.shown)
            if peer is not None:
                samples["transformers"] = peer.ask("cold", turn)
            if server is not None:
                samples["server"] = server.turn(chat, turn)
            print(f"turn {turn} of {len(turns)} is done", file=sys.stderr, flush=True)
            for engine, sample in samples.items():
                entry["engines"].setdefault(engine, []).append(sample)


def measure_prefills(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Seconds of the last prompt's prefill uncut and with each way to cut it, and facts of the chat.

    The first round warms up and isn't counted.
    """
    ways: list[int | None] = [None, 0, *arguments.min_segment]
    samples: dict[int | None, list[dict[str, Any]]] = {way: [] for way in ways}
    with Worker(Ours, arguments) as worker:
        for round_number in range(arguments.prefill_repeats + 1):
            for way in ways:
                sample = worker.ask("prefill", way)
                print(f"prefill {way or 'uncut'}: {sample['prefill_s']:.2f} s", file=sys.stderr, flush=True)
                if round_number > 0:
                    samples[way].append(sample)
        facts = worker.ask("facts")
    prefills = [
        {**runs[0], "min_segment": way, "prefill_s": Spread.of([run["prefill_s"] for run in runs])}
        for way, runs in samples.items()
    ]
    return prefills, facts


def print_report(
    arguments: argparse.Namespace,
    info: dict[str, Any],
    turns: list[dict[str, Any]],
    prefills: list[dict[str, Any]],
    facts: dict[str, Any],
) -> None:
    """A turn a row, then the ways to cut, then the last line."""
    shown = arguments.shown
    chat = "thinking" if arguments.thinking else "not thinking"
    print(f"{arguments.model}, {arguments.dtype} on {arguments.device}, {chat}, segments of {shown} tokens or more")
    print_machine(info)
    _print_turns(turns, shown)
    print()
    rows = [_row(entry, turns, prefills, facts["state_bytes"]) for entry in prefills]
    print_table(
        [
            "the last prompt",
            "prefills",
            "cold, s",
            "of uncut",
            "warm TTFT, s",
            "of uncut",
            "tokens prefilled",
            "states",
        ],
        rows,
    )
    print("warm: medians over the turns from the second on. states: one for each cut, if all were kept.")
    if arguments.peer:
        print(
            f"transformers: {facts['num_extending']} of {len(turns) - 1} prompts begin with all of the one before, and "
            "only there could its kept cache be gone on from. It runs every prompt from nothing."
        )
    values = {"machine": info, "facts": facts, "turns": turns, "prefills": prefills}
    print_json("multi_turn", arguments, **values)


def _print_turns(turns: list[dict[str, Any]], shown: int) -> None:
    first: Samples = turns[0]["engines"]
    header = ["turn", "prompt tokens"]
    columns = [("cold", "cold"), (f"warm-{shown}", "warm"), ("restart", "restart")]
    ours = [(engine, title) for engine, title in columns if engine in first]
    peers = [engine for engine in ("transformers", "server") if engine in first]
    for engine, title in ours:
        header.append(f"{title}: TTFT, s")
        header += ["cached", "prefilled"] if engine != "cold" else []
        header += ["commit, s"] if title == "warm" else []
    header += [f"{peer}: TTFT, s" for peer in peers] + (["cached"] if "server" in peers else [])
    rows = []
    for entry in turns:
        engines: Samples = entry["engines"]
        row: list[object] = [entry["turn"], engines[ours[0][0]][0]["num_prompt_tokens"]]
        for engine, _ in ours:
            samples = engines[engine]
            row.append(_seconds(samples))
            if engine != "cold":
                row += [samples[0]["num_cached_tokens"], samples[0]["num_prefilled_tokens"]]
            if engine == f"warm-{shown}":
                row.append(f"{statistics.median(sample['commit_s'] for sample in samples):.2f}")
        row += [_seconds(engines[peer]) for peer in peers]
        if "server" in peers:
            cached = engines["server"][0]["num_cached_tokens"]
            row.append("?" if cached is None else cached)
        rows.append(row)
    print_table(header, rows)


def _row(
    entry: dict[str, Any], turns: list[dict[str, Any]], prefills: list[dict[str, Any]], state_bytes: int
) -> list[object]:
    """One way to cut; the first entry is the uncut one."""
    way, uncut_s, cold = entry["min_segment"], prefills[0]["prefill_s"].median, entry["prefill_s"]
    start = [cold.text(2), f"{cold.median / uncut_s:.2f}"]
    if way is None:
        return ["uncut", entry["num_pieces"], *start, "", "", "", ""]
    if way == 0:
        return ["uncut, in pieces", entry["num_pieces"], *start, "", "", "", ""]
    warm = [sample for turn in turns[1:] for sample in turn["engines"][f"warm-{way}"]]
    ttft_s = statistics.median(sample["ttft_s"] for sample in warm)
    prefilled = statistics.median(sample["num_prefilled_tokens"] for sample in warm)
    states = f"{entry['num_segments']} x {state_bytes / 2**20:.1f} MiB"
    title = f"segments of {way} or more"
    return [title, entry["num_pieces"], *start, f"{ttft_s:.2f}", f"{ttft_s / uncut_s:.3f}", f"{prefilled:.0f}", states]


def _seconds(samples: list[dict[str, Any]]) -> str:
    values = [sample["ttft_s"] for sample in samples]
    return f"{values[0]:.2f}" if len(values) == 1 else Spread.of(values).text(2)


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--peer", choices=["transformers"], help="measure this engine as well")
    options.add_argument("--peer-url", help="measure an OpenAI-compatible server as well, such as http://host:8000/v1")
    options.add_argument("--peer-model", help="the server's name for its model")
    options.add_argument("--turns", type=int, default=20)
    options.add_argument("--history-tokens", type=int, default=4000, help="of the last prompt, about")
    options.add_argument("--image-side", type=int, default=448, help="pixels of the square picture in turn 1")
    options.add_argument("--thinking", action="store_true", help="replies think, and later prompts leave it out")
    options.add_argument(
        "--min-segment",
        type=numbers,
        default=[64, 128, 256],
        help="least tokens of a segment, to compare; the first table shows the default or the first of them",
    )
    options.add_argument("--no-restart", action="store_true", help="leave out the new process for every turn")
    options.add_argument("--repeats", type=int, default=1, help="whole chats")
    options.add_argument("--prefill-repeats", type=int, default=3)
    arguments = options.parse_args(argv)
    if (arguments.peer_url is None) != (arguments.peer_model is None):
        options.error("--peer-url and --peer-model go together")
    if arguments.turns < 2:
        options.error("--turns must be at least 2")
    arguments.shown = DEFAULT_MIN_SEGMENT if DEFAULT_MIN_SEGMENT in arguments.min_segment else arguments.min_segment[0]
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    set_threads(arguments)
    info = machine()
    turns: list[dict[str, Any]] = [{"turn": turn, "engines": {}} for turn in range(1, arguments.turns + 1)]
    for _ in range(arguments.repeats):
        measure_chat(arguments, turns)
    prefills, facts = measure_prefills(arguments)
    print_report(arguments, info, turns, prefills, facts)


if __name__ == "__main__":
    main()
