"""Time to the first token of a question about a one-megapixel picture, ours and transformers' in one run.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.first_token --model /tmp/random-0.8B --peer transformers

Time runs from a JPEG file and a question to the token on the host. Ours is `LocalBackend.stream`, as the page calls it;
the peer is transformers' image processor, template and `generate`. "cold" is a new picture; "warm", ours only, is
another question about the same picture. Every request has its own picture, all of one size. The first request of each
process compiles kernels and fills caches; it has its own column.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image as PILImage

from benchmarks.frame import Rows, Sample, Spread, Worker, ask_in_turns, parse, parser, report, synchronize
from benchmarks.peers import ONE_TOKEN, TRANSFORMERS, Transformers, last_result
from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import Event, GenerationRequest, Image, MediaPlanned, Message, Text
from qwen35mm.model import load
from qwen35mm_preprocess import MediaBudget, MediaPlan

OURS = "qwen35mm"
QUESTIONS = ("What is in this picture?", "Which colors are there?")
# Side of a token's square in pixels. A picture with multiples of it as sides isn't resized.
TOKEN_SIDE = 32


def write_photo(path: Path, side: int, seed: int) -> None:
    """A JPEG that takes about as long to decode as a photo: soft light and sensor noise."""
    rng = np.random.default_rng(seed)
    light = PILImage.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).resize((side, side))
    noisy = np.asarray(light, np.int16) + rng.integers(-10, 11, (side, side, 3), dtype=np.int16)
    PILImage.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, "JPEG", quality=90)


def photos(side: int) -> Iterator[Path]:
    """A new photo for every request, in the same order for all engines."""
    with tempfile.TemporaryDirectory() as folder:
        for number in itertools.count():
            path = Path(folder) / f"{number}.jpg"
            write_photo(path, side, number)
            yield path


class Ours:
    """The backend as the page uses it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
        pixels = arguments.side**2
        processing = replace(loaded.image_processing, min_pixels=pixels, max_pixels=pixels)
        self._device, loaded = loaded.model.device, replace(loaded, image_processing=processing)
        self._backend = LocalBackend(loaded, budget=MediaBudget(), commit_history=False)
        self._photos = photos(arguments.side)

    def first_token(self) -> Sample:
        """Asks about a new file, then again with the picture's plan, as a chat does."""
        path, plans = next(self._photos), list[MediaPlan | None]()

        async def noting(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
            async for event in events:
                if isinstance(event, MediaPlanned):
                    plans.extend(event.plans)
                yield event

        samples = {}
        for name, question in zip(("cold", "warm"), QUESTIONS, strict=True):
            message = Message("user", (Image(path, plans[0] if plans else None), Text(question)))
            synchronize(self._device)
            started_s = time.perf_counter()
            events = self._backend.stream(GenerationRequest([message], ONE_TOKEN, enable_thinking=False))
            result, ended_s = last_result(self._backend, noting(events))
            sample = {"ttft_s": ended_s - started_s, "token_id": result.token_ids[0]}
            sample |= {"num_prompt_tokens": result.num_prompt_tokens, "num_encoded": result.cache.num_encoded_units}
            samples[name] = {**sample, "num_prefilled": result.cache.num_prefilled_tokens}
        return samples

    def close(self) -> None:
        self._backend.close()


class Peer(Transformers):
    """transformers. It has no cache, so a second question would cost as much as the first."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, (arguments.side**2, arguments.side**2))
        # Ids that ours never samples: a random checkpoint has far more ids than its tokenizer has tokens.
        config = self.hf_model.config
        vision = {id_ for text, id_ in self.tokenizer.get_added_vocab().items() if text.startswith("<|vision_")}
        vision |= {config.image_token_id, config.video_token_id}
        self._never = torch.tensor(sorted(vision | set(range(len(self.tokenizer), config.text_config.vocab_size))))
        self._photos = photos(arguments.side)

    def first_token(self) -> Sample:
        path = next(self._photos)
        synchronize(torch.device(self.device))
        started_s = time.perf_counter()
        inputs = self.read(path, QUESTIONS[0])
        _, logits = self.generate(inputs, max_tokens=1)
        ttft_s = time.perf_counter() - started_s
        assert logits is not None
        token_id = int(logits.index_fill(0, self._never.to(logits.device), -torch.inf).argmax())
        return {"cold": {"ttft_s": ttft_s, "num_prompt_tokens": len(inputs.ids), "token_id": token_id}}


def check_work(name: str, sample: Sample, num_tokens: int) -> None:
    """Ends the program if an engine did different work from the first, or if the cache failed."""
    is_warm = name.endswith("warm")
    if not is_warm and sample["num_prompt_tokens"] != num_tokens:
        raise SystemExit(f"{name}: {sample['num_prompt_tokens']} prompt tokens, the others have {num_tokens}")
    if sample.get("num_encoded", not is_warm) != (not is_warm):
        raise SystemExit(f"{name}: {sample['num_encoded']} pictures were encoded")


def measure(workers: dict[str, Worker], repeats: int) -> tuple[Rows, str]:
    """The table, and for how many cold requests all engines gave the same token."""
    first = {name: worker.ask("first_token")["cold"] for name, worker in workers.items()}
    samples = ask_in_turns(workers, repeats, "first_token")
    rows: Rows = []
    for engine, runs in samples.items():
        for picture in runs[0]:
            found = [run[picture] for run in runs]
            for sample in found:
                check_work(f"{engine} {picture}", sample, first[OURS]["num_prompt_tokens"])
            row: Sample = {"engine": engine, "picture": picture}
            row["first token, ms"] = Spread.of(1e3 * sample["ttft_s"] for sample in found)
            row |= {"prompt tokens": found[0]["num_prompt_tokens"], "prefilled": found[0].get("num_prefilled")}
            rows.append({**row, "first request, s": first[engine]["ttft_s"], "load, s": workers[engine].load_s})
    ids = [[run["cold"]["token_id"] for run in runs] for runs in samples.values()]
    same = [len(set(chosen)) == 1 for chosen in zip(*ids, strict=True)]
    return rows, f"{sum(same)} of {len(same)} first tokens are the same." if len(workers) > 1 else ""


def main() -> None:
    options = parser(__doc__, repeats=10)
    options.add_argument("--peer", choices=[TRANSFORMERS], help="measure this engine as well")
    options.add_argument("--side", type=int, default=1024, help="side of the square picture in pixels")
    arguments = parse(options)
    if arguments.side < TOKEN_SIDE or arguments.side % TOKEN_SIDE:
        options.error(f"--side must be a multiple of {TOKEN_SIDE}")
    with ExitStack() as stack:
        engines = {OURS: Ours, **({TRANSFORMERS: Peer} if arguments.peer else {})}
        workers = {name: stack.enter_context(Worker(make, arguments)) for name, make in engines.items()}
        rows, same = measure(workers, arguments.repeats)
        operations = workers[TRANSFORMERS].ask("operations") if arguments.peer else ""
    title = f"A JPEG of {arguments.side} x {arguments.side}"
    report("first_token", arguments, {title: rows}, agreement=same, peer_operations=operations)


if __name__ == "__main__":
    main()
