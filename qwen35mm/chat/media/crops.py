"""Frames of videos, and crops of pictures and frames, at full resolution."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qwen35mm.chat.store.records import Attachment, Crop
from qwen35mm.decoding import Answer, asked_by, read_by
from qwen35mm.decoding.answers import Data, require
from qwen35mm.decoding.processor import most_bytes
from qwen35mm.errors import PromptError
from qwen35mm.pools import Asker
from qwen35mm_preprocess import MediaDecodeError, MediaLimits, MediaProcessor, detect_kind
from qwen35mm_preprocess.formats import BMP, GIF, HEAD_BYTES, PNG, TIFF, sniff
from qwen35mm_preprocess.image import load_image
from qwen35mm_preprocess.say import say
from qwen35mm_preprocess.video import decode_frames
from qwen35mm_preprocess.video_probe import probe_video

# Lossless formats, whose crops are lossless too.
_LOSSLESS = (BMP, GIF, PNG, TIFF)
# A player reports the time of the frame on the screen, or a little less.
_ROUNDING_S = 1e-3


def frame_at(path: Path, time_s: float, limits: MediaLimits) -> tuple[Image.Image, float]:
    """The upright RGB frame on the screen `time_s` seconds after the first one, and the frame's own time.

    Raises:
        MediaError: the file isn't a readable video, or the frame can't be decoded.
    """
    info = probe_video(path, limits)
    at = max(int(np.searchsorted(info.times_s, time_s + _ROUNDING_S, side="right")) - 1, 0)
    for _, frame in decode_frames(path, info, [at], limits):
        return frame, float(info.times_s[at])
    raise MediaDecodeError(say("This frame of the video can't be decoded. Choose another moment."))


def cut(
    path: Path,
    source: Attachment,
    media: MediaProcessor,
    box: Sequence[float],
    time_s: float | None,
    asker: Asker | None = None,
) -> tuple[bytes, Crop]:
    """Crops a picture or a video's frame; returns the crop as PNG or JPEG bytes, and where it was.

    Args:
        media: the processor that reads the source, with its limits.
        box: left, top, right and bottom edge, as shares of the upright source's sides.
        time_s: the frame's time from the first one; ignored for a picture.
        asker: the work ends when they leave.

    Raises:
        PromptError: the box is invalid.
        MediaError: the source can't be read.
        RequestError, EngineError: see `read_by`.
    """
    if len(box) != 4 or not (0 <= box[0] < box[2] <= 1 and 0 <= box[1] < box[3] <= 1):
        raise PromptError(say("A part of a picture is given by four numbers from 0 to 1: left, top, right and bottom."))
    asked, read = (tuple(box), time_s, media.limits), partial(_read_cut, media=media)
    data, where = read_by(asked_by(media, asker), path, _cut, *asked, read=read)
    return data, Crop(source.digest, source.name, *where)


def _cut(path: Path, box: Sequence[float], time_s: float | None, limits: MediaLimits) -> Answer:
    if detect_kind(path, limits) == "video":
        picture, own_s = frame_at(path, time_s or 0.0, limits)
    else:
        picture, own_s = load_image(path, limits), None
    left, right = _edges(box[0], box[2], picture.width)
    top, bottom = _edges(box[1], box[3], picture.height)
    size = (picture.height, picture.width)
    data = io.BytesIO()
    part = picture.crop((left, top, right, bottom))
    with path.open("rb") as file:
        is_lossless = sniff(file.read(HEAD_BYTES)) in _LOSSLESS
    if is_lossless and own_s is None:
        part.save(data, "PNG")
    else:
        part.save(data, "JPEG", quality=95, subsampling=0)
    return Answer([[left, top, right, bottom], size, own_s], (data.getvalue(),))


def _read_cut(values: Any, data: Data, media: MediaProcessor) -> tuple[bytes, tuple[Any, ...]]:
    box, size, own_s = values
    numbers = (*box, *size)
    require((len(box), len(size)) == (4, 2) and all(type(each) is int for each in numbers), "no part of a picture")
    left, top, right, bottom = box
    require(0 <= left < right <= size[1] and 0 <= top < bottom <= size[0], "a part beyond the picture")
    require(own_s is None or (type(own_s) is float and math.isfinite(own_s)), "no time")
    return data.take(most_bytes(media)), (tuple(box), tuple(size), own_s)


def _edges(low: float, high: float, length: int) -> tuple[int, int]:
    """The whole pixels that cover a range; at least one."""
    start = min(math.floor(round(low * length, 3)), length - 1)
    return start, max(math.ceil(round(high * length, 3)), start + 1)
