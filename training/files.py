"""Scenes as real files: PNG, JPEG and GIF through Pillow, MP4 and WebM through PyAV."""

from __future__ import annotations

import io

import av
from PIL import Image

from training.drawing import render_clip, render_picture
from training.scenes import Clip, Picture

_CODECS = {
    "mp4": ("libx264", {"crf": "20", "preset": "fast"}),
    "webm": ("libvpx-vp9", {"crf": "24", "b": "0"}),
}


def picture_file(picture: Picture, kind: str = "PNG", quality: int = 88) -> bytes:
    """The picture as a PNG or JPEG file."""
    buffer = io.BytesIO()
    render_picture(picture, smooth=True).save(
        buffer, kind, **({"quality": quality} if kind == "JPEG" else {"optimize": True})
    )
    return buffer.getvalue()


def clip_file(clip: Clip, kind: str = "mp4", fps: int = 12) -> bytes:
    """The clip as an MP4 (H.264) or WebM (VP9) file; its sides must be even."""
    num_frames = max(2, round(clip.duration_s * fps))
    frames = render_clip(clip, [i / (num_frames - 1) for i in range(num_frames)], smooth=True)
    codec, options = _CODECS[kind]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        stream.thread_count = 1  # more threads give other bytes at every run
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return buffer.getvalue()


def gif_file(clip: Clip, fps: int = 10) -> bytes:
    """The clip as an animated GIF."""
    num_frames = max(2, round(clip.duration_s * fps))
    frames = [
        image.quantize(64, dither=Image.Dither.NONE)
        for image in render_clip(clip, [i / (num_frames - 1) for i in range(num_frames)], smooth=True)
    ]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=1000 // fps, loop=0)
    return buffer.getvalue()
