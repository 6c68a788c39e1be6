"""Captions a second of a whole run: ours with several numbers of slots, and transformers one picture at a time.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.captioning --model /tmp/random-0.8B --image-tokens 196 --items 8 --repeats 1

Ours is `carry_out` as `qwen35mm caption` uses it: files on disk become text files and a manifest, all durable. Its time
includes the scan and the start of the processes that read media. The peer opens, asks and writes one file at a time and
makes nothing durable. Every round has new pictures, the same for all. Every caption has exactly `--max-tokens` tokens,
decoded greedily. In float32 the last line reports how many differ.

"Slots waited" is the share of the slots' time that they waited for media. On a busy machine use `--threads 1`: then
threads don't wait for each other.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.frame import Sample, Spread, Worker, ask_in_turns, numbers, parse, parser, report
from benchmarks.peers import TRANSFORMERS, Transformers
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.job import Job, carry_out, default_workers
from qwen35mm.captioning.outputs import OutputSettings, parse_output
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.run import RunSettings
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.engine import EngineSettings
from qwen35mm.model import load
from qwen35mm_preprocess import MediaBudget

WARM_UP_ITEMS = 2
CONTEXT_LENGTH = 4096
# Side of a token's square in pixels.
_TOKEN_SIDE = 32


class Rounds(ABC):
    """Rounds of an engine: each captions new pictures, the same for every engine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self._number = arguments, 0

    def caption(self) -> Sample:
        """Captions a folder of pictures. The first folder is small and warms up."""
        count = self.arguments.items if self._number else min(WARM_UP_ITEMS, self.arguments.items)
        with tempfile.TemporaryDirectory() as folder:
            pictures, out = Path(folder) / "pictures", Path(folder) / "captions"
            write_pictures(pictures, count, self._number, self.arguments.size)
            self._number += 1
            sample = self.run(pictures, out)
            texts = {path.name: path.read_text("utf-8").strip() for path in out.glob("*.txt") if path.stat().st_size}
        if len(texts) != count:
            raise SystemExit(f"{len(texts)} captions of {count}: the comparison would not be fair")
        return {**sample, "texts": texts}

    @abstractmethod
    def run(self, pictures: Path, out: Path) -> Sample:
        """Captions the pictures into `out`."""


class Pipeline(Rounds):
    """`carry_out` on an engine with a number of slots."""

    def __init__(self, arguments: argparse.Namespace, slots: int) -> None:
        super().__init__(arguments)
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
        processing = loaded.image_processing
        if arguments.image_tokens is not None:
            least, most = pixel_bounds(arguments.image_tokens)
            processing = replace(processing, min_pixels=least, max_pixels=most)
        # Every caption must have all its tokens.
        loaded = replace(loaded, image_processing=processing, eos_ids=frozenset())
        kv_bytes = (slots + 1) * CONTEXT_LENGTH * loaded.config.kv_bytes_per_token(loaded.model.dtype)
        settings, cache = EngineSettings(context_length=CONTEXT_LENGTH, slots=slots), CacheSettings(kv_bytes=kv_bytes)
        self.backend = LocalBackend(loaded, budget=MediaBudget(), settings=settings, cache=cache)
        self._captioner = Captioner.local(self.backend, None)
        self._options: dict[str, Any] = {
            "prompts": PromptSet([Question(arguments.prompt)]),
            "sampling": {"temperature": 0.0, "max_tokens": arguments.max_tokens},
            "style": CaptionStyle(max_attempts=1, keep_unfinished=True),
            "outputs": (parse_output("sidecar"),),
            "num_workers": arguments.media_workers,
            "run": RunSettings(slots=slots),
        }

    def run(self, pictures: Path, out: Path) -> Sample:
        job = Job([str(pictures)], output_settings=OutputSettings(folder=out), **self._options)
        started_s = time.perf_counter()
        outcome = asyncio.run(carry_out(job, self._captioner, None))
        seconds = time.perf_counter() - started_s
        if outcome.exit_code:
            raise SystemExit(f"the run failed: {outcome}")
        counts, waited = outcome.counts, outcome.counts.slots_idle_s / outcome.counts.slots_s
        read, written = counts.num_prompt_tokens, counts.num_generated_tokens
        return {"seconds": seconds, "read": read, "written": written, "waited": waited}

    def close(self) -> None:
        self.backend.close()


class PlainLoop(Rounds):
    """transformers' own image processor, template and `generate`, one file after the other."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        bounds = None if arguments.image_tokens is None else pixel_bounds(arguments.image_tokens)
        self._peer = Transformers(arguments, bounds)
        self._peer.hf_model.generation_config.eos_token_id = None

    def run(self, pictures: Path, out: Path) -> Sample:
        out.mkdir()
        num_read = num_written = 0
        started_s = time.perf_counter()
        for path in sorted(pictures.iterdir()):
            inputs = self._peer.read(path, self.arguments.prompt)
            reply, _ = self._peer.generate(inputs, self.arguments.max_tokens)
            text = self._peer.tokenizer.decode(reply, skip_special_tokens=True)
            (out / f"{path.stem}.txt").write_text(text + "\n", encoding="utf-8")
            num_read, num_written = num_read + len(inputs.ids), num_written + len(reply)
        return {"seconds": time.perf_counter() - started_s, "read": num_read, "written": num_written}


def pixel_bounds(num_tokens: int) -> tuple[int, int]:
    """Least and most pixels of a picture of about this many tokens."""
    most = num_tokens * _TOKEN_SIDE**2
    return most * 3 // 4, most


def write_pictures(folder: Path, count: int, seed: int, size: tuple[int, int]) -> None:
    """Smooth patches of colour, different for every seed and number; `size` is (width, height)."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for number in range(count):
        pixels = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(folder / f"{number:06}.jpg")


def check_work(samples: dict[str, list[Sample]]) -> None:
    """Ends the program unless all engines read and wrote the same numbers of tokens."""
    first = next(iter(samples.values()))
    for engine, runs in samples.items():
        for name in ("read", "written"):
            if [run[name] for run in runs] != [run[name] for run in first]:
                raise SystemExit(f"{engine} {name} other numbers of tokens than the first engine")


def rows_of(samples: dict[str, list[Sample]], items: int) -> list[Sample]:
    peer = [run["seconds"] for run in samples.get(TRANSFORMERS, [])]
    rows = []
    for engine, runs in samples.items():
        rate = Spread.of(items / run["seconds"] for run in runs)
        row = {"engine": engine, "captions/s": rate}
        row["tokens/s"] = Spread.of(run["written"] / run["seconds"] for run in runs)
        row[f"times {TRANSFORMERS}"] = rate.median / Spread.of(items / each for each in peer).median if peer else None
        waited = Spread.of(100 * run["waited"] for run in runs) if "waited" in runs[0] else None
        rows.append({**row, "slots waited, %": waited})
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--slots", type=numbers, default=[1, 2, 4, 8], help="numbers of slots to compare")
    options.add_argument("--items", type=int, default=64, help="pictures of a round")
    options.add_argument("--size", type=_size, default=(640, 480), help="of a picture, WIDTHxHEIGHT")
    options.add_argument("--image-tokens", type=int, help="of a picture, about; the checkpoint's own by default")
    options.add_argument("--prompt", default="What is in this picture?")
    options.add_argument("--max-tokens", type=int, default=16, help="of every caption, exactly")
    options.add_argument("--media-workers", type=int, default=default_workers(), help="processes that read media")
    options.add_argument("--no-peer", action="store_true", help=f"leave {TRANSFORMERS} out")
    arguments = parse(options)
    with ExitStack() as stack:
        workers = {} if arguments.no_peer else {TRANSFORMERS: stack.enter_context(Worker(PlainLoop, arguments))}
        for slots in arguments.slots:
            workers[f"qwen35mm, {slots} slots"] = stack.enter_context(Worker(Pipeline, arguments, slots))
        samples = ask_in_turns(workers, arguments.repeats, "caption")
    check_work(samples)
    expected, *others = [[run.pop("texts") for run in runs] for runs in samples.values()]
    num_read = next(iter(samples.values()))[0]["read"]
    title = f"{arguments.items} pictures, {num_read / arguments.items:.0f} + {arguments.max_tokens} tokens each"
    differing = [
        sum(theirs[name] != text for mine, theirs in zip(expected, runs, strict=True) for name, text in mine.items())
        for runs in others
    ]
    exact = arguments.dtype == "float32"
    note = f"Captions that differ from the first engine's: {differing}" if exact else ""
    report("captioning", arguments, {title: rows_of(samples, arguments.items)}, differing=note)


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


if __name__ == "__main__":
    main()
