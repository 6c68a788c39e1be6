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
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "preprocess")]

from benchmarks.multi_turn_table import print_report  # noqa: E402
from benchmarks.multi_turn_workers import Script, make_worker  # noqa: E402
from benchmarks.peers import ServerPeer  # noqa: E402
from benchmarks.report import Spread, machine  # noqa: E402
from benchmarks.worker import Worker, numbers, parser, serves  # noqa: E402
from qwen35mm.prompt import DEFAULT_MIN_SEGMENT  # noqa: E402


def measure_chat(arguments: argparse.Namespace, argv: list[str], turns: list[dict[str, Any]]) -> None:
    """Runs the chat once with each engine; adds one sample of each to every turn."""
    server = ServerPeer(arguments.peer_url, arguments.peer_model) if arguments.peer_url else None
    chat = Script(arguments).chat
    with ExitStack() as stack:
        ours = stack.enter_context(Worker(__file__, argv, "qwen35mm"))
        peer = stack.enter_context(Worker(__file__, argv, "transformers")) if arguments.peer else None
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for entry in turns:
            turn = entry["turn"]
            samples = {"cold": ours.ask(do="cold", turn=turn, min_segment=arguments.shown)}
            for length in arguments.min_segment:
                samples[f"warm-{length}"] = ours.ask(do="warm", turn=turn, min_segment=length)
            if not arguments.no_restart:
                with Worker(__file__, [*argv, "--directory", folder], "restart") as restarted:
                    samples["restart"] = restarted.ask(turn=turn)
            if peer is not None:
                samples["transformers"] = peer.ask(turn=turn)
            if server is not None:
                samples["server"] = server.turn(chat, turn)
            print(f"turn {turn} of {len(turns)} is done", file=sys.stderr, flush=True)
            for engine, sample in samples.items():
                entry["engines"].setdefault(engine, []).append(sample)


def measure_prefills(arguments: argparse.Namespace, argv: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Seconds of the last prompt's prefill uncut and with each way to cut it, and facts of the chat.

    The first round warms up and isn't counted.
    """
    ways: list[int | None] = [None, 0, *arguments.min_segment]
    samples: dict[int | None, list[dict[str, Any]]] = {way: [] for way in ways}
    with Worker(__file__, argv, "qwen35mm") as worker:
        for round_number in range(arguments.prefill_repeats + 1):
            for way in ways:
                sample = worker.ask(do="prefill", min_segment=way)
                print(f"prefill {way or 'uncut'}: {sample['prefill_s']:.2f} s", file=sys.stderr, flush=True)
                if round_number > 0:
                    samples[way].append(sample)
        facts = worker.ask(do="facts")
    prefills = [
        {**runs[0], "min_segment": way, "prefill_s": Spread.of([run["prefill_s"] for run in runs])}
        for way, runs in samples.items()
    ]
    return prefills, facts


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
    options.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args(argv)
    if (arguments.peer_url is None) != (arguments.peer_model is None):
        options.error("--peer-url and --peer-model go together")
    if arguments.turns < 2:
        options.error("--turns must be at least 2")
    arguments.shown = DEFAULT_MIN_SEGMENT if DEFAULT_MIN_SEGMENT in arguments.min_segment else arguments.min_segment[0]
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    if serves(arguments, make_worker):
        return
    info, argv = machine(), sys.argv[1:]
    turns: list[dict[str, Any]] = [{"turn": turn, "engines": {}} for turn in range(1, arguments.turns + 1)]
    for _ in range(arguments.repeats):
        measure_chat(arguments, argv, turns)
    prefills, facts = measure_prefills(arguments, argv)
    print_report(arguments, info, turns, prefills, facts, arguments.shown)


if __name__ == "__main__":
    main()
