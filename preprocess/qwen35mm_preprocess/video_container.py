"""Opens a video so that it can reach nothing but its own bytes.

libav is handed a stream, never a name, and the one demuxer that the content calls for. No other demuxer and no
protocol is allowed, and a request to open anything else (a playlist's segments, an external track) is refused.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, NoReturn

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Disposition
from av.video.stream import VideoStream
from PIL import Image

from qwen35mm_preprocess.errors import MediaDecodeError, MediaFormatError
from qwen35mm_preprocess.formats import SUPPORTED_VIDEOS, MediaFormat
from qwen35mm_preprocess.media import MediaSource, describe, open_stream, read_format
from qwen35mm_preprocess.types import MediaLimits

# Names of libav's decoders; a codec is refused if libav was built without any of its decoders here.
_DECODERS = (
    *("h264", "hevc", "av1", "libdav1d", "libaom-av1", "vp8", "libvpx", "vp9", "libvpx-vp9"),
    *("mpeg1video", "mpeg2video", "mpeg4", "msmpeg4v3", "h263", "mjpeg", "prores", "png", "gif"),
)
_READ_BUFFER_BYTES = 2**18
# Titles are often not UTF-8; PyAV 19 replaces what it can't read by itself and dropped the argument.
_METADATA: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}


class OpenVideo(NamedTuple):
    """An open container, its video stream, its format and the bytes under it."""

    container: InputContainer
    stream: VideoStream
    format: MediaFormat
    file: BinaryIO


@contextmanager
def open_video(source: MediaSource, limits: MediaLimits) -> Iterator[OpenVideo]:
    """Opens a source of kind video.

    Raises:
        MediaSourceError, MediaLimitError: the source can't be read, or has too many bytes.
        MediaFormatError: not a video, sound only, or a codec that is not read here.
        MediaDecodeError: the container is damaged or cut off.
    """
    name = describe(source)
    if isinstance(source, Image.Image):
        raise MediaFormatError("A PIL image was given as a video. Pass it as an image, or pass the video's file.")
    with open_stream(source, "video", limits) as file:
        found = read_format(file, source)
        if found.libav is None:
            raise MediaFormatError(
                f"{name} is an image ({found.name}) where a video was expected: {SUPPORTED_VIDEOS}. Add it as an image."
            )
        options = {
            "format_whitelist": found.libav,
            "protocol_whitelist": "none",
            "codec_whitelist": ",".join(_DECODERS),
            "enable_drefs": "0",
            "max_pixels": str(limits.max_source_pixels),
        }
        try:
            container = av.open(
                file,
                mode="r",
                format=found.libav,
                options=options,
                buffer_size=_READ_BUFFER_BYTES,
                io_open=_refuse_to_open,
                **_METADATA,
            )
        except FFmpegError:
            raise MediaDecodeError(
                f"{name} starts like a video ({found.name}) but is damaged or cut off: its index could not be read. "
                f"Copy or upload it again."
            ) from None
        with container:
            stream = _video_stream(container, name)
            stream.codec_context.options = {"max_pixels": str(limits.max_source_pixels)}
            stream.thread_type = "AUTO"
            yield OpenVideo(container, stream, found, file)


def _video_stream(container: InputContainer, name: str) -> VideoStream:
    """The first video stream that is not an attached cover picture. Raises MediaFormatError."""
    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not streams:
        what = "sound only" if container.streams.audio else "no video"
        raise MediaFormatError(f"{name} holds {what}: there is nothing to look at. Choose a file with a video track.")
    stream = streams[0]
    if stream.codec_context is None or stream.codec_context.name not in _DECODERS:
        codec = f"the codec {stream.codec_context.name}" if stream.codec_context else "an unknown codec"
        raise MediaFormatError(
            f"{name} is encoded with {codec}, which is not read here. Convert it to H.264, H.265, VP9 or AV1."
        )
    return stream


def _refuse_to_open(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    # libav's own kind of error, since it surfaces wherever the container is read.
    raise FFmpegError(errno.EPERM, "a video may not open other files")
