"""Options that several commands take, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwen35mm.assets import demo_model_path

if TYPE_CHECKING:
    from qwen35mm.backends import LocalBackend

DEMO_NOTE = (
    "This is the bundled demo model: it knows coloured shapes and nothing else. For a real one: --model Qwen/Qwen3.5-2B"
)

Model = Annotated[
    str | None,
    typer.Option(
        help="A checkpoint's folder or Hugging Face id; the bundled demo without it.", envvar="QWEN35MM_MODEL"
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
ContextLength = Annotated[
    int | None, typer.Option(help="Most tokens of a conversation; the model's limit, up to 32,768, without it.", min=1)
]
MaxImageTokens = Annotated[int | None, typer.Option(help="Most tokens of one image.", min=1)]
MaxVideoTokens = Annotated[int | None, typer.Option(help="Most tokens of one video.", min=1)]
MaxFrames = Annotated[int | None, typer.Option(help="Most frames of one video.", min=1)]
Fps = Annotated[float | None, typer.Option(help="Frames a second taken from a video.", min=0.001)]


def load_backend(
    model: str | None,
    *,
    dtype: str,
    device: str,
    context_length: int | None,
    max_image_tokens: int | None,
    max_video_tokens: int | None,
    max_frames: int | None,
    fps: float | None,
) -> LocalBackend:
    """Loads what the options name.

    Raises:
        Qwen35mmError: the model or a setting can't be used.
    """
    from dataclasses import replace

    from qwen35mm.backends import LocalBackend, default_budget
    from qwen35mm.engine import EngineSettings
    from qwen35mm.model import load

    loaded = load(model or demo_model_path(), dtype=dtype, device=device)
    asked = {
        "max_image_tokens": max_image_tokens,
        "max_video_tokens": max_video_tokens,
        "max_frames": max_frames,
        "fps": fps,
    }
    budget = replace(
        default_budget(loaded.model.device), **{name: value for name, value in asked.items() if value is not None}
    )
    return LocalBackend(loaded, budget=budget, settings=EngineSettings(context_length=context_length))


def file_path(value: Path) -> Path:
    """Checks that a media file exists before a model is loaded for it."""
    if not value.is_file():
        raise typer.BadParameter(f"there is no file '{value}'.")
    return value
