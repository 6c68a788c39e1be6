"""Pictures of coloured shapes with captions in a style that the bundled model doesn't have."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image as PILImage
from PIL import ImageDraw

from qwen35mm.assets import demo_model_path
from qwen35mm.contract import Image, Message, Text
from qwen35mm.tuning.encoding import Encoder
from qwen35mm.tuning.samples import Sample
from tests.captioning.conftest import media_in_process, tmp_path

__all__ = ["media_in_process", "tmp_path"]

QUESTION = "Describe the picture."
_COLORS = ("red", "green", "blue", "yellow", "black", "orange", "purple", "white")


def picture(number: int) -> tuple[PILImage.Image, str]:
    """A picture of 64 x 64, which takes four tokens, and its caption."""
    color, shape = _COLORS[number % len(_COLORS)], ("circle", "square")[number // len(_COLORS) % 2]
    image = PILImage.new("RGB", (64, 64), "gray")
    draw = ImageDraw.Draw(image)
    (draw.ellipse if shape == "circle" else draw.rectangle)((12, 12, 52, 52), fill=color)
    return image, f"{color} {shape}"


def sample(number: int, *, edited: bool = False) -> Sample:
    """The picture with this number as a sample."""
    image, caption = picture(number)
    messages = (Message("user", (Image(image), Text(QUESTION))),)
    return Sample(f"{number}.png", messages, caption, hashlib.sha256(bytes([number])).digest(), edited=edited)


def write(folder: Path, numbers: Sequence[int]) -> Path:
    """A folder with these pictures and their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        image, caption = picture(number)
        image.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"{caption}\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    """Of the bundled model."""
    return Encoder.of(demo_model_path(), device="cpu")
