"""A chat of many turns with one picture: time to each turn's first token, with and without a cache.

    python -m benchmarks.make_random --size 0.8B --out /tmp/random-0.8B
    python -m benchmarks.multi_turn --model /tmp/random-0.8B --peer transformers

All words are scripted, including the replies: each turn generates one token, then the scripted reply becomes history.

- cold: a new engine for every turn.
- warm: one engine. After each turn the benchmark waits for the history commit, as if a person were reading.
- restart: a new process for every turn, with the previous one's disk cache.
- transformers: a fresh `generate` for every turn, without tokenizing and image processing. Its own cache needs a prompt
  that begins with all of the previous one; the last line counts those.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage

from benchmarks.frame import Rows, Sample, Worker, parse, parser, report
from benchmarks.peers import ONE_TOKEN, TRANSFORMERS, PictureInputs, Transformers, last_result, wait_idle
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.config import ModelConfig
from qwen35mm.contract import GenerationRequest, Image, Message, Text
from qwen35mm.model import load
from qwen35mm.prompt import DEFAULT_MIN_SEGMENT, ChatTemplate, Prompt, PromptBuilder
from qwen35mm.tokenizer import Tokenizer
from qwen35mm_preprocess import MediaBudget, MediaProcessor, read_processing

WARM_UP_TOKENS = 600
OPTIONS: dict[str, Any] = {"conversation": "benchmark", "enable_thinking": False}
# Words from the bundled model's vocabulary, one or two tokens each.
TEXT = (
    "the picture shows a red circle and blue square that moves to right while green triangle changes color video what "
    "is happening first then shape becomes yellow star one two three how many objects are there now please describe"
)
WORDS = TEXT.split()


@dataclass(frozen=True)
class Turn:
    question: str
    reply: str


class ScriptedChat:
    """Questions and replies of some turns, and a checkpoint's prompts for them. Needs no weights.

    The model's tokenizer determines the lengths. The same arguments give the same texts.

    Args:
        arguments: `model`, `device`, `turns`, `history_tokens` (approximate size of the last prompt) and `image_side`
            (of the square picture in the first turn, in pixels).
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        folder, budget = arguments.model, MediaBudget.for_device(torch.device(arguments.device).type)
        self._tokenizer = Tokenizer.from_pretrained(folder)
        self._parts = self._tokenizer, ChatTemplate.from_pretrained(folder), ModelConfig.from_pretrained(folder)
        self._image = picture(arguments.image_side)
        self.media = MediaProcessor(*read_processing(folder), budget=budget).prepare(self._image, kind="image")
        per_turn = max((arguments.history_tokens - self.media.plan.num_tokens) // arguments.turns, 12)
        words = random.Random(0)
        self.turns = [self._make_turn(words, per_turn) for _ in range(arguments.turns)]

    def messages(self, turn: int) -> list[Message]:
        """The messages up to the question of turn `turn` (from 1)."""
        messages: list[Message] = []
        for number, scripted in enumerate(self.turns[:turn], start=1):
            # A stored chat keeps the picture's plan.
            media = (Image(self._image, self.media.plan if turn > 1 else None),) if number == 1 else ()
            messages.append(Message("user", (*media, Text(scripted.question))))
            if number < turn:
                messages.append(Message("assistant", (Text(scripted.reply),)))
        return messages

    def history(self, turn: int) -> list[Message]:
        """The messages of turn `turn`, including its reply."""
        return [*self.messages(turn), Message("assistant", (Text(self.turns[turn - 1].reply),))]

    def builder(self, min_segment: int = DEFAULT_MIN_SEGMENT) -> PromptBuilder:
        return PromptBuilder(*self._parts, min_segment=min_segment)

    def prompt(self, turn: int, min_segment: int = DEFAULT_MIN_SEGMENT) -> Prompt:
        return self.builder(min_segment).prompt(self.messages(turn), [self.media.plan], enable_thinking=False)

    def num_extending(self) -> int:
        """The number of turns whose prompt begins with all of the previous prompt."""
        ids = [self.prompt(turn).token_ids.tolist() for turn in range(1, len(self.turns) + 1)]
        return sum(longer[: len(shorter)] == shorter for shorter, longer in pairwise(ids))

    def _make_turn(self, words: random.Random, num_tokens: int) -> Turn:
        # The template's control tokens take a few.
        num_question = int(num_tokens * words.uniform(0.1, 0.6))
        return Turn(self._text(words, num_question - 4), self._text(words, num_tokens - num_question - 4))

    def _text(self, words: random.Random, num_tokens: int) -> str:
        text = words.choice(WORDS)
        while len(self._tokenizer.encode_plain(text)) < num_tokens:
            text += " " + words.choice(WORDS)
        return text


def picture(side: int, seed: int = 0) -> PILImage.Image:
    """A square of noise."""
    return PILImage.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


class Ours:
    """Cold and warm backends on one loaded model.

    Args:
        directory: of a disk tier, filled when the process ends, for the next one.
    """

    def __init__(self, arguments: argparse.Namespace, directory: str | None = None) -> None:
        self.chat = ScriptedChat(arguments)
        self.loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
        self._image_side: int = arguments.image_side
        self._options: dict[str, Any] = {"commit_history": False, "min_segment": arguments.min_segment}
        self._options["cache"] = CacheSettings(directory=None if directory is None else Path(directory))
        self._warm: LocalBackend | None = None

    def cold(self, turn: int) -> Sample:
        with closing(self._backend()) as backend:
            return self._answer(backend, turn)

    def warm(self, turn: int) -> Sample:
        """One backend for all turns. After each turn the scripted reply becomes history."""
        self._warm = self._warm or self._backend()
        sample, started_s = self._answer(self._warm, turn), time.perf_counter()
        self._warm.commit_history(GenerationRequest(self.chat.history(turn), **OPTIONS))
        wait_idle(self._warm)
        return {**sample, "commit_s": time.perf_counter() - started_s}

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()

    def _backend(self) -> LocalBackend:
        """A backend after a different request of the same sizes, so that its memory is allocated."""
        backend = LocalBackend(self.loaded, **self._options)
        words = " ".join(map(str, np.random.default_rng(1).integers(0, 10, WARM_UP_TOKENS)))
        message = Message("user", (Image(picture(self._image_side, seed=1)), Text(words)))
        request = GenerationRequest([message], ONE_TOKEN, enable_thinking=False, retain="nothing")
        last_result(backend, backend.stream(request))
        return backend

    def _answer(self, backend: LocalBackend, turn: int) -> Sample:
        """Streams one token of a turn's reply."""
        request = GenerationRequest(self.chat.messages(turn), ONE_TOKEN, **OPTIONS)
        result, _ = last_result(backend, backend.stream(request))
        cached, prefilled = result.cache.num_cached_tokens, result.cache.num_prefilled_tokens
        counts = {"num_prompt_tokens": result.num_prompt_tokens, "cached": cached, "prefilled": prefilled}
        return {"ttft_s": result.ttft_s, "token_id": result.token_ids[0], **counts}


class Peer(Transformers):
    """transformers, with prompts and pixels prepared."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.chat = ScriptedChat(arguments)
        self.cold(1)

    def cold(self, turn: int) -> Sample:
        prompt, media = self.chat.prompt(turn), self.chat.media
        started_s = time.perf_counter()
        grid_thw = torch.tensor([list(media.plan.grid_thw)])
        inputs = PictureInputs(torch.tensor(prompt.token_ids), torch.from_numpy(media.pixel_values), grid_thw)
        (token_id,), _ = self.generate(inputs, max_tokens=1)
        return {"ttft_s": time.perf_counter() - started_s, "num_prompt_tokens": len(inputs.ids), "token_id": token_id}


def measure(arguments: argparse.Namespace, ours: Worker, peer: Worker | None) -> Rows:
    """Runs the chat once, with all engines turn by turn; returns a row for each turn."""
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1, arguments.turns + 1):
            samples = {"cold": ours.ask("cold", turn), "warm": ours.ask("warm", turn)}
            if not arguments.no_restart:
                with Worker(Ours, arguments, folder) as restarted:
                    samples["restart"] = restarted.ask("warm", turn)
            if peer is not None:
                samples[TRANSFORMERS] = peer.ask("cold", turn)
            print(f"turn {turn}: {samples}", file=sys.stderr, flush=True)
            row: Sample = {"turn": turn, "prompt tokens": samples["cold"]["num_prompt_tokens"]}
            for name, sample in samples.items():
                row[f"{name}, s"] = sample["ttft_s"]
                if "commit_s" in sample:
                    row |= {f"{name}: cached": sample["cached"], f"{name}: prefilled": sample["prefilled"]}
            same = {sample["token_id"] for sample in samples.values()}
            rows.append({**row, "commit, s": samples["warm"]["commit_s"], "tokens agree": len(same) == 1})
    return rows


def main() -> None:
    options = parser(__doc__, repeats=None)
    options.add_argument("--peer", choices=[TRANSFORMERS], help="measure this engine as well")
    options.add_argument("--turns", type=int, default=20)
    options.add_argument("--history-tokens", type=int, default=4000, help="of the last prompt, about")
    options.add_argument("--image-side", type=int, default=448, help="side in pixels of the picture in turn 1")
    options.add_argument("--min-segment", type=int, default=DEFAULT_MIN_SEGMENT, help="least tokens of a segment")
    options.add_argument("--no-restart", action="store_true", help="leave out the new process for every turn")
    arguments = parse(options)
    if arguments.turns < 2:
        options.error("--turns must be at least 2")
    with ExitStack() as stack:
        ours = stack.enter_context(Worker(Ours, arguments))
        peer = stack.enter_context(Worker(Peer, arguments)) if arguments.peer else None
        turns = measure(arguments, ours, peer)
    extending = ScriptedChat(arguments).num_extending()
    note = f"{extending} of {arguments.turns - 1} prompts begin with all of the prompt before."
    report("multi_turn", arguments, {"Time to the first token": turns}, extending=note)


if __name__ == "__main__":
    main()
