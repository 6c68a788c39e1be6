"""Tokens a second with and without speculation, by turns in one run. Two or three minutes for each format of 0.8B.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.speculation --model /tmp/random-0.8B --weights bf16
    python -m benchmarks.speculation --model assets/demo

A random checkpoint says nothing that could be guessed, so it is told what is right:

- "guessed": a known reply. Each token of the layer's drafts is replaced by a known one, right with the given chance if
  those before it are. Without a layer the known tokens themselves are the drafts, which cost nothing.
- "nothing guessed": sampled text after prompts of 512 tokens together, where the engine's own drafts are wrong. Its
  time includes the prompts', whose tokens the layer sees, too.
- "edit": begins to say a file of 200 lines again with every tenth line changed.
- "JSON": a picture's caption in a schema.

The replies of the last two are dictated: each token is drawn all the same, and then replaced. Their drafts are the
engine's own, by repetition and grammar. The bundled model answers questions of each skill, with its own drafts.

`off` never has the layer. `--llama-server` measures llama.cpp's drafts of the same model at the same chances, which it
can simulate, too:

    python -m benchmarks.make_gguf llama_cpp_python-0.3.36 /tmp/random-0.8B /tmp/mtp-bf16.gguf --mtp
    python -m benchmarks.speculation --model /tmp/random-0.8B --llama-server llama-server --gguf /tmp/mtp-bf16.gguf
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import torch

from benchmarks.frame import Rows, Spread, numbers, parse, parser, report
from benchmarks.peers import random_ids
from benchmarks.serving import Server
from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import Finished, GenerationRequest, Message, Result, SamplingParams
from qwen35mm.engine import EngineSettings
from qwen35mm.engine.mtp_drafter import MTPDrafter, Wanted
from qwen35mm.engine.reply import Reply
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.speculation import Draft, Origin
from qwen35mm.evaluation import cases
from qwen35mm.model import LoadedModel, load
from qwen35mm.tokenizer import Tokenizer

OFF = "off"
Ask = Callable[[LocalBackend], Sequence[Result]]
Speed = Callable[[Sequence[Result], float, int], float]
_LINES, _LONG_TOKENS, _ANSWER_TOKENS = 200, 512, 256
_WORDS = ("left", "width", "total", "offset", "first", "value", "sum", "size", "index", "row", "count", "path")
_SCHEMA = {
    "type": "object",
    "properties": {
        "caption": {"type": "string"},
        "subjects": {"type": "array", "items": {"type": "string"}},
        "background": {"type": "string"},
        "quality": {"enum": ["low", "medium", "high"]},
        "has_text": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["caption", "subjects", "background", "quality", "has_text", "tags"],
    "additionalProperties": False,
}
_CAPTION = {
    "caption": "A red bicycle leans on a white wall beside a green door, in the light of a late afternoon.",
    "subjects": ["red bicycle", "white wall", "green door"],
    "background": "a narrow street with plants in front of the houses",
    "quality": "high",
    "has_text": False,
    "tags": ["bicycle", "wall", "door", "street", "afternoon", "plants"],
}
# llama.cpp's drafted tokens.
_THEIR_DRAFTS = (1, 3)


def main() -> None:
    options = parser(__doc__, repeats=2)
    options.add_argument("--weights", default="bf16", help="formats of the weights; bf16")
    options.add_argument("--chances", default="0.5,0.7,0.85,0.95", help="of a drafted token; 0.5,0.7,0.85,0.95")
    options.add_argument("--batches", default="1,2,4", help="replies at one time; 1,2,4")
    options.add_argument("--tokens", type=int, default=48, help="tokens of a known reply; 48")
    options.add_argument("--edit-tokens", type=int, default=240, help="tokens of an edit; 240")
    options.add_argument("--questions", type=int, default=4, help="of each skill, for the bundled model; 4")
    options.add_argument("--llama-server", type=Path, metavar="BIN", help="llama.cpp's server")
    options.add_argument("--gguf", type=Path, metavar="FILE", help="the checkpoint for it, with the layer")
    arguments = parse(options)
    if (arguments.llama_server is None) != (arguments.gguf is None):
        options.error("--llama-server and --gguf go together")
    arguments.chances = [float(chance) for chance in arguments.chances.split(",")]
    rows: Rows = []
    for weights in arguments.weights.split(","):
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device, weights=weights, mtp=True)
        for batch in numbers(arguments.batches):
            rows += [{"weights": weights, "replies": batch, **row} for row in measured(loaded, batch, arguments)]
        del loaded
    theirs = their_rows(arguments) if arguments.gguf is not None else []
    report("speculation", arguments, {"Tokens a second of all replies together": rows, "llama.cpp": theirs})


def measured(loaded: LoadedModel, batch: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each kind of text."""
    repeats, tokens = arguments.repeats, arguments.tokens
    if Path(arguments.model).resolve() == demo_model_path().resolve():
        with Sides(loaded, batch, {"auto": "auto", "mtp": "mtp"}) as sides:
            for skill in cases.NAMES:
                yield from sides.rows(skill, answers(skill, arguments.questions, batch), decoding, repeats)
        return
    has_layer = loaded.model.mtp is not None
    drafts = "mtp" if has_layer else "ngram"
    with Sides(loaded, batch, {f"{chance:.0%}": drafts for chance in arguments.chances}) as sides:
        ask = stories(batch, tokens)
        known = {result.prompt_token_ids: result.token_ids for result in ask(sides.backends[OFF])}
        chance_of = dict(zip(sides.modes, arguments.chances, strict=True))
        rng = random.Random(3)

        @contextmanager
        def guessing(side: str) -> Iterator[None]:
            with (known_drafts_of_layer if has_layer else known_drafts)(known, chance_of[side], rng):
                yield

        yield from sides.rows("guessed", ask, decoding, repeats, guessing)
    with Sides(loaded, batch, {"own": drafts}) as sides:
        yield from sides.rows("nothing guessed", nonsense(batch, tokens, loaded.tokenizer), all_of_it, repeats)
    if batch == 1:
        prompt, script = edit(arguments.edit_tokens, loaded.tokenizer)
        with Sides(loaded, batch, {"repetitions": "auto"}, reuse=True) as sides, dictated(script):
            ask = together([question(prompt, max_tokens=len(script))])
            yield from sides.rows("edit", ask, decoding, repeats)
        script = [*loaded.tokenizer.encode_plain(json.dumps(_CAPTION)), min(loaded.eos_ids)]
        with Sides(loaded, batch, {"grammar": "auto"}) as sides, dictated(script):
            ask = together([question("Describe the picture as JSON.", json_schema=json.dumps(_SCHEMA))])
            yield from sides.rows("JSON", ask, decoding, repeats)


class Sides:
    """Engines on one model: one without speculation, and one for each kind of drafts, which learns only from those.

    Args:
        modes: `EngineSettings.speculate` of each.
        reuse: whether they keep prompts.
    """

    def __init__(self, loaded: LoadedModel, batch: int, modes: Mapping[str, str], *, reuse: bool = False) -> None:
        self.modes, self._batch = modes, batch
        self.backends: dict[str, LocalBackend] = {}
        for side, mode in {OFF: OFF, **modes}.items():
            self.backends[side] = LocalBackend(
                loaded if mode == "mtp" else without_layer(loaded),
                settings=EngineSettings(context_length=4096, slots=batch, speculate=mode),
                cache=CacheSettings(reuse=reuse),
                commit_history=False,
            )

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        for backend in self.backends.values():
            backend.close()

    def rows(
        self,
        text: str,
        ask: Ask,
        speed: Speed,
        repeats: int,
        drafting: Callable[[str], Any] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Asks all by turns, after a warm-up of each; a row for each kind of drafts."""
        speeds: dict[str, list[float]] = {side: [] for side in self.backends}
        last: dict[str, Sequence[Result]] = {}
        for number in range(repeats + 1):
            for side, backend in self.backends.items():
                with ExitStack() as stack:
                    if drafting is not None and side != OFF:
                        stack.enter_context(drafting(side))
                    before_s = time.perf_counter()
                    last[side] = ask(backend)
                    spent_s = time.perf_counter() - before_s
                if number:
                    speeds[side].append(speed(last[side], spent_s, self._batch))
        for side in self.modes:
            for on, off in zip(last[side], last[OFF], strict=True):
                assert on.token_ids == off.token_ids, "speculation changed a reply"
            tokens = sum(result.num_generated_tokens - 1 for result in last[side])
            drafted = sum(result.num_drafted_tokens for result in last[side])
            right = sum(result.num_accepted_tokens for result in last[side])
            yield {
                "text": text,
                "drafts": side,
                "off": Spread.of(speeds[OFF]),
                "on": Spread.of(speeds[side]),
                "ratio": Spread.of(on / off for on, off in zip(speeds[side], speeds[OFF], strict=True)),
                "tokens a step": tokens / (tokens - right) if tokens else None,
                "right, %": 100 * right / drafted if drafted else None,
            }


def without_layer(loaded: LoadedModel) -> LoadedModel:
    """The same weights as if they had been loaded without the layer of multi-token prediction."""
    model = copy.copy(loaded.model)
    model._modules = {**loaded.model._modules, "mtp": None}
    model.config = replace(loaded.config, text=replace(loaded.config.text, runs_mtp=False))
    return replace(loaded, model=model, config=model.config)


def decoding(results: Sequence[Result], spent_s: float, batch: int) -> float:
    """Tokens a second after each reply's first one."""
    told = [(result.num_generated_tokens - 1, result.decode_tokens_per_s) for result in results]
    seconds = sum(count / speed for count, speed in told if speed)
    return batch * sum(count for count, speed in told if speed) / seconds if seconds else 0.0


def all_of_it(results: Sequence[Result], spent_s: float, batch: int) -> float:
    """Tokens a second, with the prompts."""
    return sum(result.num_generated_tokens for result in results) / spent_s


def together(requests: Sequence[GenerationRequest], batch: int | None = None) -> Ask:
    """Asks all, at most `batch` at a time."""

    async def ask_all(backend: LocalBackend) -> list[Result]:
        places = asyncio.Semaphore(batch or len(requests))

        async def ask(request: GenerationRequest) -> Result:
            async with places:
                async for event in backend.stream(request):
                    if isinstance(event, Finished):
                        return event.result
            raise AssertionError("a stream ends with Finished or an error")

        return await asyncio.gather(*map(ask, requests))

    return lambda backend: asyncio.run(ask_all(backend))


def question(text: str, **params: Any) -> GenerationRequest:
    message = Message.from_dict({"role": "user", "content": text})
    return GenerationRequest([message], SamplingParams(**{"temperature": 0.0, **params}), enable_thinking=False)


def stories(batch: int, num_tokens: int) -> Ask:
    texts = [f"Tell me a long story about the number {number}." for number in range(batch)]
    return together([question(text, max_tokens=num_tokens, ignore_eos=True) for text in texts])


def nonsense(batch: int, num_tokens: int, tokenizer: Tokenizer) -> Ask:
    """Sampled replies to long prompts of random words, which share a number of tokens."""
    how = {"temperature": 1.0, "max_tokens": num_tokens, "ignore_eos": True}
    rng, requests = random.Random(5), []
    for seed in range(batch):
        token_ids = tokenizer.encode_plain(" ".join(rng.choices(_WORDS, k=_LONG_TOKENS)))[: _LONG_TOKENS // batch]
        requests.append(question(tokenizer.decode(token_ids), seed=seed, **how))
    return together(requests)


def answers(skill: str, count: int, batch: int) -> Ask:
    """The bundled model's answers to questions of one skill."""
    params = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS)
    return together(
        [
            GenerationRequest(
                [Message.from_dict(message) for message in case.messages],
                params,
                enable_thinking=case.enable_thinking,
                tools=case.tools or (),
                retain="nothing",
            )
            for case in cases.make_cases(skill, count, "combos")
        ],
        batch,
    )


def edit(num_tokens: int, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """A file with a question about it, and the beginning of its edited version."""
    rng = random.Random(7)
    lines = [
        f"{rng.choice(_WORDS)}{rng.randrange(100)} = {rng.choice(_WORDS)}({rng.choice(_WORDS)}[{rng.randrange(100)}])"
        for _ in range(_LINES)
    ]
    changed = [line.replace(" = ", "_new = ") if number % 10 == 5 else line for number, line in enumerate(lines)]
    return (
        "\n".join(["Rename what every tenth line sets:", *lines]),
        tokenizer.encode_plain("\n".join(changed))[:num_tokens],
    )


@contextmanager
def known_drafts(known: Mapping[tuple[int, ...], tuple[int, ...]], chance: float, rng: random.Random) -> Iterator[None]:
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
    known: Mapping[tuple[int, ...], tuple[int, ...]], chance: float, rng: random.Random
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
def dictated(script: Sequence[int]) -> Iterator[None]:
    """Every reply says the script; its tokens are drawn all the same."""
    take_one, sample_one = Reply._take_one, Sampler.sample_one

    def say(reply: Reply, token_id: int | None, logits: Any, sampler: Sampler, context_length: int) -> Any:
        coming = script[len(reply.output.token_ids)]
        if token_id is None:

            def draw(self: Sampler, *arguments: Any) -> int:
                sample_one(self, *arguments)
                return coming

            # In here, so that a grammar goes on with the script.
            with mock.patch.object(Sampler, "sample_one", draw):
                reply._choose(logits, sampler)
        return take_one(reply, coming, logits, sampler, context_length)

    with mock.patch.object(Reply, "_take_one", say):
        yield


def their_rows(arguments: argparse.Namespace) -> Rows:
    """llama.cpp's own drafts by the layer, one reply at a time, of which it takes a given share for right."""
    rows: Rows = []
    command = [str(arguments.llama_server), "--model", str(arguments.gguf), "--port", "{port}", "--no-webui"]
    command += ["--threads", str(torch.get_num_threads()), "--parallel", "1", "--ctx-size", "4096"]
    plain = Server("llama.cpp", command, "default")
    try:
        for chance in arguments.chances:
            for most in _THEIR_DRAFTS:
                rates = ",".join(f"{chance**depth:.4f}" for depth in range(1, most + 1))
                drafts = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(most), "--spec-synth-rates", rates]
                server = Server("llama.cpp", [*command, *drafts], "default")
                speeds: dict[str, list[float]] = {"off": [], "on": []}
                try:
                    for number in range(arguments.repeats + 1):
                        for side, each in (("off", plain), ("on", server)):
                            speed = their_speed(each, arguments.tokens)
                            speeds[side] += [speed] if number else []
                finally:
                    server.close()
                off, on = (Spread.of(each) for each in speeds.values())
                ratio = Spread.of(on / off for on, off in zip(speeds["on"], speeds["off"], strict=True))
                rows.append({"drafts": f"{chance:.0%}", "most": most, "off": off, "on": on, "ratio": ratio})
    finally:
        plain.close()
    return rows


def their_speed(server: Server, num_tokens: int) -> float:
    """Tokens a second after a short prompt, by the server's own clock."""
    body = {"prompt": random_ids(32).tolist(), "n_predict": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.address}/completion", json=body | {"cache_prompt": False}, timeout=600)
    answer.raise_for_status()
    return float(answer.json()["timings"]["predicted_per_second"])


if __name__ == "__main__":
    main()
