"""What captioning.py measures, each in a process of its own: our pipeline, its memory, a plain loop of transformers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers import PictureReader, TransformersPeer
from benchmarks.worker import Served
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.captioning.job import Job, Outcome, carry_out
from qwen35mm.captioning.outputs import OutputSettings, parse_output
from qwen35mm.captioning.requests import CaptionStyle
from qwen35mm.captioning.run import Run, RunSettings
from qwen35mm.captioning.texts.prompts import PromptSet, Question
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.model import load
from qwen35mm.model.load import DTYPES
from qwen35mm_preprocess import MediaBudget

CONTEXT_LENGTH = 4096
# The side of a token, in pixels.
_TOKEN_SIDE = 32
_SAMPLE_EVERY_S = 0.2


class Pipeline(Served):
    """`carry_out` on an engine with a number of slots."""

    def __init__(self, arguments: argparse.Namespace, slots: int, max_tokens: int) -> None:
        super().__init__()
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
            "sampling": {"temperature": 0.0, "max_tokens": max_tokens},
            "style": CaptionStyle(max_attempts=1, keep_unfinished=True),
            "outputs": (parse_output("sidecar"),),
            "num_workers": arguments.media_workers,
            "run": RunSettings(slots=slots),
        }
        self._steps_s = _time_steps()

    def answer(self, pictures: str, out: str) -> dict[str, Any]:
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

    def run(self, pictures: str, out: str, begun: Any = None) -> Outcome:
        outcome = asyncio.run(
            carry_out(
                Job([pictures], output_settings=OutputSettings(folder=Path(out)), **self._options),
                self._captioner,
                begun,
            )
        )
        if outcome.exit_code:
            raise SystemExit(f"the run ended so: {outcome}")
        return outcome

    def close(self) -> None:
        self.backend.close()


class MemoryRun(Served):
    """The pipeline with four slots and one token a caption; how much it and its processes hold."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self._pipeline = Pipeline(arguments, slots=4, max_tokens=1)

    def answer(self, pictures: str, out: str) -> dict[str, Any]:
        """Peaks, and what this process holds when a tenth, a half and all of a folder's pictures have captions."""
        samples: list[tuple[int, int]] = []
        worker_peak_bytes, is_over = 0, threading.Event()
        num_items = sum(1 for _ in Path(pictures).iterdir())
        run: Run | None = None

        async def begin(begun: Run) -> None:
            nonlocal run
            run = begun

        def watch() -> None:
            nonlocal worker_peak_bytes
            while not is_over.wait(_SAMPLE_EVERY_S):
                if run is not None:
                    samples.append((run.counts.num_captioned, _status("self", "VmRSS")))
                worker_peak_bytes = max(worker_peak_bytes, *(_status(pid, "VmHWM") for pid in _children()), 0)

        thread = threading.Thread(target=watch)
        thread.start()
        started_s = time.perf_counter()
        try:
            self._pipeline.run(pictures, out, begin)
            seconds = time.perf_counter() - started_s
        finally:
            is_over.set()
            thread.join()
        samples.append((num_items, _status("self", "VmRSS")))
        at = [next(held for done, held in samples if done >= part * num_items) for part in (0.1, 0.5, 1)]
        return {
            "seconds": seconds,
            # Linux counts both a few pages late, each in its own time.
            "peak_bytes": max(_status("self", "VmHWM"), *at),
            "worker_peak_bytes": worker_peak_bytes,
            "resident_bytes": at,
        }

    def close(self) -> None:
        self._pipeline.close()


class PlainLoop(Served):
    """transformers' own image processor, template and `generate`, one file after the other."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        bounds = None if arguments.image_tokens is None else pixel_bounds(arguments.image_tokens)
        self._reader = PictureReader(arguments.model, bounds)
        self._peer = TransformersPeer(arguments.model, DTYPES[arguments.dtype], arguments.device)
        self._peer.model.generation_config.eos_token_id = None
        self._question, self._max_tokens = arguments.prompt, arguments.max_tokens

    def answer(self, pictures: str, out: str) -> dict[str, Any]:
        """Captions a folder of pictures into another folder."""
        Path(out).mkdir()
        num_prompt_tokens = num_generated_tokens = 0
        started_s = time.perf_counter()
        for path in sorted(Path(pictures).iterdir()):
            text, num_prompt, num_generated = self._caption(path)
            (Path(out) / f"{path.stem}.txt").write_text(text + "\n", encoding="utf-8")
            num_prompt_tokens += num_prompt
            num_generated_tokens += num_generated
        return {
            "seconds": time.perf_counter() - started_s,
            "num_prompt_tokens": num_prompt_tokens,
            "num_generated_tokens": num_generated_tokens,
        }

    def _caption(self, path: Path) -> tuple[str, int, int]:
        """The caption, and how many tokens prompt and caption have."""
        inputs = self._reader.read(path, self._question)
        reply = self._peer.generate(inputs, max_tokens=self._max_tokens)
        return self._reader.tokenizer.decode(reply, skip_special_tokens=True), len(inputs.ids), len(reply)


def pixel_bounds(num_tokens: int) -> tuple[int, int]:
    """Least and most pixels of a picture that becomes about so many tokens."""
    most = num_tokens * _TOKEN_SIDE**2
    return most * 3 // 4, most


def make_worker(role: str, arguments: argparse.Namespace) -> Served:
    """The worker of a role."""
    if role == "transformers":
        return PlainLoop(arguments)
    if role == "memory":
        return MemoryRun(arguments)
    return Pipeline(arguments, int(role.removeprefix("slots: ")), arguments.max_tokens)


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


def _status(pid: str, field: str) -> int:
    """Bytes that Linux tells of a process; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def _children() -> list[str]:
    """This process's own; a thread may end while its list is read."""
    found: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += path.read_text(encoding="utf-8").split()
    return found
