"""Encodes media for a server in the process that decodes them: another process for untrusted media."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from PIL import Image as PILImage

from qwen35mm.backends.remote.media import VideoMode, encode_medium, pinned_plan
from qwen35mm.contract import EncodedMedium, Image, Video
from qwen35mm.decoding import Answer, DecodingProcessor
from qwen35mm.decoding.answers import Data, plan_values, read_list, read_plan, require
from qwen35mm.decoding.processor import read_warnings
from qwen35mm_preprocess import MediaKind, MediaPlan, MediaProcessor, MediaSource, PreparedMedia


def encode_by(part: Image | Video, media: MediaProcessor, video: VideoMode) -> EncodedMedium:
    """See `encode_medium`; runs where `media` reads. Also raises as `Decoders.call`."""
    source = part.source
    if not isinstance(media, DecodingProcessor) or isinstance(source, EncodedMedium | PreparedMedia | PILImage.Image):
        return encode_medium(part, media, video)
    read = partial(read_encoded, processor=media, kind=part.kind, given=pinned_plan(part, media))
    asked = (replace(part, source=b""), media.direct, video)
    return media.read(source, _encode, *asked, read=read, reads_video=part.kind == "video")


def _encode(source: MediaSource, part: Image | Video, media: MediaProcessor, video: VideoMode) -> Answer:
    return encoded_answer(encode_medium(replace(part, source=source), media, video))


def encoded_answer(medium: EncodedMedium, **more: Any) -> Answer:
    """A medium in the form of `read_encoded`, with additional values."""
    values = {"plan": plan_values(medium.plan), "warnings": medium.warnings, **more}
    return Answer(values, (json.dumps(medium.parts).encode(),))


def read_encoded(
    values: Any, data: Data, processor: MediaProcessor, kind: MediaKind, given: MediaPlan | None = None
) -> EncodedMedium:
    """Content parts from an answer. Raises NonsenseError, and errors of wrong types.

    Args:
        given: the plan that the medium was encoded by; None if the child made a new one.
    """
    plan = read_plan(values["plan"], processor, kind, given)
    # A whole video, or its frames; base64 makes four characters of three bytes.
    num_pixels = plan.num_tokens * processor.image_processing.factor**2
    parts = read_list(json.loads(data.take(2 * processor.limits.max_bytes(kind) + 8 * num_pixels)))
    require(all(map(_is_part, parts)), "parts of a request that are none")
    return EncodedMedium(tuple(parts), plan, read_warnings(values))


def _is_part(part: Any) -> bool:
    """Whether this is a text, or a medium as a data: URI: a server would fetch any other address."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    if kind == "text":
        return part.keys() == {"type", "text"} and isinstance(part["text"], str)
    if kind not in ("image_url", "video_url") or part.keys() != {"type", kind} or not isinstance(part[kind], Mapping):
        return False
    url = part[kind].get("url")
    return part[kind].keys() == {"url"} and isinstance(url, str) and url.startswith("data:")
