"""Checkpoints of the family's text model alone: they answer as the whole model does, and refuse media in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image as PILImage
from safetensors.torch import load_file, save_file

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import Finished, GenerationRequest, Image, Message, Result, SamplingParams
from qwen35mm.errors import Qwen35mmError

QUESTION = [Message("user", "How many circles are there in a picture of two circles?")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's text model, as Qwen3_5ForCausalLM saves one."""
    whole, folder = demo_model_path(), tmp_path_factory.mktemp("text") / "text-only"
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(whole / name, folder)
    config = json.loads((whole / "config.json").read_text())
    text = {**config["text_config"], "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    text |= {"tie_word_embeddings": config["tie_word_embeddings"]}
    (folder / "config.json").write_text(json.dumps(text))
    tensors = load_file(whole / "model.safetensors")
    tensors = {name.replace("language_model.", ""): x for name, x in tensors.items() if "visual" not in name}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(folder: Path) -> AsyncIterator[LocalBackend]:
    async with LocalBackend.load(folder) as model:
        yield model


async def answer(model: LocalBackend, messages: list[Message]) -> Result:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    events = [event async for event in model.stream(GenerationRequest(messages, params))]
    assert isinstance(events[-1], Finished)
    return events[-1].result


@pytest.mark.asyncio(loop_scope="module")
async def test_it_answers_as_the_whole_model(model: LocalBackend) -> None:
    async with LocalBackend.load(demo_model_path()) as whole:
        expected = await answer(whole, QUESTION)
    found = await answer(model, QUESTION)
    assert (found.token_ids, found.prompt_token_ids) == (expected.token_ids, expected.prompt_token_ids)
    assert model.loaded.model.visual is None


@pytest.mark.asyncio(loop_scope="module")
async def test_media_are_refused_in_words(model: LocalBackend) -> None:
    picture = PILImage.new("RGB", (64, 64))
    messages = [Message("user", [Image(picture), "What is this?"])]
    for ask in (lambda: model.count_tokens(messages), lambda: model.media.plan(picture)):
        with pytest.raises(Qwen35mmError, match=r"text-only reads text alone.*leave them out"):
            ask()
    with pytest.raises(Qwen35mmError, match="text-only reads text alone"):
        await answer(model, messages)
    assert (await answer(model, QUESTION)).text
