from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from PIL import Image as PILImage

from qwen35mm.contract import Message, Part, SamplingParams
from qwen35mm.engine import Request, grammar, grammar_check
from qwen35mm.model import LoadedModel
from qwen35mm.model.decoder_layer import DecoderLayer
from qwen35mm.prompt.segments import DEFAULT_MIN_SEGMENT
from tests.engine.exact import DENSE, Chat, chat_model, picture

MakeRequest = Callable[..., Request]


def noise(seed: int) -> PILImage.Image:
    """A picture that no other seed gives."""
    return picture(seed, (90, 120))


def failing_in(phase: str, error: Exception) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A decoder layer's `forward` that fails in "prefill" or in "decode"."""
    forward = DecoderLayer.forward

    def fail(self: DecoderLayer, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *_, batch = args
        if batch.is_prefill == (phase == "prefill"):
            raise error
        return forward(self, *args)

    return fail


@pytest.fixture(scope="module")
def checked_here() -> Iterator[None]:
    """Grammars are checked in this process, for tests that aren't about the child process and its limits."""

    def says(work: str, last: int) -> tuple[int, str] | None:
        for at, (kind, text) in enumerate(json.loads(work)["grammars"]):
            try:
                grammar_check.check(kind, text, follows=at == last)
            except grammar_check.RefusalError as error:
                return at, str(error)
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "_child_says", says)
        yield


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """A tiny random model that can chat."""
    return chat_model(DENSE)


@pytest.fixture(scope="session")
def chat(loaded: LoadedModel) -> Chat:
    return Chat(loaded)


@pytest.fixture
def make_request(loaded: LoadedModel) -> MakeRequest:
    """Builds a request of one message from content parts, as the backend does, without its threads."""
    chat = Chat(loaded, min_segment=DEFAULT_MIN_SEGMENT)
    default = SamplingParams(temperature=0.0, max_tokens=8)

    def make(*parts: Part, params: SamplingParams | None = None, **options: Any) -> Request:
        return chat.request([Message("user", parts)], params=params or default, **options)

    return make
