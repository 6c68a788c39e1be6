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
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage
from PIL import ImageDraw

from benchmarks import make_random
from benchmarks.engines import ONE_TOKEN, PictureInputs, TransformersPeer, last_result, print_operations
from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from benchmarks.worker import Worker, parser, set_threads
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import Event, Finished, GenerationRequest, Image, MediaPlanned, Message, Progress, Text
from qwen35mm.engine import Engine, EngineSettings, Request
from qwen35mm.engine.reply import Reply
from qwen35mm.model import load
from qwen35mm.prompt import Prompt, PromptBuilder
from qwen35mm_kernels import select_backend
from qwen35mm_preprocess import MediaBudget, MediaPlan, PreparedMedia

OURS, PEER = "qwen35mm", "transformers"
QUESTIONS = ["What is in this picture?", "Which colors are there?"]
# One token's side in pixels: a side of so many needs no resize.
TOKEN_SIDE = 32
Samples = dict[str, list[dict[str, Any]]]


STAGES: tuple[str, ...] = ("read", "prompt", "vision", "prefill", "first token")
_STAGE_OF = {"encode": "vision", "prefill": "prefill"}
# Tokens that the engine which runs stage by stage has room for, beside the one that serves.
STAGED_CONTEXT = 8192
_OPTIONS: dict[str, Any] = {"enable_thinking": False}


def write_photo(path: Path, side: int, seed: int) -> None:
    """A JPEG of what costs a decoder as much as a photo: soft light, shapes with edges, a sensor's noise."""
    rng = np.random.default_rng(seed)
    light = PILImage.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(
        (side, side), PILImage.Resampling.BICUBIC
    )
    draw = ImageDraw.Draw(light)
    for _ in range(24):
        x, y, width, height = (int(value) for value in rng.integers(0, side, 4) // (1, 1, 4, 4))
        shape = draw.ellipse if rng.integers(2) else draw.rectangle
        shape((x, y, x + width, y + height), fill=tuple(int(value) for value in rng.integers(0, 256, 3)))
    noisy = np.asarray(light, np.int16) + rng.integers(-10, 11, (side, side, 3), dtype=np.int16)
    PILImage.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, "JPEG", quality=90)


class Ours:
    """The backend as the page uses it, on a picture that is never resized."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
        pixels = arguments.side**2
        processing = replace(loaded.image_processing, min_pixels=pixels, max_pixels=pixels)
        self._loaded = replace(loaded, image_processing=processing)
        self._device = loaded.model.device
        self._backend = LocalBackend(self._loaded, budget=MediaBudget(), commit_history=False)
        self._staged: StagedEngine | None = None

    def kernels(self) -> str:
        return select_backend(self._device).__name__

    def full(self, path: Path, question: str, other: str) -> dict[str, Any]:
        """From the file and a question; then another question, when the picture's plan is known, as in a chat."""
        plans: list[MediaPlan] = []
        cold = self._ask_backend(Image(path), question, plans)
        return {"cold": cold, "warm": self._ask_backend(Image(path, plans[0]), other, plans)}

    def model(self, path: Path, question: str, other: str) -> dict[str, Any]:
        """The same with prompt and pixels ready."""
        media = self._backend.media.prepare(path, kind="image")
        samples = {}
        for name, text in (("cold", question), ("warm", other)):
            request = Request(self._prompt(media, text), (media,), params=ONE_TOKEN)
            synchronize(self._device)
            started_s = time.perf_counter()
            samples[name] = self._sample(self._backend.engine.stream(request), started_s)
        return samples

    def stages(self, path: Path, question: str, _other: str) -> dict[str, float]:
        """Seconds of each part of `full`, one after the other: each waits for the device before the next begins."""
        if self._staged is None:
            self._staged = StagedEngine(self._loaded)
        laps = Laps(self._device)
        media = self._backend.media.prepare(path, kind="image")
        laps.end("read")
        prompt = self._prompt(media, question)
        laps.end("prompt")
        self._staged.run(Request(prompt, (media,), params=ONE_TOKEN), laps)
        return laps.seconds

    def close(self) -> None:
        self._backend.close()

    def _prompt(self, media: PreparedMedia, question: str) -> Prompt:
        prompts = PromptBuilder(self._loaded.tokenizer, self._loaded.template, self._loaded.config)
        return prompts.prompt([_ask(Image(media), question)], [media.plan], **_OPTIONS)

    def _ask_backend(self, image: Image, question: str, plans: list[MediaPlan]) -> dict[str, Any]:
        """Adds the picture's plan to `plans`."""

        async def noting(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
            async for event in events:
                if isinstance(event, MediaPlanned):
                    plans.extend(event.plans)
                yield event

        synchronize(self._device)
        started_s = time.perf_counter()
        return self._sample(
            noting(self._backend.stream(GenerationRequest([_ask(image, question)], ONE_TOKEN, **_OPTIONS))), started_s
        )

    def _sample(self, events: AsyncIterator[Event], started_s: float) -> dict[str, Any]:
        """The time until the caller has the token, and what was computed for it."""
        result, ended_s = last_result(self._backend, events)
        return {
            "ttft_s": ended_s - started_s,
            "num_prompt_tokens": result.num_prompt_tokens,
            "num_prefilled_tokens": result.cache.num_prefilled_tokens,
            "num_encoded_units": result.cache.num_encoded_units,
            "token_id": result.token_ids[0],
        }


class Laps:
    """Seconds by name, counted from one call of `end` to the next; the device's work belongs to them."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._device = device
        synchronize(device)
        self._last_s = time.perf_counter()

    def end(self, name: str) -> None:
        """Ends a lap, which counts towards `name`."""
        synchronize(self._device)
        now_s = time.perf_counter()
        self.seconds[name] += now_s - self._last_s
        self._last_s = now_s


class StagedEngine(Engine):
    """An engine that waits for the device between its steps, and between a prompt's last piece and the first token."""

    def __init__(self, loaded: Any) -> None:
        length = min(STAGED_CONTEXT, loaded.config.text.max_position_embeddings)
        kv_bytes = 2 * length * loaded.config.kv_bytes_per_token(loaded.model.dtype)
        super().__init__(loaded, EngineSettings(context_length=length, slots=1), CacheSettings(kv_bytes=kv_bytes))
        self._laps: Laps | None = None

    def run(self, request: Request, laps: Laps) -> None:
        """Computes a request's first token."""
        self._laps = laps
        self.add(request)
        while self.has_requests:
            phases = []
            for output in self.step():
                if isinstance(output.event, Exception):
                    raise SystemExit(f"the request failed: {output.event}")
                phases += ["end"] if isinstance(output.event, Finished) else []
                phases += [output.event.phase] if isinstance(output.event, Progress) else []
            laps.end("first token" if "end" in phases else _STAGE_OF[phases[-1]])

    def _begin_reply(self, reply: Reply) -> Any:
        assert self._laps is not None
        self._laps.end("prefill")
        return super()._begin_reply(reply)


class Transformers(TransformersPeer):
    """It keeps nothing, so that a second question would cost as much as the first."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, (arguments.side**2, arguments.side**2))
        self._never = torch.tensor(sorted(self._ids_never_sampled()))

    def full(self, path: Path, question: str, _other: str) -> dict[str, Any]:
        """Like `Ours.full`, cold alone."""
        synchronize(torch.device(self.device))
        started_s = time.perf_counter()
        return self._sample(started_s, self.read(path, question))

    def model(self, path: Path, question: str, _other: str) -> dict[str, Any]:
        """Like `Ours.model`, cold alone."""
        inputs = self.read(path, question)
        return self._sample(time.perf_counter(), inputs)

    def _sample(self, started_s: float, inputs: PictureInputs) -> dict[str, Any]:
        _, logits = self.generate(inputs, max_tokens=1)
        ttft_s = time.perf_counter() - started_s
        assert logits is not None
        token_id = int(logits.index_fill(0, self._never.to(logits.device), -torch.inf).argmax())
        return {"cold": {"ttft_s": ttft_s, "num_prompt_tokens": len(inputs.ids), "token_id": token_id}}

    def _ids_never_sampled(self) -> set[int]:
        """What ours doesn't choose from: a random checkpoint has far more ids than its tokenizer has tokens."""
        config = self.hf_model.config
        vision = {id_ for text, id_ in self.tokenizer.get_added_vocab().items() if text.startswith("<|vision_")}
        vision |= {config.image_token_id, config.video_token_id}
        return vision | set(range(len(self.tokenizer), config.text_config.vocab_size))


def synchronize(device: torch.device) -> None:
    """Waits for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ask(image: Image, question: str) -> Message:
    return Message("user", (image, Text(question)))


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
            engine: worker.ask(do, path, *QUESTIONS)
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


def results_of(samples: Samples, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry for each row of the table."""
    results = []
    for name, runs in samples.items():
        engine, what, picture = name.split(" ")
        result: dict[str, Any] = {"engine": engine, "what": what, "picture": picture}
        result["ttft_ms"] = Spread.of([1e3 * run["ttft_s"] for run in runs])
        result["num_prompt_tokens"] = runs[0]["num_prompt_tokens"]
        result["num_prefilled_tokens"] = runs[0].get("num_prefilled_tokens", runs[0]["num_prompt_tokens"])
        results.append({**result, "first_s": facts["first_s"][engine], "load_s": facts["load_s"][engine]})
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
    results = results_of(samples, facts)
    name = f"random {arguments.random}" if arguments.random else arguments.model
    side = arguments.side
    print(f"{name}, {arguments.dtype} on {arguments.device}, a JPEG of {side} x {side}; median (lowest-highest)")
    print_machine(facts["machine"])
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
        print_operations(facts["peer_operations"])
    print_json("first_token", arguments, model=name, results=results, stages_ms=spreads, agreement=agreement, **facts)


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
    set_threads(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.random:
            arguments.model = str(folder / "model")
            Path(arguments.model).mkdir()
            make_random.write(arguments.random, Path(arguments.model), arguments.dtype, seed=0)
        engines = {OURS: Ours, PEER: Transformers}
        names = [OURS, *([arguments.peer] if arguments.peer else [])]
        workers = {name: stack.enter_context(Worker(engines[name], arguments)) for name in names}
        bench = Bench(workers, folder, arguments.side)
        first = bench.ask("full")
        samples, stages = bench.measure(arguments.warm_ups, arguments.repeats)
        facts = {
            "machine": machine(),
            "first_s": {engine: answer["cold"]["ttft_s"] for engine, answer in first.items()},
            "load_s": {engine: worker.load_s for engine, worker in workers.items()},
            "kernels": workers[OURS].ask("kernels"),
            "peer_operations": workers[PEER].ask("operations") if arguments.peer else {},
        }
    print_report(arguments, samples, stages, facts)


if __name__ == "__main__":
    main()
