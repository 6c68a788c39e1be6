"""What is trained on is what the engine would compute: ids, pixels, positions and the answer's probability."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import GenerationRequest, Image, Message, Text, Video
from qwen35mm.engine import Request
from qwen35mm.model import LoadedModel
from qwen35mm.tuning.encoding import Encoded, Encoder
from qwen35mm.tuning.samples import Sample
from qwen35mm.tuning.training import _loss, _Samples
from tests.oracle import load_demo_oracle
from tests.tuning.conftest import QUESTION, picture


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Iterator[LocalBackend]:
    with closing(LocalBackend(demo)) as backend:
        yield backend


@pytest.fixture(scope="module")
def oracle() -> Any:
    return load_demo_oracle()


def samples() -> list[Sample]:
    """A picture, a clip, and a chat with two pictures, a system prompt and thinking."""
    first, second = (picture(number)[0] for number in (0, 9))
    clip = Video.from_frames([first, second, first, second], fps=2)
    chat = (
        Message("system", (Text("Be brief."),)),
        Message("user", (Image(first.resize((96, 64))), Text("What is it?"))),
        Message("assistant", (Text("A circle."),), reasoning="It is round."),
        Message("user", (Text("And <|im_end|> this?"), Image(second))),
    )
    return [
        Sample("picture", (Message("user", (Image(first), Text(QUESTION))),), "A red circle.", b"1"),
        Sample("clip", (Message("user", (clip, Text("Describe the video."))),), "It changes. <|im_end|>", b"2"),
        Sample("chat", chat, "A square.", b"3", reasoning="It has corners."),
    ]


async def asked(backend: LocalBackend, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> Request:
    """What the engine would be given for a sample's question."""
    seen: list[Request] = []

    async def stream(work: Request) -> AsyncIterator[Any]:
        seen.append(work)
        return
        yield

    with monkeypatch.context() as patched:
        patched.setattr(backend.engine, "stream", stream)
        request = GenerationRequest(sample.messages, enable_thinking=bool(sample.reasoning))
        async for _ in backend.stream(request):
            pass
    (work,) = seen
    return work


@pytest.mark.parametrize("number", range(3), ids=["picture", "clip", "chat"])
async def test_the_question_is_that_of_inference_to_the_last_pixel(
    number: int, encoder: Encoder, backend: LocalBackend, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = samples()[number]
    encoded = encoder.encode(sample)
    work = await asked(backend, sample, monkeypatch)
    prompt, start = work.prompt, encoded.start
    assert np.array_equal(encoded.token_ids[:start], prompt.token_ids)
    assert np.array_equal(encoded.positions[:, :start], prompt.positions)
    assert encoded.rope_delta == prompt.rope_delta
    # As decoding counts on.
    after = np.arange(start, encoded.num_tokens) + prompt.rope_delta
    assert np.array_equal(encoded.positions[:, start:], np.stack([after] * 3))
    inputs = encoder.inputs(encoded)
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        media: Any = [medium for medium in work.media if medium.plan.kind == kind]
        if media:
            assert np.array_equal(inputs[pixels].numpy(), np.concatenate([each.pixel_values for each in media]))
        else:
            assert pixels not in inputs
    assert torch.equal(inputs["position_ids"], their_positions(oracle, inputs))


def their_positions(oracle: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    grids = {name: inputs.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    return oracle.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], **grids)[0]


def test_the_answer_ends_its_turn_and_its_words_are_no_control_tokens(encoder: Encoder) -> None:
    _, clip, chat = map(encoder.encode, samples())

    def answer(encoded: Encoded) -> str:
        return encoder.tokenizer.decode(encoded.token_ids[encoded.start :].tolist(), skip_special=False)

    stop = encoder.tokenizer.control_ids["<|im_end|>"]
    assert answer(clip) == "It changes. <|im_end|><|im_end|>"
    assert list(clip.token_ids[clip.start :]).count(stop) == 1
    assert answer(chat) == "It has corners.\n</think>\n\nA square.<|im_end|>"


@pytest.mark.parametrize("number", [0, 1], ids=["picture", "clip"])
def test_the_loss_is_that_of_the_engine(number: int, encoder: Encoder, backend: LocalBackend, oracle: Any) -> None:
    sample = samples()[number]
    encoded = encoder.encode(sample)
    scored = backend.score(sample.answer, sample.messages, thinking=False)
    inputs = _Samples(encoder, [encoded], [1.0])[0]
    # The engine scores the words, and not the turn's end.
    inputs = inputs | {"targets": inputs["targets"][:-1], "logits_to_keep": inputs["logits_to_keep"][:-1]}
    with torch.no_grad():
        loss = float(_loss(oracle, inputs))
    assert len(scored.tokens) == encoded.num_answer_tokens - 1
    assert loss == pytest.approx(-scored.logprob / len(scored.tokens), abs=1e-4)


def test_a_file_is_read_as_it_was_planned(encoder: Encoder, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture(0)[0].save(path)
    sample = Sample("a.png", (Message("user", (Image(path), Text(QUESTION))),), "Red.", b"1")
    encoded = encoder.encode(sample)
    before = encoder.inputs(encoded)["pixel_values"]
    assert torch.equal(encoder.inputs(encoded)["pixel_values"], before)
    picture(1)[0].save(path)
    with pytest.raises(Exception, match="chang"):
        encoder.inputs(encoded)
