"""What first_token.py measures, each in a process of its own: our backend, and transformers."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.asking import ONE_TOKEN, last_result
from benchmarks.peers import PictureReader, TransformersPeer, transformers_operations
from benchmarks.worker import Served
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.engine import Engine, EngineSettings, Event, Finished, MediaPlanned, Progress, Request, Result
from qwen35mm.engine.reply import Reply
from qwen35mm.model import load
from qwen35mm.model.load import DTYPES
from qwen35mm.prompt import Image, Message, Prompt, PromptBuilder, Text
from qwen35mm_kernels import select_backend
from qwen35mm_preprocess import MediaBudget, MediaPlan, PreparedMedia

STAGES: tuple[str, ...] = ("read", "prompt", "vision", "prefill", "first token")
_STAGE_OF = {"encode": "vision", "prefill": "prefill"}


# Tokens that the engine which runs stage by stage has room for, beside the one that serves.
STAGED_CONTEXT = 8192
_OPTIONS: dict[str, Any] = {"enable_thinking": False}


class OurWorker(Served):
    """The backend as the page uses it, on a picture that is never resized; told how long it took to start."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        started_s = time.perf_counter()
        loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
        pixels = arguments.side**2
        processing = replace(loaded.image_processing, min_pixels=pixels, max_pixels=pixels)
        self._loaded = replace(loaded, image_processing=processing)
        self._device = loaded.model.device
        self._backend = LocalBackend(self._loaded, budget=MediaBudget(), commit_history=False)
        super().__init__({"load_s": time.perf_counter() - started_s, "kernels": select_backend(self._device).__name__})
        self._staged: StagedEngine | None = None

    def answer(self, do: str, path: str, questions: list[str]) -> dict[str, Any]:
        """One of the methods below."""
        actions = {"full": self.full, "model": self.model, "stages": self.stages}
        return actions[do](Path(path), *questions)

    def full(self, path: Path, question: str, other: str) -> dict[str, Any]:
        """From the file and a question; then another question, when the picture's plan is known, as in a chat."""
        cold, plan = self._timed(lambda: self._backend.stream([_ask(Image(path), question)], ONE_TOKEN, **_OPTIONS))
        message = _ask(Image(path, plan), other)
        warm, _ = self._timed(lambda: self._backend.stream([message], ONE_TOKEN, **_OPTIONS))
        return {"cold": cold, "warm": warm}

    def model(self, path: Path, question: str, other: str) -> dict[str, Any]:
        """The same with prompt and pixels ready."""
        media = self._backend.media.prepare(path, kind="image")
        samples = {}
        for name, text in (("cold", question), ("warm", other)):
            request = Request(self._prompt(media, text), (media,), params=ONE_TOKEN)
            samples[name], _ = self._timed(lambda request=request: self._backend.engine.stream(request))
        return samples

    def stages(self, path: Path, question: str, _other: str) -> dict[str, Any]:
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

    def _timed(self, stream: Callable[[], AsyncIterator[Event]]) -> tuple[dict[str, Any], MediaPlan | None]:
        """The time until the caller has the token, and the picture's plan."""

        async def run() -> tuple[float, Result, MediaPlan | None]:
            plans: list[MediaPlan] = []

            async def noting(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
                async for event in events:
                    if isinstance(event, MediaPlanned):
                        plans.extend(event.plans)
                    yield event

            synchronize(self._device)
            started_s = time.perf_counter()
            result = await last_result(noting(stream()))
            return time.perf_counter() - started_s, result, plans[0] if plans else None

        ttft_s, result, plan = asyncio.run(run())
        if not self._backend.wait_idle(600):
            raise SystemExit("the engine doesn't come to rest")
        cache = result.cache
        sample = {
            "ttft_s": ttft_s,
            "num_prompt_tokens": result.num_prompt_tokens,
            "num_prefilled_tokens": cache.num_prefilled_tokens,
            "num_encoded_units": cache.num_encoded_units,
            "token_id": result.token_ids[0],
        }
        return sample, plan


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


class TransformersWorker(Served):
    """transformers' processor and `generate`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        started_s = time.perf_counter()
        self._reader = PictureReader(arguments.model, (arguments.side**2, arguments.side**2))
        self._peer = TransformersPeer(arguments.model, DTYPES[arguments.dtype], arguments.device)
        self._device = torch.device(arguments.device)
        super().__init__({"load_s": time.perf_counter() - started_s, "operations": transformers_operations()})
        self._never = torch.tensor(sorted(self._ids_never_sampled()))

    def _ids_never_sampled(self) -> set[int]:
        """What ours doesn't choose from: a random checkpoint has far more ids than its tokenizer has tokens."""
        config, tokenizer = self._peer.model.config, self._reader.tokenizer
        vision = {id_ for text, id_ in tokenizer.get_added_vocab().items() if text.startswith("<|vision_")}
        vision |= {config.image_token_id, config.video_token_id}
        return vision | set(range(len(tokenizer), config.text_config.vocab_size))

    def answer(self, do: str, path: str = "", questions: Sequence[str] = ()) -> dict[str, Any]:
        """Like `OurWorker.answer`; it keeps nothing, so that a second question would cost as much."""
        synchronize(self._device)
        started_s = time.perf_counter()
        inputs = self._reader.read(Path(path), questions[0])
        if do == "model":
            started_s = time.perf_counter()
        _, logits = self._peer.first_token(inputs)
        ttft_s = time.perf_counter() - started_s
        token_id = int(logits.index_fill(0, self._never.to(logits.device), -torch.inf).argmax())
        return {"cold": {"ttft_s": ttft_s, "num_prompt_tokens": len(inputs.ids), "token_id": token_id}}


def synchronize(device: torch.device) -> None:
    """Waits for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_worker(role: str, arguments: argparse.Namespace) -> Served:
    """The worker of a role."""
    return OurWorker(arguments) if role == "qwen35mm" else TransformersWorker(arguments)


def _ask(image: Image, question: str) -> Message:
    return Message("user", (image, Text(question)))
