"""Tokens a second with and without speculation, in one run on one loaded model.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.speculation --model /tmp/random-0.8B --weights bf16,int8 --chances 0.5,0.85 --batches 1,2,4
    python -m benchmarks.speculation --model assets/demo --weights bf16

A random checkpoint says nothing that could be guessed. So its first reply is kept, and later ones are drafted from it:
each token is right with the given chance, and a wrong one ends the draft. `mtp` drafts take the time of the model's own
layer, which runs and whose tokens are replaced; `known` drafts take none, as those of repetitions and grammars. "edit"
says a file of the prompt again with every tenth line changed: its tokens are dictated, the drafts are the engine's own.
The bundled model answers questions about its pictures with drafts of its own.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.frame import Rows, Spread, numbers, parse, parser, report
from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import Result
from qwen35mm.engine import EngineSettings
from qwen35mm.engine.mtp_drafter import MTPDrafter, Wanted
from qwen35mm.engine.reply import Reply
from qwen35mm.engine.speculation import Draft, Origin
from qwen35mm.model import LoadedModel, load

Ask = Callable[[LocalBackend], Sequence[Result]]
_LINES = 20


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--weights", default="bf16", help="formats of the weights; bf16")
    options.add_argument("--chances", default="0.5,0.85,0.95", help="of a drafted token; 0.5,0.85,0.95")
    options.add_argument("--batches", default="1,2,4", help="replies at one time; 1,2,4")
    options.add_argument("--tokens", type=int, default=128, help="tokens of a reply; 128")
    arguments = parse(options)
    rows: Rows = []
    for weights in arguments.weights.split(","):
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device, weights=weights, mtp=True)
        for batch in numbers(arguments.batches):
            rows += [{"weights": weights, "replies": batch, **row} for row in measured(loaded, batch, arguments)]
    report("speculation", arguments, {"Tokens a second of all replies together": rows})


def measured(loaded: LoadedModel, batch: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each kind of draft."""
    backends = {mode: started(loaded, batch, mode) for mode in ("off", "auto", "mtp")}
    try:
        if Path(arguments.model).resolve() == demo_model_path().resolve():
            for mode in ("auto", "mtp"):
                yield row_of(f"its own, {mode}", backends, mode, pictures(batch), arguments.repeats)
            return
        ask = stories(batch, arguments.tokens)
        known = {result.prompt_token_ids: result.token_ids for result in ask(backends["off"])}
        for chance in map(float, arguments.chances.split(",")):
            rng = random.Random(3)
            with known_drafts(known, chance, rng):
                yield row_of(f"known, {chance:.0%}", backends, "auto", ask, arguments.repeats)
            if loaded.model.mtp is not None:
                with known_drafts_of_layer(known, chance, rng):
                    yield row_of(f"mtp, {chance:.0%}", backends, "mtp", ask, arguments.repeats)
        with dictated(loaded):
            yield row_of("edit", backends, "auto", edits(batch), arguments.repeats)
    finally:
        for backend in backends.values():
            backend.close()


def started(loaded: LoadedModel, batch: int, mode: str) -> LocalBackend:
    settings = EngineSettings(context_length=4096, slots=batch, speculate=mode)
    return LocalBackend(loaded, settings=settings, cache=CacheSettings(reuse=False))


def row_of(kind: str, backends: dict[str, LocalBackend], mode: str, ask: Ask, repeats: int) -> dict[str, Any]:
    """Both modes by turns, after one warm-up of each."""
    speeds: dict[str, list[float]] = {"off": [], mode: []}
    said: dict[str, list[tuple[int, ...]]] = {}
    tokens_a_step = 1.0
    for number in range(repeats + 1):
        for each in speeds:
            before_s = time.perf_counter()
            results = ask(backends[each])
            spent_s = time.perf_counter() - before_s - max(result.ttft_s or 0.0 for result in results)
            num_tokens = sum(result.num_generated_tokens - 1 for result in results)
            said[each] = [result.token_ids for result in results]
            if number:
                speeds[each].append(num_tokens / spent_s)
            if each == mode:
                tokens_a_step = num_tokens / (num_tokens - sum(result.num_accepted_tokens for result in results))
    assert said["off"] == said[mode], "speculation changed a reply"
    off, on = Spread.of(speeds["off"]), Spread.of(speeds[mode])
    return {"drafts": kind, "off": off, "on": on, "ratio": on.median / off.median, "tokens a step": tokens_a_step}


def together(questions: Sequence[Any], how: dict[str, Any]) -> Ask:
    def ask(backend: LocalBackend) -> Sequence[Result]:
        with ThreadPoolExecutor(len(questions)) as threads:
            return list(threads.map(lambda question: backend.chat().ask(question, **how), questions))

    return ask


def stories(batch: int, num_tokens: int) -> Ask:
    questions = [f"Tell me a long story about the number {number}." for number in range(batch)]
    return together(questions, {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True})


def pictures(batch: int) -> Ask:
    from PIL import Image as PILImage

    samples = sorted(path for path in asset_path("samples").iterdir() if path.suffix in (".png", ".jpg"))
    questions = [[PILImage.open(samples[number % len(samples)]), "Describe the picture."] for number in range(batch)]
    return together(questions, {"temperature": 0.0, "max_tokens": 120})


def edits(batch: int) -> Ask:
    files = [
        "\n".join(f"value_{line} = compute_{line}(x[{line + shift}])" for line in range(_LINES))
        for shift in range(batch)
    ]
    return together(
        [f"Rename things in every tenth line:\n{file}" for file in files],
        {"temperature": 0.0, "max_tokens": 2000},
    )


@contextmanager
def known_drafts(known: dict[tuple[int, ...], tuple[int, ...]], chance: float, rng: random.Random) -> Iterator[None]:
    """Drafts of every reply's known tokens."""

    def drafted(reply: Reply, most: int) -> Draft | None:
        place = len(reply.output.token_ids)
        coming = known.get(tuple(reply.request.prompt.token_ids.tolist()), ())[place : place + most]
        token_ids = guessed(coming, chance, rng)
        return Draft(token_ids, Origin.LONG_MATCH, place) if token_ids else None

    with mock.patch.object(Reply, "_new_draft", drafted):
        yield


@contextmanager
def known_drafts_of_layer(
    known: dict[tuple[int, ...], tuple[int, ...]], chance: float, rng: random.Random
) -> Iterator[None]:
    """The layer drafts, and its tokens are replaced by known ones."""
    texts = [(*prompt, *said) for prompt, said in known.items()]
    draft = MTPDrafter.draft

    def replaced(self: MTPDrafter, wanted: Sequence[Wanted]) -> list[list[int]]:
        ends = [each.unseen.token_ids[-1] for each in wanted]
        places = [each.cache.length + 1 for each in wanted]
        found = draft(self, wanted)
        for drafts, place, end in zip(found, places, ends, strict=True):
            coming = next((text[place:] for text in texts if text[place - 1 : place] == (end,)), ())
            guesses = guessed(coming[: len(drafts)], chance, rng)
            drafts[: len(guesses)] = guesses
        return found

    no_other = mock.patch.object(Reply, "_new_draft", return_value=None)
    with no_other, mock.patch.object(MTPDrafter, "draft", replaced):
        yield


def guessed(coming: Sequence[int], chance: float, rng: random.Random) -> tuple[int, ...]:
    """Tokens that are right with a chance each; ends with the first wrong one."""
    token_ids: list[int] = []
    for token_id in coming:
        is_right = rng.random() < chance
        token_ids.append(token_id if is_right else token_id ^ 1)
        if not is_right:
            break
    return tuple(token_ids)


@contextmanager
def dictated(loaded: LoadedModel) -> Iterator[None]:
    """Every reply says its prompt's file with changed lines; its tokens are sampled all the same, and then replaced."""
    choose, scripts = Reply._choose, dict[str, list[int]]()

    def script_of(reply: Reply) -> list[int]:
        text = loaded.tokenizer.decode(reply.request.prompt.token_ids.tolist())
        lines = text.partition("line:\n")[2].partition("<|im_end|>")[0].split("\n")
        changed = [line.replace("value", "result") if number % 10 == 0 else line for number, line in enumerate(lines)]
        return [*loaded.tokenizer.encode_plain("\n".join(changed)), next(iter(loaded.eos_ids))]

    def dictate(reply: Reply, logits: Any, sampler: Any) -> int:
        choose(reply, logits, sampler)
        script = scripts.setdefault(reply.request.id, script_of(reply))
        return script[min(len(reply.output.token_ids), len(script) - 1)]

    with mock.patch.object(Reply, "_choose", dictate), mock.patch.object(Reply, "needs_host", True):
        yield


if __name__ == "__main__":
    main()
