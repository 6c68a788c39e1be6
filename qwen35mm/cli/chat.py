"""`qwen35mm chat`: the chat page on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from qwen35mm.cli import options


def chat(
    model: options.Model = None,
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1.", min=0, max=65535)] = 7860,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    context_length: options.ContextLength = None,
    max_image_tokens: options.MaxImageTokens = None,
    max_video_tokens: options.MaxVideoTokens = None,
    max_frames: options.MaxFrames = None,
    fps: options.Fps = None,
) -> None:
    """Open the chat page; it runs until Ctrl-C."""
    from qwen35mm.ui import launch

    backend = options.load_backend(
        model,
        dtype=dtype,
        device=device,
        context_length=context_length,
        max_image_tokens=max_image_tokens,
        max_video_tokens=max_video_tokens,
        max_frames=max_frames,
        fps=fps,
    )
    try:
        launch(backend, port=port, open_browser=open_browser)
    finally:
        backend.close()
