"""Captions a second of a whole run: ours with several numbers of slots, and transformers one picture at a time.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.captioning --model /tmp/random-0.8B --image-tokens 196 --items 8 --repeats 1
    python -m benchmarks.captioning --model /tmp/random-0.8B --image-tokens 1024 --size 1024x1024 --slots 4 --items 8 \\
        --preset tags,short,detailed
    python -m benchmarks.captioning --model assets/demo --resume 100000

Ours is `carry_out` as `qwen35mm caption` uses it: files on disk become text files and a manifest, all durable. Its time
includes the scan and the start of the processes that read media. The peer opens, asks and writes one file at a time and
makes nothing durable. Every round has new pictures, the same for all. Every caption has exactly `--max-tokens` tokens,
decoded greedily. In float32 the last line reports how many differ.

"Slots waited" is the share of the slots' time that they waited for media. On a busy machine use `--threads 1`: then
threads don't wait for each other.

One more round says where the time goes: seconds a picture in the processes that read media, and in the engine's vision
tower, prompts and answers; how much of its time the engine had nothing to do; and which of these is the limit. On a GPU
that round waits for the device after each step.

`--preset` asks for several captions of each picture, and says what each costs beside the first. On a CPU that is
counted in CPU seconds, which other programs change little. `--resume` says how long a run takes to find that all its
pictures have captions, which a stand-in for the model wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from benchmarks.frame import Rows, Sample, Spread, Worker, ask_in_turns, numbers, parse, parser, report, synchronize
from benchmarks.peers import TRANSFORMERS, Transformers
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.job import Job, carry_out, default_workers
from qwen35mm.captioning.outputs import OutputSettings, parse_output
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.run import RunSettings
from qwen35mm.captioning.texts.presets import preset_question
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.contract import Event, Finished, GenerationRequest, Result, SamplingParams
from qwen35mm.decoding import Decoders
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.engine.decoder import Decoder
from qwen35mm.engine.prefill import Prefill
from qwen35mm.model import load
from qwen35mm_preprocess import MediaBudget, MediaProcessor

WARM_UP_ITEMS = 2
# Reading media limits a run if slots wait for it and the engine is idle for more than this percentage of its time.
MOST_IDLE = 10.0
CONTEXT_LENGTH = 4096
WHERE = "Where the time goes, seconds a picture"
# Side of a token's square in pixels.
_TOKEN_SIDE = 32


@dataclass
class Stages:
    """Seconds of work while `watched`.

    Attributes:
        media: of each medium in its process, without those that waited for the start of one.
        engine: the engine's, by stage.
        began_s, ended_s: the engine's first and last work.
    """

    media: list[float]
    engine: dict[str, float]
    began_s: float = 0.0
    ended_s: float = 0.0

    @classmethod
    @contextmanager
    def watched(cls, device: torch.device) -> Iterator[Stages]:
        """Watches this process's engine and media."""
        stages = cls([], dict.fromkeys(("prompt", "tower", "answer"), 0.0))
        read, step, prefill, decode = Decoders.call, Engine.step, Prefill.step, Decoder.step
        readers: set[int] = set()

        @contextmanager
        def counted(stage: str) -> Iterator[None]:
            began_s = time.perf_counter()
            yield
            synchronize(device)
            stages.engine[stage] += time.perf_counter() - began_s

        def watch_read(*arguments: Any, **options: Any) -> Any:
            is_first = threading.get_ident() not in readers
            readers.add(threading.get_ident())
            began_s = time.perf_counter()
            done = read(*arguments, **options)
            stages.media += [] if is_first else [time.perf_counter() - began_s]
            return done

        def watch_step(self: Engine) -> Any:
            before, began_s = dict(stages.engine), time.perf_counter()
            done = step(self)
            worked = [name for name, seconds in stages.engine.items() if seconds > before[name]]
            if worked:
                stages.began_s, stages.ended_s = stages.began_s or began_s, time.perf_counter()
                # The rest, such as the output head after a prompt.
                rest_s = stages.ended_s - began_s - (sum(stages.engine.values()) - sum(before.values()))
                stages.engine[worked[0]] += rest_s
            return done

        def watch_prefill(self: Prefill) -> Any:
            with counted("tower" if self.needs_tower else "prompt"):
                return prefill(self)

        def watch_decode(self: Decoder) -> Any:
            with counted("answer"):
                return decode(self)

        Decoders.call, Engine.step = watch_read, watch_step
        Prefill.step, Decoder.step = watch_prefill, watch_decode
        try:
            yield stages
        finally:
            Decoders.call, Engine.step, Prefill.step, Decoder.step = read, step, prefill, decode

    def row(self, items: int, waited: float) -> Sample:
        """Seconds a picture, and shares of time; `waited` is the slots'."""
        # Each medium is read twice: for its digest, and for its pixels.
        media_s = 2 * sum(self.media) / len(self.media) if self.media else None
        row: Sample = {"media, s": media_s}
        row |= {f"{name}, s": self.engine[name] / items for name in ("tower", "prompt", "answer")}
        row["engine idle, %"] = 100 * (1 - sum(self.engine.values()) / (self.ended_s - self.began_s))
        return {**row, "slots waited, %": 100 * waited}


class Rounds(ABC):
    """Rounds of an engine: each captions new pictures, the same for every engine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self._number = arguments, 0

    def caption(self) -> Sample:
        """Captions a folder of pictures. The first folder is small and warms up."""
        return self.round(self.count)

    @property
    def count(self) -> int:
        """Pictures of the next folder."""
        return self.arguments.items if self._number else min(WARM_UP_ITEMS, self.arguments.items)

    def round(self, count: int, *names: str) -> Sample:
        """Captions a folder of so many pictures, with a caption of each preset if named."""
        with tempfile.TemporaryDirectory() as folder:
            pictures, out = Path(folder) / "pictures", Path(folder) / "captions"
            write_pictures(pictures, count, self._number, self.arguments.size)
            self._number += 1
            sample = self.run(pictures, out, *names)
            texts = {path.name: path.read_text("utf-8").strip() for path in out.glob("*.txt") if path.stat().st_size}
        expected = count * max(1, len(names))
        if len(texts) != expected:
            raise SystemExit(f"{len(texts)} captions of {expected}: the comparison would not be fair")
        return {**sample, "texts": texts}

    @abstractmethod
    def run(self, pictures: Path, out: Path, *names: str) -> Sample:
        """Captions the pictures into `out`."""


class Pipeline(Rounds):
    """`carry_out` on an engine with a number of slots."""

    def __init__(self, arguments: argparse.Namespace, slots: int) -> None:
        super().__init__(arguments)
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device, weights=arguments.weights)
        processing = loaded.image_processing
        if arguments.image_tokens is not None:
            least, most = pixel_bounds(arguments.image_tokens)
            processing = replace(processing, min_pixels=least, max_pixels=most)
        # Every caption must have all its tokens.
        loaded = replace(loaded, image_processing=processing, eos_ids=frozenset())
        # Room for the pictures of all slots beside their replies.
        kv_bytes = 2 * (slots + 1) * CONTEXT_LENGTH * loaded.config.kv_bytes_per_token(loaded.model.dtype)
        settings = EngineSettings(context_length=CONTEXT_LENGTH, slots=slots, prompts_first=True)
        cache = CacheSettings(kv_bytes=kv_bytes)
        self.backend = LocalBackend(loaded, budget=MediaBudget(), settings=settings, cache=cache)
        self._captioner = Captioner.local(self.backend, None)
        self._options: dict[str, Any] = {
            "sampling": {"temperature": 0.0, "max_tokens": arguments.max_tokens},
            "style": CaptionStyle(max_attempts=1, keep_unfinished=True),
            "outputs": (parse_output("sidecar"),),
            "num_workers": arguments.media_workers,
            "run": RunSettings(slots=slots),
        }

    def run(self, pictures: Path, out: Path, *names: str) -> Sample:
        questions = [replace(preset_question(name), name=name) for name in names] or [Question(self.arguments.prompt)]
        output_settings = OutputSettings(folder=out)
        job = Job([str(pictures)], PromptSet(questions), output_settings=output_settings, **self._options)
        started_s, before_s = time.perf_counter(), _cpu_s()
        outcome = asyncio.run(carry_out(job, self._captioner, None))
        seconds, cpu_s = time.perf_counter() - started_s, _cpu_s() - before_s
        if outcome.exit_code:
            raise SystemExit(f"the run failed: {outcome}")
        counts, waited = outcome.counts, outcome.counts.slots_idle_s / outcome.counts.slots_s
        read, written = counts.num_prompt_tokens, counts.num_generated_tokens
        return {"seconds": seconds, "cpu": cpu_s, "read": read, "written": written, "waited": waited}

    def several(self, names: Sequence[str]) -> Sample:
        """A folder for the first preset, one for the first two, and so on."""
        count = self.count
        return {"sets": [self.round(count, *names[:number]) for number in range(1, len(names) + 1)]}

    def stages(self, names: Sequence[str]) -> Sample:
        """Where the time of a round goes, for the first preset, for the first two, and so on."""
        rows: Rows = []
        for number in range(min(1, len(names)), len(names) + 1):
            with Stages.watched(self.backend.loaded.model.device) as stages:
                sample = self.round(self.arguments.items, *names[:number])
            rows.append(stages.row(self.arguments.items, sample["waited"]))
        return {"rows": rows}

    def close(self) -> None:
        self.backend.close()


class PlainLoop(Rounds):
    """transformers' own image processor, template and `generate`, one file after the other."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        bounds = None if arguments.image_tokens is None else pixel_bounds(arguments.image_tokens)
        self._peer = Transformers(arguments, bounds)
        self._peer.hf_model.generation_config.eos_token_id = None

    def run(self, pictures: Path, out: Path, *names: str) -> Sample:
        assert not names
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


def stage_rows(workers: dict[str, Worker], names: Sequence[str]) -> tuple[Rows, list[str]]:
    """Where each engine's time goes, and what limits each."""
    rows: Rows = []
    limits: list[str] = []
    for engine, worker in workers.items():
        for count, row in enumerate(worker.ask("stages", names)["rows"], 1):
            label = engine if not names else f"{engine}: {', '.join(names[:count])}"
            print(f"stages, {label}: {row}", file=sys.stderr, flush=True)
            rows.append({"engine": label, **row})
            limits.append(f"{label}: {limit_of(row)}")
    return rows, limits


def limit_of(row: Sample) -> str:
    """What limits a run, in one sentence."""
    idle, waited = row["engine idle, %"], row["slots waited, %"]
    if min(idle, waited) > MOST_IDLE:
        return f"reading media is the limit: the engine was idle for {idle:.0f}% of its time. Try more --media-workers."
    spent = {name: row[f"{name}, s"] for name in ("tower", "prompt", "answer")}
    most = max(spent, key=lambda name: spent[name])
    share = 100 * spent[most] / sum(spent.values())
    words = {"tower": "the vision tower is", "prompt": "prompts are", "answer": "answers are"}[most]
    return f"{words} the limit: {share:.0f}% of the engine's work. It was idle for {idle:.0f}% of its time."


def cost_rows(samples: dict[str, list[Sample]], names: Sequence[str], items: int, *, by_cpu: bool) -> Rows:
    """What each further caption costs beside the first."""
    rows: Rows = []
    for engine, runs in samples.items():
        measured = [[each["cpu" if by_cpu else "seconds"] / items for each in run["sets"]] for run in runs]
        for number in range(len(names)):
            wall = Spread.of(run["sets"][number]["seconds"] / items for run in runs)
            cost = Spread.of(100 * (run[number] - (run[number - 1] if number else 0.0)) / run[0] for run in measured)
            used = Spread.of(run[number] for run in measured)
            row = {"engine": engine, "captions": ", ".join(names[: number + 1]), "s a picture": wall}
            rows.append({**row, "CPU s": used if by_cpu else None, f"the last, % of {names[0]}": cost})
    return rows


def resume(arguments: argparse.Namespace) -> None:
    """How long a run takes to find that all its pictures have captions."""
    model = AtOnce()
    captioner = Captioner(
        backend=cast("Any", model),
        name="none",
        identity={"model": "none"},
        params=SamplingParams(),
        processor=MediaProcessor.from_pretrained(arguments.model),
    )
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        pictures, count = Path(folder) / "pictures", arguments.resume
        write_pictures(pictures, count, 0, (8, 8))
        job = Job(
            [str(pictures)],
            PromptSet([Question(arguments.prompt)]),
            outputs=(parse_output("sidecar"), parse_output(f"jsonl:{folder}/all.jsonl")),
            num_workers=arguments.media_workers,
            run=RunSettings(slots=64),
        )
        for name in ("first run", *["resumed"] * arguments.repeats):
            model.num_asked = 0
            started_s, before_s = time.perf_counter(), _cpu_s()
            outcome = asyncio.run(carry_out(job, captioner, None))
            seconds, cpu_s = time.perf_counter() - started_s, _cpu_s() - before_s
            if outcome.exit_code or model.num_asked != (count if name == "first run" else 0):
                raise SystemExit(f"the {name} failed after {model.num_asked} captions: {outcome}")
            rows.append({"run": name, "seconds": seconds, "CPU s": cpu_s})
            print(rows[-1], file=sys.stderr, flush=True)
    report("captioning", arguments, {f"{count:,} pictures, a text file each and one of records": rows})


class AtOnce:
    """A stand-in for a model, which answers at once."""

    num_asked = 0

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.num_asked += 1
        yield Finished(Result("A picture of a patch.", None, "stop", (1,), (1,), 1, 1, 0.0, 0.0))


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
    options.add_argument("--weights", default="auto", help=f"as `qwen35mm caption` takes them; not {TRANSFORMERS}'")
    options.add_argument("--preset", type=_names, default=(), help="several captions, such as tags,short,detailed")
    options.add_argument("--resume", type=int, metavar="N", help="measure a second run over N pictures instead")
    arguments = parse(options)
    if arguments.resume is not None:
        resume(arguments)
        return
    if arguments.preset:
        several(arguments)
        return
    with ExitStack() as stack:
        workers = {} if arguments.no_peer else {TRANSFORMERS: stack.enter_context(Worker(PlainLoop, arguments))}
        for slots in arguments.slots:
            workers[f"qwen35mm, {slots} slots"] = stack.enter_context(Worker(Pipeline, arguments, slots))
        samples = ask_in_turns(workers, arguments.repeats, "caption")
        stages, limits = stage_rows({name: each for name, each in workers.items() if name != TRANSFORMERS}, ())
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
    tables = {title: rows_of(samples, arguments.items), WHERE: stages}
    report("captioning", arguments, tables, differing=note, limits="\n".join(limits))


def several(arguments: argparse.Namespace) -> None:
    """Several captions of each picture."""
    names = arguments.preset
    with ExitStack() as stack:
        workers = {
            f"{slots} slots": stack.enter_context(Worker(Pipeline, arguments, slots)) for slots in arguments.slots
        }
        samples = ask_in_turns(workers, arguments.repeats, "several", names)
        stages, limits = stage_rows(workers, names)
    rows = cost_rows(samples, names, arguments.items, by_cpu=arguments.device == "cpu")
    tables = {f"{arguments.items} pictures, {arguments.max_tokens} tokens a caption": rows, WHERE: stages}
    report("captioning", arguments, tables, limits="\n".join(limits))


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it has ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


if __name__ == "__main__":
    main()
