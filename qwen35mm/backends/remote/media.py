"""Messages as a server reads them: texts, pictures as data: URIs, videos as pictures with their times or whole.

A medium is planned as for a model in this process, under the same budget; the plan says how large its pictures become
and which frames of a video are sent. Its tokens are Qwen3.5's; a server with another model counts in its own way.
"""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any, Literal

from PIL import Image as PILImage

from qwen35mm.errors import RequestError
from qwen35mm.prompt import EncodedMedium, Image, Message, Text, Video
from qwen35mm_preprocess import (
    ImageProcessing,
    MediaBudget,
    MediaDecodeError,
    MediaLimits,
    MediaPlan,
    MediaProcessor,
    MediaSource,
    MediaSourceError,
    PreparedMedia,
    VideoClip,
    VideoProcessing,
    describe,
    timestamp_text,
)
from qwen35mm_preprocess.image import load_image, probe_image
from qwen35mm_preprocess.media import open_stream, read_format
from qwen35mm_preprocess.types import Size
from qwen35mm_preprocess.video import decode_frames, lost_note
from qwen35mm_preprocess.video_probe import probe_video

VideoMode = Literal["frames", "video_url"]

# What vLLM and the server of transformers take of a video by themselves.
DEFAULT_MAX_FRAMES = 32
_JPEG_QUALITY = 95
_HALVES = (0.5, 0.5, 0.5)


def default_media(budget: MediaBudget | None, limits: MediaLimits | None, video: VideoMode) -> MediaProcessor:
    """Qwen3.5's processing with a budget; each frame of a video that is sent as pictures counts by itself."""
    temporal_patch_size = 1 if video == "frames" else 2
    return MediaProcessor(
        ImageProcessing(16, 2, 2, _HALVES, _HALVES),
        VideoProcessing(16, temporal_patch_size, 2, _HALVES, _HALVES),
        budget=budget or replace(MediaBudget.for_gpu(), max_frames=DEFAULT_MAX_FRAMES),
        limits=limits or MediaLimits(),
    )


def encode_medium(part: Image | Video, media: MediaProcessor, video: VideoMode) -> EncodedMedium:
    """Reads, checks and encodes one medium, unless it is encoded. A plan by which it was read isn't looked at.

    Raises:
        MediaError: it can't be read, is damaged, or is over a limit.
    """
    source = part.source
    if isinstance(source, EncodedMedium):
        return source
    if isinstance(source, PreparedMedia):
        raise MediaSourceError("A medium that was prepared for a model in this process can't be sent. Pass its file.")
    if isinstance(part, Image):
        plan = media.plan(source, "image")
        return EncodedMedium((_picture_part(_picture_uri(source, plan, media)),), plan)
    if video == "video_url":
        if part.clip is not None:
            raise MediaSourceError("A part of a video can't be sent as a whole file. Send the video as its frames.")
        plan = media.plan(source, "video")
        return EncodedMedium((_video_part(source, media.limits),), plan)
    return _encode_frames(source, media, part.clip)


def encode_message(message: Message, media: list[EncodedMedium]) -> dict[str, Any]:
    """A message in OpenAI's form; takes the encoded forms of its media off the front of `media`.

    Raises:
        RequestError: it is about a tool.
    """
    if message.tool_calls or message.role == "tool":
        raise RequestError("Tool calls can't be sent to a server. Leave them out of the conversation.")
    values: dict[str, Any] = {"role": message.role}
    if message.reasoning is not None:
        values["reasoning_content"] = message.reasoning
    if not message.media:
        return values | {"content": message.text}
    parts: list[dict[str, Any]] = []
    for part in message.content:
        parts += [_text_part(part.text)] if isinstance(part, Text) else media.pop(0).parts
    return values | {"content": parts}


def _picture_uri(source: MediaSource, plan: MediaPlan, media: MediaProcessor) -> str:
    """The file's own bytes where every server makes the same picture of them, else the picture encoded anew."""
    # Decoded in any case: a damaged file is a failure here, with words, and not a server's.
    picture = load_image(source, media.limits)
    info = probe_image(source, media.limits)
    is_small = picture.width * picture.height <= _max_pixels(media)
    # No WebP, which llama-server doesn't read.
    if is_small and info.is_plain and info.format in ("JPEG", "PNG") and not isinstance(source, PILImage.Image):
        with open_stream(source, "image", media.limits) as stream:
            return _data_uri(f"image/{info.format.lower()}", stream.read())
    if not is_small:
        picture = _resized(picture, plan.size)
    return _encoded(picture, "JPEG" if info.format in ("JPEG", "MPO") else "PNG")


def _encode_frames(source: MediaSource, media: MediaProcessor, clip: VideoClip | None) -> EncodedMedium:
    plan = media.plan(source, "video", clip)
    assert plan.frame_indices is not None
    assert plan.frame_times_s is not None
    times = dict(zip(plan.frame_indices, plan.frame_times_s, strict=True))
    info = probe_video(source, media.limits)
    parts: list[dict[str, Any]] = []
    used: list[int] = []
    for index, frame in decode_frames(source, info, plan.frame_indices, media.limits):
        if frame.width * frame.height > plan.size[0] * plan.size[1]:
            frame = _resized(frame, plan.size)
        parts += [_text_part(timestamp_text(times[index])), _picture_part(_encoded(frame, "JPEG"))]
        used.append(index)
    if not used:
        raise MediaDecodeError(
            f"{describe(source)} could not be decoded: none of its frames is readable. Copy or upload it again."
        )
    warnings = list(info.warnings)
    if lost := len(plan.frame_indices) - len(used):
        note = lost_note(lost, len(plan.frame_indices))
        warnings.append(note)
        plan = plan.with_frames(used, media.video_processing.temporal_patch_size, [note])
    return EncodedMedium(tuple(parts), plan, tuple(warnings))


def _video_part(source: MediaSource, limits: MediaLimits) -> dict[str, Any]:
    assert not isinstance(source, PILImage.Image), "Video refuses it"
    with open_stream(source, "video", limits) as stream:
        media_type = read_format(stream, source).media_type
        return {"type": "video_url", "video_url": {"url": _data_uri(media_type, stream.read())}}


def _max_pixels(media: MediaProcessor) -> int:
    processing, max_tokens = media.image_processing, media.budget.max_image_tokens
    most = processing.max_pixels
    return most if max_tokens is None else min(most, max_tokens * processing.factor**2)


def _resized(picture: PILImage.Image, size: Size) -> PILImage.Image:
    height, width = size
    return picture.resize((width, height), PILImage.Resampling.BICUBIC)


def _encoded(picture: PILImage.Image, format: Literal["JPEG", "PNG"]) -> str:
    file = io.BytesIO()
    picture.save(file, format, **({"quality": _JPEG_QUALITY} if format == "JPEG" else {"compress_level": 3}))
    return _data_uri(f"image/{format.lower()}", file.getvalue())


def _data_uri(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _picture_part(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}
