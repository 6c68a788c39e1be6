"""A model without weights for captioning: what it says is decided by the test."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image as PILImage

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.captioning.captioner import Captioner
from qwen35mm.contract import Event, Finished, FinishReason, GenerationRequest, Result, SamplingParams, TokenLogprob
from qwen35mm_preprocess import MediaProcessor, PreparedMedia


@dataclass(frozen=True)
class Asked:
    """One reply that was asked for; `digest` is the medium's, as the model sees it; empty without one."""

    digest: str
    question: str
    system: str
    params: SamplingParams
    thinking: bool | None
    adapter: str | None


def say_what_was_seen(asked: Asked) -> str:
    return f"A picture {asked.digest[:8]}."


@dataclass
class FakeModel:
    """Answers after `delay_s`, when `waits` doesn't hold (any more), with what `answer` gives; an exception that it
    raises is the stream's. Where probabilities are asked for, "yes" has what `chance_of_yes` gives."""

    answer: Callable[[Asked], str] = say_what_was_seen
    chance_of_yes: Callable[[Asked], float] = lambda asked: 0.9
    delay_s: float = 0.0
    waits: Callable[[], object] = bool
    finish_reason: FinishReason = "stop"
    asked: list[Asked] = field(default_factory=list)
    num_at_once: int = 0
    most_at_once: int = 0
    num_left: int = 0

    def captioner(self, identity: str = "fake") -> Captioner:
        processor = MediaProcessor.from_pretrained(demo_model_path())
        params = SamplingParams(temperature=0.0)
        return Captioner(
            backend=cast("LocalBackend", self),
            name="Fake-1B",
            identity={"weights": identity},
            params=params,
            processor=processor,
        )

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Event]:
        assert request.retain in ("shared", "prompt")
        messages, params = request.messages, request.params
        assert params is not None
        digest = ""
        for part in messages[-1].media:
            assert isinstance(part.source, PreparedMedia)
            assert not digest, "one medium"
            digest = part.source.plan.digest or ""
        asked = Asked(
            digest,
            messages[-1].text,
            messages[0].text if len(messages) > 1 else "",
            params,
            request.enable_thinking,
            request.adapter,
        )
        self.asked.append(asked)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        finished = False
        try:
            await asyncio.sleep(self.delay_s)
            while self.waits():
                await asyncio.sleep(0.005)
            told, text = None, ""
            if params.logprobs is None:
                text = self.answer(asked)
            else:
                yes = self.chance_of_yes(asked)
                top = tuple(TokenLogprob(word, math.log(p), ()) for word, p in (("Yes", yes), ("No", 1 - yes)))
                told = (replace(top[0], top=top),)
            finished = True
            reply = Result(text, None, self.finish_reason, (1, 2), (1,) * 10, 10, 2, 0.01, 100.0, logprobs=told)
            yield Finished(reply)
        finally:
            self.num_at_once -= 1
            self.num_left += not finished


def picture(seed: int) -> PILImage.Image:
    """A picture that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return PILImage.fromarray(pixels).resize((48, 32), PILImage.Resampling.NEAREST)


def seen_digest(path: Path) -> str:
    """The digest of a picture as the model sees it."""
    digest = MediaProcessor.from_pretrained(demo_model_path()).prepare(path).plan.digest
    assert digest is not None
    return digest
