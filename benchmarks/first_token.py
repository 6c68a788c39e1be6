"""What a question about a picture of a megapixel waits for its first token, ours and transformers' in one run.

    python -m benchmarks.first_token --random 9B --peer transformers --device cuda
    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.first_token --model /tmp/random-0.8B --peer transformers

`--random` makes a random checkpoint of a size in a temporary folder first (`make_random`): 18 GB for 9B.

- full: from a JPEG file and a question to the token: read, decoded, cut into patches, tokenized, encoded, prefilled.
  Ours is `LocalBackend.stream`, as the page calls it; the peer its image processor (Pillow's), template and `generate`.
- model: the same with prompt and pixels ready in host memory.
- cold: a picture that nobody has seen. warm, ours alone: another question about the same picture, as in a chat.

A time ends when the caller has the token on the host. Every measured request has a picture of its own; all have one
size, so that shapes are known; each engine lives in a process of its own, and they are measured in turns. The first
request of each process, which compiles kernels and fills libraries' caches, is told apart. Ours is also run stage by
stage, waiting for the device after each: their sum is more than a full request, whose stages overlap.
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

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image, ImageDraw  # noqa: E402

from benchmarks import make_random  # noqa: E402
from benchmarks.first_token_workers import STAGES, make_worker  # noqa: E402
from benchmarks.peers import print_operations  # noqa: E402
from benchmarks.report import Spread, machine, print_json, print_machine, print_table  # noqa: E402
from benchmarks.worker import Worker, parser, serves  # noqa: E402

OURS, PEER = "qwen35mm", "transformers"
QUESTIONS = ["What is in this picture?", "Which colors are there?"]
# One token's side in pixels: a side of so many needs no resize.
TOKEN_SIDE = 32
Samples = dict[str, list[dict[str, Any]]]


def write_photo(path: Path, side: int, seed: int) -> None:
    """A JPEG of what costs a decoder as much as a photo: soft light, shapes with edges, a sensor's noise."""
    rng = np.random.default_rng(seed)
    light = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(
        (side, side), Image.Resampling.BICUBIC
    )
    draw = ImageDraw.Draw(light)
    for _ in range(24):
        x, y, width, height = (int(value) for value in rng.integers(0, side, 4) // (1, 1, 4, 4))
        shape = draw.ellipse if rng.integers(2) else draw.rectangle
        shape((x, y, x + width, y + height), fill=tuple(int(value) for value in rng.integers(0, 256, 3)))
    noisy = np.asarray(light, np.int16) + rng.integers(-10, 11, (side, side, 3), dtype=np.int16)
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, "JPEG", quality=90)


class Bench:
    """Workers that are asked in turns, each round about new pictures."""

    def __init__(self, workers: dict[str, Worker], folder: Path, side: int) -> None:
        self._workers, self._folder, self._side = workers, folder, side
        self._num_photos = 0

    def ask(self, do: str, engines: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """One new picture, and what each engine answers about it."""
        path = self._folder / f"{self._num_photos}.jpg"
        write_photo(path, self._side, self._num_photos)
        self._num_photos += 1
        answers = {
            engine: worker.ask(do=do, path=str(path), questions=QUESTIONS)
            for engine, worker in self._workers.items()
            if engines is None or engine in engines
        }
        path.unlink()
        return answers

    def measure(self, num_warm_ups: int, num_repeats: int) -> tuple[Samples, list[dict[str, float]]]:
        """Samples by `engine what picture`, and seconds of our stages; warm-ups aren't counted."""
        samples: Samples = {}
        stages = []
        for round_number in range(-num_warm_ups, num_repeats):
            for what in ("full", "model"):
                for engine, answer in self.ask(what).items():
                    for picture, sample in answer.items():
                        if round_number >= 0:
                            samples.setdefault(f"{engine} {what} {picture}", []).append(sample)
            (seconds,) = self.ask("stages", [OURS]).values()
            stages += [seconds] if round_number >= 0 else []
            print(f"round {round_number + 1} of {num_repeats} is done", file=sys.stderr, flush=True)
        check_work(samples)
        return samples, stages


def check_work(samples: Samples) -> None:
    """Ends the program where engines had not the same to do, or a cache did what it shouldn't, or failed to."""
    (num_tokens,) = {run["num_prompt_tokens"] for run in samples[f"{OURS} full cold"]}
    for name, runs in samples.items():
        is_warm = name.endswith("warm")
        for run in runs:
            if not is_warm and run["num_prompt_tokens"] != num_tokens:
                raise SystemExit(f"{name}: {run['num_prompt_tokens']} prompt tokens, the others have {num_tokens}")
            if run.get("num_encoded_units", not is_warm) != (not is_warm):
                raise SystemExit(f"{name}: {run['num_encoded_units']} pictures were encoded")


def results_of(samples: Samples, first: dict[str, float], load: dict[str, float]) -> list[dict[str, Any]]:
    """One entry for each row of the table."""
    results = []
    for name, runs in samples.items():
        engine, what, picture = name.split(" ")
        results.append(
            {
                "engine": engine,
                "what": what,
                "picture": picture,
                "ttft_ms": Spread.of([1e3 * run["ttft_s"] for run in runs]),
                "num_prompt_tokens": runs[0]["num_prompt_tokens"],
                "num_prefilled_tokens": runs[0].get("num_prefilled_tokens", runs[0]["num_prompt_tokens"]),
                "first_s": first[engine],
                "load_s": load[engine],
            }
        )
    return results


def num_agreeing(samples: Samples) -> tuple[int, int]:
    """How many cold requests both engines answered with the same token, and how many there were."""
    pairs = [
        (ours["token_id"], theirs["token_id"])
        for what in ("full", "model")
        for ours, theirs in zip(samples[f"{OURS} {what} cold"], samples[f"{PEER} {what} cold"], strict=True)
    ]
    return sum(ours == theirs for ours, theirs in pairs), len(pairs)


def print_report(
    arguments: argparse.Namespace, samples: Samples, stages: list[dict[str, float]], facts: dict[str, Any]
) -> None:
    """Both tables, what there is to know of the peer, and the last line."""
    results = results_of(samples, facts["first_s"], facts["load_s"])
    name = f"random {arguments.random}" if arguments.random else arguments.model
    side = arguments.side
    print(f"{name}, {arguments.dtype} on {arguments.device}, a JPEG of {side} x {side}; median (lowest-highest)")
    info = facts["machine"]
    print_machine(info)
    print_table(
        ["engine", "what", "picture", "first token, ms", "prompt tokens", "prefilled", "first request, s", "load, s"],
        [
            [
                result["engine"],
                result["what"],
                result["picture"],
                result["ttft_ms"].text(),
                result["num_prompt_tokens"],
                result["num_prefilled_tokens"],
                f"{result['first_s']:.2f}",
                f"{result['load_s']:.1f}",
            ]
            for result in results
        ],
    )
    print()
    spreads = {stage: Spread.of([1e3 * seconds[stage] for seconds in stages]) for stage in STAGES}
    spreads["sum"] = Spread.of([1e3 * sum(seconds.values()) for seconds in stages])
    print_table(["ours, by stage", "ms"], [[stage, spread.text(2)] for stage, spread in spreads.items()])
    agreement = None
    if arguments.peer:
        agreement = num_agreeing(samples)
        print(f"{agreement[0]} of {agreement[1]} first tokens are transformers'.")
        print_operations(facts["operations"])
    print_json(
        "first_token",
        model=name,
        dtype=arguments.dtype,
        device=arguments.device,
        side=side,
        machine=info,
        results=results,
        stages_ms=spreads,
        agreement=agreement,
        kernels=facts["kernels"],
        peer_operations=facts["operations"],
    )


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(__doc__, needs_model=False)
    options.add_argument("--random", choices=make_random.SIZES, help="make a random checkpoint of this size instead")
    options.add_argument("--peer", choices=[PEER], help="measure this engine as well")
    options.add_argument("--side", type=int, default=1024, help="pixels of the square picture, a multiple of 32")
    options.add_argument("--warm-ups", type=int, default=2, help="rounds that aren't counted")
    options.add_argument("--repeats", type=int, default=10)
    arguments = options.parse_args(argv)
    if (arguments.model is None) == (arguments.random is None):
        options.error("give --model or --random")
    if arguments.side < TOKEN_SIDE or arguments.side % TOKEN_SIDE:
        options.error(f"--side must be a multiple of {TOKEN_SIDE}")
    if arguments.repeats < 1 or arguments.warm_ups < 0:
        options.error("--repeats must be at least 1 and --warm-ups at least 0")
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    if serves(arguments, make_worker):
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = arguments.model
        if arguments.random:
            model = str(folder / "model")
            Path(model).mkdir()
            make_random.write(arguments.random, Path(model), arguments.dtype, seed=0)
        argv = ["--model", model, "--dtype", arguments.dtype, "--device", arguments.device]
        argv += ["--side", str(arguments.side), "--threads", str(torch.get_num_threads())]
        engines = [OURS, *([arguments.peer] if arguments.peer else [])]
        workers = {engine: stack.enter_context(Worker(__file__, argv, engine)) for engine in engines}
        bench = Bench(workers, folder, arguments.side)
        first = bench.ask("full")
        samples, stages = bench.measure(arguments.warm_ups, arguments.repeats)
        facts = {
            "machine": machine(),
            "first_s": {engine: answer["cold"]["ttft_s"] for engine, answer in first.items()},
            "load_s": {engine: worker.ready["load_s"] for engine, worker in workers.items()},
            "kernels": workers[OURS].ready["kernels"],
            "operations": workers[PEER].ready["operations"] if arguments.peer else {},
        }
    print_report(arguments, samples, stages, facts)


if __name__ == "__main__":
    main()
