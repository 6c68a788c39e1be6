"""Captions a second of a whole run, against transformers one picture after the other; and what a run holds in memory.

    python -m benchmarks.captioning --model assets/demo --dtype float32
    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.captioning --model /tmp/random-0.8B --image-tokens 196 --items 8 --repeats 1
    python -m benchmarks.captioning --model assets/demo --memory 1000,20000

Ours is `carry_out` as the command line uses it: files on a disk become text files beside a manifest, every one of them
durable; its time includes the scan and the start of the processes that read media. The peer opens, asks and writes one
file at a time and makes nothing durable; where the folder of temporary files is in memory (tmpfs), durable costs
nothing either. Every round has new pictures, the same for all; every caption has exactly `--max-tokens` tokens, the
prompts are compared by their length, and in float32 it is said how many captions differ (all are greedy, ours cleaned).
Each engine lives in a process of its own; they are measured in turns.

The share of time that slots waited for media is of all slots' time, from the run's first moment to its last; the
engine's share is the time in which its thread computed. `--memory` runs the pipeline over so many tiny files, one
token a caption, each number in a new process, and then once more in another, where everything is there already: that
is "resumed". Both begin with a model that is loaded. Where other programs use the machine, `--threads 1` keeps threads
from waiting for each other, which else slows both down many times over. It holds for the engine alone: the peer then
has one core, ours has one and what its media processes and its writing thread take of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.engines import TransformersPeer
from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from benchmarks.worker import Worker, child_processes, numbers, parser, set_threads, status_bytes
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.job import Job, Outcome, carry_out, default_workers
from qwen35mm.captioning.outputs import OutputSettings, parse_output
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.run import Run, RunSettings
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.model import load
from qwen35mm_preprocess import MediaBudget

PEER = "transformers"
WARM_UP_ITEMS = 2
CONTEXT_LENGTH = 4096
# The side of a token, in pixels.
_TOKEN_SIDE = 32
_SAMPLE_EVERY_S = 0.2
_LOOK_EVERY_S = 0.01


class Pipeline:
    """`carry_out` on an engine with a number of slots."""

    def __init__(self, arguments: argparse.Namespace, slots: int, max_tokens: int | None = None) -> None:
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
        processing = loaded.image_processing
        if arguments.image_tokens is not None:
            least, most = pixel_bounds(arguments.image_tokens)
            processing = replace(processing, min_pixels=least, max_pixels=most)
        # No caption may end before its last token: the work would differ.
        loaded = replace(loaded, image_processing=processing, eos_ids=frozenset())
        kv_bytes = (slots + 1) * CONTEXT_LENGTH * loaded.config.kv_bytes_per_token(loaded.model.dtype)
        self.backend = LocalBackend(
            loaded,
            budget=MediaBudget(),
            settings=EngineSettings(context_length=CONTEXT_LENGTH, slots=slots),
            cache=CacheSettings(kv_bytes=kv_bytes),
        )
        self._captioner = Captioner.local(self.backend, None)
        self._options: dict[str, Any] = {
            "prompts": PromptSet([Question(arguments.prompt)]),
            "sampling": {"temperature": 0.0, "max_tokens": max_tokens or arguments.max_tokens},
            "style": CaptionStyle(max_attempts=1, keep_unfinished=True),
            "outputs": (parse_output("sidecar"),),
            "num_workers": arguments.media_workers,
            "run": RunSettings(slots=slots),
        }
        self._steps_s = _time_steps()

    def caption(self, pictures: Path, out: Path) -> dict[str, Any]:
        """Captions a folder of pictures into another folder."""
        self._steps_s.clear()
        started_s = time.perf_counter()
        counts = self.run(pictures, out).counts
        seconds = time.perf_counter() - started_s
        return {
            "seconds": seconds,
            "num_prompt_tokens": counts.num_prompt_tokens,
            "num_generated_tokens": counts.num_generated_tokens,
            "slots_waited": counts.slots_idle_s / counts.slots_s,
            "engine_busy": sum(self._steps_s) / seconds,
        }

    def run(self, pictures: Path, out: Path, begun: Any = None) -> Outcome:
        outcome = asyncio.run(
            carry_out(
                Job([str(pictures)], output_settings=OutputSettings(folder=out), **self._options),
                self._captioner,
                begun,
            )
        )
        if outcome.exit_code:
            raise SystemExit(f"the run ended so: {outcome}")
        return outcome

    def close(self) -> None:
        self.backend.close()


class MemoryRun(Pipeline):
    """The pipeline; how much it and its processes hold."""

    def caption(self, pictures: Path, out: Path) -> dict[str, Any]:
        """Peaks, and what this process holds when a tenth, a half and all of a folder's pictures have captions."""
        samples, first_s = list[tuple[int, int]](), None
        worker_peaks, is_over = dict[str, int](), threading.Event()
        num_items = sum(1 for _ in pictures.iterdir())
        run: Run | None = None

        async def begin(begun: Run) -> None:
            nonlocal run
            run = begun

        def watch() -> None:
            nonlocal first_s
            while not is_over.wait(_LOOK_EVERY_S if first_s is None else _SAMPLE_EVERY_S):
                if run is not None:
                    if first_s is None and run.counts.num_captioned:
                        first_s = time.perf_counter() - started_s
                    samples.append((run.counts.num_captioned, status_bytes("self", "VmRSS")))
                # The last, not the highest: until it has become another program, a child has its parent's.
                worker_peaks.update((pid, peak) for pid in child_processes() if (peak := status_bytes(pid, "VmHWM")))

        thread = threading.Thread(target=watch)
        started_s = time.perf_counter()
        thread.start()
        try:
            self.run(pictures, out, begin)
            seconds = time.perf_counter() - started_s
        finally:
            is_over.set()
            thread.join()
        samples.append((num_items, status_bytes("self", "VmRSS")))
        at = [next(held for done, held in samples if done >= part * num_items) for part in (0.1, 0.5, 1)]
        return {
            "seconds": seconds,
            "first_s": first_s,
            # Linux counts both a few pages late, each in its own time.
            "peak_bytes": max(status_bytes("self", "VmHWM"), *at),
            "worker_peak_bytes": max(worker_peaks.values(), default=0),
            "resident_bytes": at,
        }

    def resume(self, pictures: Path, out: Path) -> dict[str, Any]:
        """The same once more: nothing is to be done."""
        started_s = time.perf_counter()
        counts = self.run(pictures, out).counts
        seconds = time.perf_counter() - started_s
        assert counts.num_present == counts.num_found, counts
        return {"resumed_s": seconds, "resumed_peak_bytes": status_bytes("self", "VmHWM")}


class PlainLoop(TransformersPeer):
    """transformers' own image processor, template and `generate`, one file after the other."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, None if arguments.image_tokens is None else pixel_bounds(arguments.image_tokens))
        self.hf_model.generation_config.eos_token_id = None
        self._question, self._max_tokens = arguments.prompt, arguments.max_tokens

    def caption(self, pictures: Path, out: Path) -> dict[str, Any]:
        """Captions a folder of pictures into another folder."""
        out.mkdir()
        num_prompt_tokens = num_generated_tokens = 0
        started_s = time.perf_counter()
        for path in sorted(pictures.iterdir()):
            inputs = self.read(path, self._question)
            reply, _ = self.generate(inputs, self._max_tokens)
            text = self.tokenizer.decode(reply, skip_special_tokens=True)
            (out / f"{path.stem}.txt").write_text(text + "\n", encoding="utf-8")
            num_prompt_tokens += len(inputs.ids)
            num_generated_tokens += len(reply)
        return {
            "seconds": time.perf_counter() - started_s,
            "num_prompt_tokens": num_prompt_tokens,
            "num_generated_tokens": num_generated_tokens,
        }


def pixel_bounds(num_tokens: int) -> tuple[int, int]:
    """Least and most pixels of a picture that becomes about so many tokens."""
    most = num_tokens * _TOKEN_SIDE**2
    return most * 3 // 4, most


def _time_steps() -> list[float]:
    """Seconds of every step that an engine of this process will do."""
    original, seconds = Engine.step, list[float]()

    def step(self: Engine) -> Any:
        started_s = time.perf_counter()
        try:
            return original(self)
        finally:
            seconds.append(time.perf_counter() - started_s)

    Engine.step = step
    return seconds


def write_pictures(folder: Path, count: int, seed: int, size: tuple[int, int], kind: str = "jpg") -> None:
    """Smooth patches of colour that no other seed and number gives; `size` is (width, height)."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for number in range(count):
        pixels = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(folder / f"{number:06}.{kind}")


def measure(workers: dict[str, Worker], arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One entry per engine; the first round, a short one, warms up and isn't counted."""
    samples: dict[str, list[dict[str, Any]]] = {engine: [] for engine in workers}
    num_differing = dict.fromkeys(workers, 0)
    for round_number in range(arguments.repeats + 1):
        pictures, out = folder / "pictures", folder / "captions"
        count = arguments.items if round_number > 0 else min(WARM_UP_ITEMS, arguments.items)
        write_pictures(pictures, count, round_number, arguments.size)
        expected: dict[str, str] = {}
        for engine, worker in workers.items():
            sample = worker.ask("caption", pictures, out)
            texts = _check_captions(engine, out, count)
            expected = expected or texts
            num_differing[engine] += sum(text != expected[name] for name, text in texts.items()) * (round_number > 0)
            shutil.rmtree(out)
            print(f"round {round_number}, {engine}: {sample['seconds']:.1f} s", file=sys.stderr, flush=True)
            if round_number > 0:
                samples[engine].append(sample)
        shutil.rmtree(pictures)
    _check_work(samples)
    return [
        {
            "engine": engine,
            "items_per_s": Spread.of([arguments.items / run["seconds"] for run in runs]),
            "tokens_per_s": Spread.of([run["num_generated_tokens"] / run["seconds"] for run in runs]),
            "num_prompt_tokens": runs[0]["num_prompt_tokens"],
            "num_generated_tokens": runs[0]["num_generated_tokens"],
            "num_differing": num_differing[engine],
            **{
                share: Spread.of([run[share] for run in runs])
                for share in ("slots_waited", "engine_busy")
                if share in runs[0]
            },
        }
        for engine, runs in samples.items()
    ]


def _check_captions(engine: str, out: Path, count: int) -> dict[str, str]:
    """The captions by their files' names, without the space around them."""
    texts = {path.name: path.read_text("utf-8").strip() for path in out.glob("*.txt") if path.stat().st_size}
    if len(texts) != count:
        raise SystemExit(f"{engine} wrote {len(texts)} captions of {count}: the comparison would not be fair")
    return texts


def _check_work(samples: dict[str, list[dict[str, Any]]]) -> None:
    """Every engine read and wrote as many tokens."""
    first = next(iter(samples.values()))
    for engine, runs in samples.items():
        for name in ("num_prompt_tokens", "num_generated_tokens"):
            if [run[name] for run in runs] != [run[name] for run in first]:
                raise SystemExit(f"{name} of {engine} differ from the others': they were not asked the same")


def measure_memory(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One entry per number of files."""
    results = []
    for count in arguments.memory:
        pictures, out = folder / f"tiny-{count}", folder / "captions"
        write_pictures(pictures, count, 0, (8, 6), "png")
        with Worker(MemoryRun, arguments, 4, 1) as worker:
            result = worker.ask("caption", pictures, out)
        _check_captions("qwen35mm", out, count)
        with Worker(MemoryRun, arguments, 4, 1) as worker:
            result |= worker.ask("resume", pictures, out)
        shutil.rmtree(out)
        shutil.rmtree(pictures)
        print(f"{count} files: {result['seconds']:.1f} s, {result['resumed_s']:.1f} s", file=sys.stderr, flush=True)
        results.append({"num_files": count, **result})
    return results


def print_speed(results: list[dict[str, Any]]) -> None:
    peer = next((result["items_per_s"].median for result in results if result["engine"] == PEER), None)
    print_table(
        ["engine", "items/s", "tokens/s", f"against {PEER}", "slots waited for media", "engine at work"],
        [
            [
                result["engine"],
                result["items_per_s"].text(2),
                result["tokens_per_s"].text(),
                "-" if peer is None else f"{result['items_per_s'].median / peer:.2f}x",
                f"{result['slots_waited'].median:.1%}" if "slots_waited" in result else "-",
                f"{result['engine_busy'].median:.1%}" if "engine_busy" in result else "-",
            ]
            for result in results
        ],
    )


def print_memory(results: list[dict[str, Any]]) -> None:
    print_table(
        [
            *("files", "first caption, s", "items/s", "resumed, s", "resumed, MiB"),
            *("peak, MiB", "of a media process, MiB", "at a tenth", "at a half", "at the end"),
        ],
        [
            [
                result["num_files"],
                f"{result['first_s']:.2f}",
                f"{result['num_files'] / result['seconds']:.1f}",
                f"{result['resumed_s']:.1f}",
                *(f"{result[name] / 2**20:.0f}" for name in ("resumed_peak_bytes", "peak_bytes", "worker_peak_bytes")),
                *(f"{number / 2**20:.0f}" for number in result["resident_bytes"]),
            ]
            for result in results
        ],
    )


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--slots", type=numbers, default=[1, 2, 4, 8], help="numbers of slots to compare")
    options.add_argument("--items", type=int, default=64, help="pictures of a round")
    options.add_argument("--size", type=_size, default=(640, 480), help="of a picture, WIDTHxHEIGHT")
    options.add_argument("--image-tokens", type=int, help="of a picture, about; the checkpoint's own without it")
    options.add_argument("--prompt", default="What is in this picture?")
    options.add_argument("--max-tokens", type=int, default=16, help="of every caption, exactly")
    options.add_argument("--media-workers", type=int, help="processes that read media; the command's number without it")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--no-peer", action="store_true", help=f"leave {PEER} out")
    options.add_argument("--memory", type=numbers, help="measure memory instead, over these numbers of files")
    arguments = options.parse_args(argv)
    arguments.media_workers = arguments.media_workers or default_workers()
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    set_threads(arguments)
    info = machine()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        if arguments.memory:
            results = measure_memory(arguments, Path(name))
        else:
            workers = {} if arguments.no_peer else {PEER: stack.enter_context(Worker(PlainLoop, arguments))}
            for slots in arguments.slots:
                workers[f"slots: {slots}"] = stack.enter_context(Worker(Pipeline, arguments, slots))
            results = measure(workers, arguments, Path(name))
    print(f"{arguments.model}, {arguments.dtype} on {arguments.device}, median (lowest-highest)")
    print_machine(info)
    if arguments.memory:
        print_memory(results)
        print_json("captioning", arguments, machine=info, memory=results)
        return
    width, height = arguments.size
    num_tokens = results[0]["num_prompt_tokens"] / arguments.items
    print(
        f"{arguments.items} pictures of {width} x {height}, {num_tokens:.0f} + {arguments.max_tokens} tokens each, "
        f"{arguments.repeats} times, {arguments.media_workers} media processes; prompt: {arguments.prompt}"
    )
    print_speed(results)
    if arguments.dtype == "float32":
        for result in results[1:]:
            of = f"{arguments.items * arguments.repeats} captions of {result['engine']}"
            print(f"{result['num_differing']} of {of} differ from those of {results[0]['engine']}")
    print_json("captioning", arguments, machine=info, results=results)


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


if __name__ == "__main__":
    main()
