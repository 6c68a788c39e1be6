"""Messages in a server's form: texts, pictures as data: URIs, videos as pictures with their times or as a file.

Media are planned as for a model in this process, under the same budget. The plan sets the size of pictures and the
frames of a video. Its token counts are Qwen3.5's; a server with another model counts differently.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from PIL import Image as PILImage

from qwen35mm.contract import EncodedMedium, Image, Message, Text, ToolCall, Video
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
    VideoProcessing,
    describe,
    timestamp_text,
)
from qwen35mm_preprocess.image import check_same_image, load_image, probe_image
from qwen35mm_preprocess.media import open_stream, read_format
from qwen35mm_preprocess.say import say
from qwen35mm_preprocess.sizes import image_size
from qwen35mm_preprocess.types import Size
from qwen35mm_preprocess.video import check_same_video, decode_frames, lost_note
from qwen35mm_preprocess.video_probe import probe_video

VideoMode = Literal["frames", "video_url"]

# The number of frames that vLLM and transformers' server sample themselves.
DEFAULT_MAX_FRAMES = 32
_JPEG_QUALITY = 95
_HALVES = (0.5, 0.5, 0.5)


def default_media(budget: MediaBudget | None, limits: MediaLimits | None, video: VideoMode) -> MediaProcessor:
    """Qwen3.5's processing with a budget; each frame sent as a picture counts by itself."""
    temporal_patch_size = 1 if video == "frames" else 2
    return MediaProcessor(
        ImageProcessing(16, 2, 2, _HALVES, _HALVES),
        VideoProcessing(16, temporal_patch_size, 2, _HALVES, _HALVES),
        budget=budget or replace(MediaBudget.for_gpu(), max_frames=DEFAULT_MAX_FRAMES),
        limits=limits or MediaLimits(),
    )


def encode_medium(part: Image | Video, media: MediaProcessor, video: VideoMode) -> EncodedMedium:
    """Reads, checks and encodes one medium unless it is encoded; by its plan, if that is Qwen3.5's.

    Raises:
        MediaError: it can't be read, is damaged, exceeds a limit, or doesn't match its plan.
    """
    source = part.source
    if isinstance(source, EncodedMedium):
        return source
    if isinstance(source, PreparedMedia):
        raise MediaSourceError("A medium that was prepared for a model in this process can't be sent. Pass its file.")
    plan = pinned_plan(part, media)
    if isinstance(part, Image):
        plan = plan or media.plan(source, "image")
        return EncodedMedium((_picture_part(_picture_uri(source, plan, media)),), plan)
    if video == "video_url":
        if part.clip is not None:
            raise MediaSourceError(
                say("A part of a video can't be sent as a whole file. Send the video as its frames.")
            )
        plan = plan or media.plan(source, "video")
        return EncodedMedium((_video_part(source, media.limits),), plan)
    return _encode_frames(source, media, plan or media.plan(source, "video", part.clip))


def pinned_plan(part: Image | Video, media: MediaProcessor) -> MediaPlan | None:
    """A medium's plan if it is Qwen3.5's, made for a server or for a model in a process.

    Raises:
        MediaPlanError: it can't be a plan of this medium.
    """
    plan, source = part.plan, part.source
    if plan is None or isinstance(source, PreparedMedia | EncodedMedium):
        return plan
    for temporal_patch_size in (1, 2):
        videos = replace(media.video_processing, temporal_patch_size=temporal_patch_size)
        processing = videos if part.kind == "video" else media.image_processing
        if plan.kind == part.kind and plan.processing == processing.fingerprint():
            replace(media, video_processing=videos).check(plan, source)
            return plan
    return None


def encode_messages(messages: Sequence[Message], media: list[EncodedMedium]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form; takes the encoded media off the front of `media`.

    That form needs an id for each call and result: calls without one are numbered, such results answer in order.
    """
    encoded: list[dict[str, Any]] = []
    unanswered: list[str] = []
    num_calls = 0
    for message in messages:
        values = _encode_message(message, media)
        if message.tool_calls:
            ids = [call.id or f"call_{number}" for number, call in enumerate(message.tool_calls, num_calls)]
            num_calls += len(ids)
            unanswered += ids
            values["tool_calls"] = [_call(call, name) for call, name in zip(message.tool_calls, ids, strict=True)]
            values["content"] = values["content"] or None
        if message.role == "tool":
            answered = message.tool_call_id or next(iter(unanswered), "call_0")
            unanswered = [name for name in unanswered if name != answered]
            values["tool_call_id"] = answered
        encoded.append(values)
    return encoded


def _call(call: ToolCall, name: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _encode_message(message: Message, media: list[EncodedMedium]) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role}
    if message.name is not None:
        values["name"] = message.name
    if message.reasoning is not None:
        values["reasoning_content"] = message.reasoning
    if not message.media:
        return values | {"content": message.text}
    parts: list[dict[str, Any]] = []
    for part in message.content:
        parts += [_text_part(part.text)] if isinstance(part, Text) else media.pop(0).parts
    return values | {"content": parts}


def _picture_uri(source: MediaSource, plan: MediaPlan, media: MediaProcessor) -> str:
    """The file's own bytes if every server decodes them to the same picture, else a newly encoded picture."""
    info = probe_image(source, media.limits)
    check_same_image(info.size, plan, source)
    # Sent unchanged if the plan makes it no smaller than any plan would: then the plan's size is what the model sees.
    full = image_size(info.size, media.image_processing)
    is_small = plan.size == full and info.size[0] * info.size[1] <= media.image_processing.max_pixels
    # Decoded in any case, so that a damaged file fails here with a message, not at the server.
    picture = load_image(source, media.limits, plan.color, None if is_small else plan)
    # Not WebP, which llama-server can't read.
    if is_small and info.is_plain and info.format in ("JPEG", "PNG") and not isinstance(source, PILImage.Image):
        with open_stream(source, "image", media.limits) as stream:
            return _data_uri(f"image/{info.format.lower()}", stream.read())
    return _encoded(picture, "JPEG" if info.format in ("JPEG", "MPO") else "PNG")


def _encode_frames(source: MediaSource, media: MediaProcessor, plan: MediaPlan) -> EncodedMedium:
    assert plan.frame_indices is not None
    assert plan.frame_times_s is not None
    times = dict(zip(plan.frame_indices, plan.frame_times_s, strict=True))
    info = probe_video(source, media.limits)
    check_same_video(info, plan, source)
    parts: list[dict[str, Any]] = []
    used: list[int] = []
    for index, frame in decode_frames(source, info, plan.frame_indices, media.limits, plan.color):
        if frame.width * frame.height > plan.size[0] * plan.size[1]:
            frame = _resized(frame, plan.size)
        parts += [_text_part(timestamp_text(times[index])), _picture_part(_encoded(frame, "JPEG"))]
        used.append(index)
    if not used:
        raise MediaDecodeError(
            say(
                "{name} could not be decoded: none of its frames is readable. Copy or upload it again.",
                name=describe(source),
            )
        )
    warnings = list(info.warnings)
    if lost := len(plan.frame_indices) - len(used):
        note = lost_note(lost, len(plan.frame_indices))
        warnings.append(note)
        # A plan for a model in a process stays unchanged, as that model needs it.
        if plan.processing == media.video_processing.fingerprint():
            plan = plan.with_frames(used, media.video_processing.temporal_patch_size, [note])
    return EncodedMedium(tuple(parts), plan, tuple(warnings))


def _video_part(source: MediaSource, limits: MediaLimits) -> dict[str, Any]:
    assert not isinstance(source, PILImage.Image), "Video refuses it"
    with open_stream(source, "video", limits) as stream:
        media_type = read_format(stream, source).media_type
        return {"type": "video_url", "video_url": {"url": _data_uri(media_type, stream.read())}}


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
