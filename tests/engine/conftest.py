from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from qwen35mm.engine import Request
from qwen35mm.model import Batch, LoadedModel, Qwen35Model
from qwen35mm.prompt import EncodedMedium, Image, Message, Part, Text, Video, build_prompt
from qwen35mm.sampling import SamplingParams
from qwen35mm_preprocess import MediaProcessor, PreparedMedia

MakeRequest = Callable[..., Request]


def noise(seed: int, size: tuple[int, int] = (90, 120)) -> PILImage.Image:
    """A picture that no other seed gives."""
    return PILImage.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def failing_in(phase: str, error: Exception) -> Callable[[Qwen35Model, Batch], torch.Tensor]:
    """A model's forward that fails in "prefill" or in "decode"."""
    forward = Qwen35Model.forward

    def fail(self: Qwen35Model, batch: Batch) -> torch.Tensor:
        if isinstance(batch.lengths, int) == (phase == "prefill"):
            raise error
        return forward(self, batch)

    return fail


@pytest.fixture
def make_request(demo: LoadedModel) -> MakeRequest:
    """Builds a request from content parts, as the backend does, without its threads."""
    processor = MediaProcessor(demo.image_processing, demo.video_processing)

    def make(
        *parts: Part, params: SamplingParams | None = None, enable_thinking: bool = False, **options: Any
    ) -> Request:
        media: Sequence[PreparedMedia] = [
            processor.prepare(part.source, kind="image" if isinstance(part, Image) else "video")
            for part in parts
            if isinstance(part, (Image, Video)) and not isinstance(part.source, PreparedMedia | EncodedMedium)
        ]
        prompt = build_prompt(
            [Message("user", parts or (Text("hello"),))],
            [medium.plan for medium in media],
            tokenizer=demo.tokenizer,
            template=demo.template,
            config=demo.config,
            enable_thinking=enable_thinking,
        )
        params = params or SamplingParams(temperature=0.0, max_tokens=8)
        return Request(prompt, tuple(media), params=params, **options)

    return make
