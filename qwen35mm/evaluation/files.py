"""Scenes as real files: PNG, JPEG and GIF through Pillow, MP4 and WebM through PyAV."""

from __future__ import annotations

import io

import av
from PIL import Image

from qwen35mm.evaluation.drawing import render_clip, render_picture
from qwen35mm.evaluation.scenes import Clip, Picture, Unknown

_CODECS = {
    "mp4": ("libx264", {"crf": "18", "preset": "fast"}),
    "webm": ("libvpx-vp9", {"crf": "24", "b": "0"}),
}


def picture_file(picture: Picture | Unknown, kind: str = "PNG", quality: int = 88) -> bytes:
    """The picture as a PNG or JPEG file."""
    buffer = io.BytesIO()
    image = render_picture(picture, smooth=True)
    image.save(buffer, kind, **({"quality": quality} if kind == "JPEG" else {"optimize": True}))
    return buffer.getvalue()


def clip_file(clip: Clip, kind: str = "mp4", fps: float = 12) -> bytes:
    """The clip as an MP4 (H.264) or WebM (VP9) file of `fps` whole frames a second; its sides must be even."""
    codec, options = _CODECS[kind]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=round(fps), options=options)
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        stream.thread_count = 1  # more threads give other bytes at every run
        for frame in _frames(clip, fps):
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return buffer.getvalue()


def gif_file(clip: Clip, fps: int = 10) -> bytes:
    """The clip as an animated GIF."""
    frames = [image.quantize(64, dither=Image.Dither.NONE) for image in _frames(clip, fps)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=1000 // fps, loop=0)
    return buffer.getvalue()


def _frames(clip: Clip, fps: float) -> list[Image.Image]:
    """Frame i shows the clip after i / fps seconds."""
    total = max(2, round(clip.duration_s * fps))
    return render_clip(clip, [min(1.0, i / fps / clip.duration_s) for i in range(total)], smooth=True)
