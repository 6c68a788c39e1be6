"""The engines that multi_turn.py measures, each in a process of its own: ours, ours after a restart, transformers."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.asking import ONE_TOKEN, last_result
from benchmarks.peers import TransformersPeer, extends
from benchmarks.scripted_chat import ScriptedChat
from benchmarks.worker import Served
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.model_backend import default_budget
from qwen35mm.cache import CacheSettings
from qwen35mm.config import ModelConfig
from qwen35mm.engine import Engine, EngineSettings, Finished, Request
from qwen35mm.model import load
from qwen35mm.model.load import DTYPES
from qwen35mm.prompt import DEFAULT_MIN_SEGMENT, ChatTemplate, Image, Message, Prompt, PromptBuilder, Text
from qwen35mm.tokenizer import Tokenizer
from qwen35mm_preprocess import MediaProcessor, PreparedMedia, read_processing

WARM_UP_TOKENS = 600
CONVERSATION = "benchmark"


class Script:
    """The chat, and the prompts that a checkpoint's tokenizer and template make of it; no weights."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        folder = arguments.model
        self.config = ModelConfig.from_pretrained(folder)
        self.tokenizer = Tokenizer.from_pretrained(folder)
        self.template = ChatTemplate.from_pretrained(folder)
        image_processing, video_processing = read_processing(folder)
        budget = default_budget(torch.device(arguments.device))
        self._media = MediaProcessor(image_processing, video_processing, budget=budget)
        self.picture = self._media.prepare(ScriptedChat.picture(arguments.image_side), kind="image")
        self.chat = ScriptedChat(
            self.tokenizer,
            num_turns=arguments.turns,
            history_tokens=arguments.history_tokens,
            plan=self.picture.plan,
            image_side=arguments.image_side,
            thinking=arguments.thinking,
        )

    def prompts(self, min_segment: int = DEFAULT_MIN_SEGMENT) -> PromptBuilder:
        return PromptBuilder(self.tokenizer, self.template, self.config, min_segment=min_segment)

    def prompt(self, turn: int, min_segment: int = DEFAULT_MIN_SEGMENT) -> Prompt:
        """The prompt of a turn."""
        prompts = self.prompts(min_segment)
        return prompts.prompt(self.chat.prompt(turn), [self.picture.plan], enable_thinking=self.chat.thinking)

    def num_extending(self) -> int:
        """For how many turns the prompt begins with all of the one before it."""
        prompts = [self.prompt(turn) for turn in range(1, len(self.chat.turns) + 1)]
        return sum(extends(shorter, longer) for shorter, longer in pairwise(prompts))


class OurWorker(Served):
    """Cold and warm engines on one loaded model, and the prefill of the last prompt."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.script = Script(arguments)
        self.loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
        self._image_side: int = arguments.image_side
        self._warm: dict[int, LocalBackend] = {}

    def answer(self, do: str, **request: Any) -> dict[str, Any]:
        """One of the methods below."""
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "cold": self.cold_turn,
            "warm": self.warm_turn,
            "prefill": self.prefill,
            "facts": self.facts,
        }
        return actions[do](**request)

    def cold_turn(self, turn: int, min_segment: int) -> dict[str, Any]:
        backend = LocalBackend(self.loaded, commit_history=False, min_segment=min_segment)
        warm_up(backend, self._image_side)
        with closing(backend):
            return answer_turn(backend, self.script.chat, turn)

    def warm_turn(self, turn: int, min_segment: int) -> dict[str, Any]:
        if min_segment not in self._warm:
            self._warm[min_segment] = LocalBackend(self.loaded, commit_history=False, min_segment=min_segment)
            warm_up(self._warm[min_segment], self._image_side)
        backend = self._warm[min_segment]
        sample = answer_turn(backend, self.script.chat, turn)
        return {**sample, "commit_s": commit_turn(backend, self.script.chat, turn)}

    def prefill(self, min_segment: int | None) -> dict[str, Any]:
        """The last prompt from nothing: without cuts in one piece (None) or in the usual pieces (0), or with cuts."""
        prompt = self.script.prompt(len(self.script.chat.turns), min_segment or DEFAULT_MIN_SEGMENT)
        num_tokens = len(prompt.token_ids)
        if not min_segment:
            prompt = replace(prompt, segments=(), tail_start=0)
        piece_tokens = num_tokens if min_segment is None else None
        settings = EngineSettings(context_length=num_tokens + 1, piece_tokens=piece_tokens, slots=1)
        engine = Engine(self.loaded, settings, CacheSettings(reuse=False))
        engine.add(Request(prompt, (self.script.picture,), "nothing", params=ONE_TOKEN))
        result = None
        while result is None:
            for output in engine.step():
                if isinstance(output.event, Exception):
                    raise SystemExit(f"the request failed: {output.event}")
                if isinstance(output.event, Finished):
                    result = output.event.result
        piece = engine.settings.piece_tokens_on(self.loaded.model.device)
        bounds = [(s.start, s.stop) for s in prompt.segments] + [(prompt.tail_start, num_tokens)]
        return {
            "prefill_s": result.cache.prefill_s,
            "token_id": result.token_ids[0],
            "num_tokens": num_tokens,
            "num_segments": len(prompt.segments),
            "num_pieces": sum(-(-(stop - start) // piece) for start, stop in bounds),
        }

    def facts(self) -> dict[str, Any]:
        """What is known of the chat without running it."""
        return {
            "num_extending": self.script.num_extending(),
            "state_bytes": self.loaded.config.state_bytes(self.loaded.model.dtype),
            "image_tokens": self.script.picture.plan.num_tokens,
        }

    def close(self) -> None:
        for backend in self._warm.values():
            backend.close()


class RestartWorker(Served):
    """Our engine with the disk tier; it answers one turn, and its end writes what the next process finds."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.script = Script(arguments)
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
        cache = CacheSettings(directory=arguments.directory)
        self.backend = LocalBackend(loaded, cache=cache, commit_history=False, min_segment=arguments.shown)
        warm_up(self.backend, arguments.image_side)

    def answer(self, turn: int) -> dict[str, Any]:
        sample = answer_turn(self.backend, self.script.chat, turn)
        return {**sample, "commit_s": commit_turn(self.backend, self.script.chat, turn)}

    def close(self) -> None:
        self.backend.close()


class TransformersWorker(Served):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.script = Script(arguments)
        self.peer = TransformersPeer(arguments.model, DTYPES[arguments.dtype], arguments.device)
        self.answer(1)

    def answer(self, turn: int) -> dict[str, Any]:
        media: PreparedMedia = self.script.picture
        return self.peer.turn(self.script.prompt(turn), media)


def answer_turn(backend: LocalBackend, chat: ScriptedChat, turn: int) -> dict[str, Any]:
    """Streams one token of a turn's reply; seconds and the cache's report."""
    events = backend.stream(chat.prompt(turn), ONE_TOKEN, conversation=CONVERSATION, enable_thinking=chat.thinking)
    result = asyncio.run(last_result(events))
    if not backend.wait_idle(600):
        raise SystemExit("the engine doesn't come to rest")
    cache = result.cache
    return {
        "ttft_s": result.ttft_s,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_cached_tokens": cache.num_cached_tokens,
        "num_prefilled_tokens": cache.num_prefilled_tokens,
        "num_encoded_units": cache.num_encoded_units,
        "cached_from": dict(cache.cached_from),
        "miss": cache.miss,
        "token_id": result.token_ids[0],
    }


def commit_turn(backend: LocalBackend, chat: ScriptedChat, turn: int) -> float:
    """Makes the scripted reply history, and waits for it; seconds."""
    started_s = time.perf_counter()
    backend.commit_history(chat.history(turn), conversation=CONVERSATION, enable_thinking=chat.thinking)
    if not backend.wait_idle(600):
        raise SystemExit("the history commit doesn't end")
    return time.perf_counter() - started_s


def warm_up(backend: LocalBackend, image_side: int) -> None:
    """A request of the chat's sizes with nothing else in common, so that libraries and memory are ready."""
    words = np.random.default_rng(1).integers(0, 10, WARM_UP_TOKENS)
    picture = Image(ScriptedChat.picture(image_side, seed=1))
    message = Message("user", (picture, Text(" ".join(str(word) for word in words))))
    asyncio.run(last_result(backend.stream([message], ONE_TOKEN, enable_thinking=False, retain="nothing")))


def make_worker(role: str, arguments: argparse.Namespace) -> Served:
    """The worker of a role."""
    if role == "qwen35mm":
        return OurWorker(arguments)
    if role == "restart":
        return RestartWorker(arguments)
    assert role == "transformers", role
    return TransformersWorker(arguments)
