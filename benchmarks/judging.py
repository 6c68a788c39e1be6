"""What `caption --judge` costs: a caption alone, with its judgement, and the judgement of one of an earlier run.

    python -m benchmarks.judging --model /tmp/random-0.8B --image-tokens 256 --max-tokens 64 --sentences 5

One slot, pictures that are prepared already, each new to the cache. Captions are computed with exactly `--max-tokens`
tokens each; what is judged then is a text of `--sentences` sentences of nine words, since a random model writes none.
`uncached` is the same judgement where nothing is kept between questions: what the order of the prompt and the cache
save.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.captioning import Pipeline, _size, write_pictures
from benchmarks.report import Spread, machine, print_json, print_machine, print_table
from benchmarks.worker import Worker, parser, set_threads
from qwen35mm.captioning.items import Item
from qwen35mm.captioning.media.workers import Prepared
from qwen35mm.captioning.records import Caption
from qwen35mm.captioning.requests import CaptionRequest, CaptionSettings, CaptionStyle
from qwen35mm.contract import Event, Finished, GenerationRequest, Result

How = Literal["caption", "caption and judge", "judge", "judge, uncached"]
WAYS: tuple[How, ...] = ("caption", "caption and judge", "judge", "judge, uncached")


@dataclass
class Cost:
    """Of one caption: seconds; tokens of all its prompts, and those of them that were computed; encoded pictures."""

    seconds: float
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_encoded: int = 0
    num_questions: int = 0


class Judging(Pipeline):
    """One engine whose captions are a text that is given."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments, slots=1)
        self._question, self._text = (
            arguments.prompt,
            " ".join(f"The man in seat {number} holds a small umbrella." for number in range(arguments.sentences)),
        )
        self._params = self._captioner.params.with_overrides(temperature=0.0, max_tokens=arguments.max_tokens)
        self._results: list[Result] = []
        self._stream, self._retain = self.backend.stream, None
        self.backend.stream = self._watched

    def measure(self, path: Path, how: How) -> Cost:
        """Captions or judges a picture."""
        medium = self._captioner.processor.prepare(path)
        settings = CaptionSettings(self._params, CaptionStyle(max_attempts=1, keep_unfinished=True))
        request = CaptionRequest(Item(path.name, path, "image"), b"", medium.plan, self._question, "", settings, b"")
        known = None
        if how.startswith("judge"):
            known = Caption(text=self._text, kind="image", width=1, height=1, prompt=self._question, model="")
        self._results, self._retain = [], "nothing" if how == "judge, uncached" else None
        started_s = time.perf_counter()
        made = asyncio.run(self._captioner.caption(request, Prepared(medium), known, judges=how != "caption"))
        cost = Cost(time.perf_counter() - started_s)
        assert isinstance(made, Caption), made
        cost.num_questions = len(made.judged or ())
        for result in self._results:
            cost.num_prompt_tokens += result.num_prompt_tokens
            cost.num_computed_tokens += result.cache.num_prefilled_tokens
            cost.num_encoded += result.cache.num_encoded_units
        return cost

    async def _watched(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        request = replace(request, retain=self._retain or request.retain)
        params = request.params
        async for event in self._stream(request):
            if isinstance(event, Finished):
                self._results.append(event.result)
                if params is not None and params.logprobs is None:
                    event = replace(event, result=replace(event.result, text=self._text))
            yield event


def measure(worker: Worker, arguments: argparse.Namespace, folder: Path) -> dict[How, list[Cost]]:
    """Costs of each way, in turns; the first round warms up and isn't counted."""
    costs: dict[How, list[Cost]] = {how: [] for how in WAYS}
    for round_number in range(arguments.repeats + 1):
        write_pictures(folder / str(round_number), len(WAYS), round_number, arguments.size)
        for how, path in zip(WAYS, sorted((folder / str(round_number)).iterdir()), strict=True):
            cost = worker.ask("measure", path, how)
            if round_number > 0:
                costs[how].append(cost)
    for how, found in costs.items():
        expected = 0 if how == "caption" else arguments.sentences
        if any(cost.num_questions != expected for cost in found):
            raise SystemExit(f"{how}: {found[0].num_questions} questions were asked, not {expected}")
    return costs


def parse(argv: list[str]) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--sentences", type=int, default=5, help="of every caption that is judged")
    options.add_argument("--size", type=_size, default=(640, 480), help="of a picture, WIDTHxHEIGHT")
    options.add_argument("--image-tokens", type=int, help="of a picture, about; the checkpoint's own without it")
    options.add_argument("--prompt", default="What is in this picture?")
    options.add_argument("--max-tokens", type=int, default=64, help="of every caption, exactly")
    options.add_argument("--repeats", type=int, default=5)
    return options.parse_args(argv, argparse.Namespace(media_workers=1))


def main() -> None:
    arguments = parse(sys.argv[1:])
    set_threads(arguments)
    info = machine()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        worker = stack.enter_context(Worker(Judging, arguments))
        costs = measure(worker, arguments, Path(name))
    print(f"{arguments.model}, {arguments.dtype} on {arguments.device}, median (lowest-highest)")
    print_machine(info)
    print(f"{arguments.sentences} sentences, {arguments.max_tokens} tokens a caption, {arguments.repeats} times")
    spreads = {how: Spread.of([1e3 * cost.seconds for cost in found]) for how, found in costs.items()}
    print_table(
        ["", "ms", "against the caption alone", "prompt tokens", "of them computed", "encoded"],
        [
            [
                how,
                spreads[how].text(0),
                f"{spreads[how].median / spreads['caption'].median:.2f}x",
                found[-1].num_prompt_tokens,
                found[-1].num_computed_tokens,
                found[-1].num_encoded,
            ]
            for how, found in costs.items()
        ],
    )
    rows = {how: [vars(cost) for cost in found] for how, found in costs.items()}
    print_json("judging", arguments, machine=info, ms=spreads, costs=rows)


if __name__ == "__main__":
    main()
