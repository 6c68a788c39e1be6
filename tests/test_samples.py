"""The bundled model answers the bundled samples as samples.json says, turn by turn, through the whole local path."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qwen35mm.assets import asset_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import Finished, GenerationRequest, Image, Message, Text, Video
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess import detect_kind

SAMPLES: list[dict[str, Any]] = json.loads((asset_path("samples") / "samples.json").read_text("utf-8"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["file"])
async def test_the_sample_is_answered_right(demo: LoadedModel, sample: dict[str, Any]) -> None:
    path = asset_path("samples") / sample["file"]
    assert detect_kind(path) == sample["kind"]
    medium = Image(path) if sample["kind"] == "image" else Video(path)
    backend = LocalBackend(demo)
    messages: list[Message] = []
    try:
        for turn in sample["turns"]:
            media = () if messages else (medium,)
            messages.append(Message("user", (*media, Text(turn["question"]))))
            (text,) = [
                e.result.text async for e in backend.stream(GenerationRequest(messages)) if isinstance(e, Finished)
            ]
            assert text == turn["answer"]
            messages.append(Message("assistant", (Text(text),)))
    finally:
        backend.close()


def test_every_bundled_sample_is_listed() -> None:
    files = {path.name for path in asset_path("samples").iterdir()} - {"samples.json"}
    assert files == {sample["file"] for sample in SAMPLES}
