"""Opens videos so that they can reach nothing but their own bytes, and reads how to show their pictures.

libav gets a stream, never a name, and the one demuxer for the content. No other demuxer and no protocol is allowed.
Requests to open anything else (a playlist's segments, an external track) are refused.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import av
from av.container import InputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.stream import Disposition
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from qwen35mm_preprocess.errors import MediaDecodeError, MediaFormatError
from qwen35mm_preprocess.formats import MPEG_PS, MPEG_TS, SUPPORTED_VIDEOS, MediaFormat
from qwen35mm_preprocess.media import MediaSource, describe, open_stream, read_format
from qwen35mm_preprocess.say import Said, say
from qwen35mm_preprocess.types import MediaLimits

# libav's decoders. A codec is refused if libav has none of its decoders listed here.
_DECODERS = (
    *("h264", "hevc", "av1", "libdav1d", "libaom-av1", "vp8", "libvpx", "vp9", "libvpx-vp9"),
    *("mpeg1video", "mpeg2video", "mpegvideo", "mpeg4", "msmpeg4", "msmpeg4v1", "msmpeg4v2", "h263", "mjpeg", "png"),
    *("gif", "prores", "dnxhd", "cfhd", "dvvideo", "ffv1", "huffyuv", "ffvhuff", "utvideo", "rawvideo", "v210"),
    *("wmv1", "wmv2", "wmv3", "vc1", "flv", "vp6", "vp6f", "theora", "cinepak", "svq1", "svq3", "qtrle"),
)
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_READ_BUFFER_BYTES = 2**18
# Titles are often not UTF-8. PyAV 19 dropped the argument and always replaces bad bytes.
_METADATA: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
# A longer gap in a transport stream means that it was spliced there.
_MAX_GAP_S = 10.0
# Signs of (a, b, c, d) of a display matrix, with y pointing down: a pixel (x, y) is shown at (ax + cy, bx + dy).
_TRANSPOSE = {
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
SWAP_SIDES = [turn for (a, *_), turn in _TRANSPOSE.items() if a == 0]


class OpenVideo(NamedTuple):
    """An open container, its video stream and its format."""

    container: InputContainer
    stream: VideoStream
    format: MediaFormat


@contextmanager
def open_video(source: MediaSource, limits: MediaLimits) -> Iterator[OpenVideo]:
    """Opens a source of kind video.

    Raises:
        MediaSourceError, MediaLimitError: the source can't be read, or has too many bytes.
        MediaFormatError: the source is not a video, has only sound or an unsupported codec.
        MediaDecodeError: the container is damaged or cut off.
    """
    name = describe(source)
    if isinstance(source, Image.Image):
        raise MediaFormatError(say("A PIL image was given as a video. Pass it as an image, or pass the video's file."))
    with open_stream(source, "video", limits) as file:
        found = read_format(file, source)
        if found.libav is None:
            raise MediaFormatError(
                say(
                    "{name} is an image ({format}) where a video was expected: {formats}. Add it as an image.",
                    name=name,
                    format=found.name,
                    formats=SUPPORTED_VIDEOS,
                )
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
                say(
                    "{name} starts like a video ({format}) but is damaged or cut off: its index could not be read. "
                    "Copy or upload it again.",
                    name=name,
                    format=found.name,
                )
            ) from None
        with container:
            stream = _video_stream(container, name)
            stream.codec_context.options = {"max_pixels": str(limits.max_source_pixels)}
            yield OpenVideo(container, stream, found)


def packets_of(video: OpenVideo) -> Iterator[Packet]:
    """Yields the stream's packets in decoding order.

    A transport stream may have been spliced. Jumps in its times are removed, as in players.

    Raises:
        FFmpegError: the next packet is damaged.
    """
    is_spliceable = video.format in (MPEG_TS, MPEG_PS)
    most = _MAX_GAP_S / float(video.stream.time_base or 1)
    shift, last, duration = 0, None, 0
    for packet in video.container.demux(video.stream):
        if is_spliceable and packet.dts is not None:
            dts = packet.dts + shift
            if last is not None and not last <= dts <= last + most:
                shift += last + duration - dts
            packet.dts += shift
            if packet.pts is not None:
                packet.pts += shift
            last, duration = packet.dts, packet.duration or 0
        yield packet


def _video_stream(container: InputContainer, name: Said) -> VideoStream:
    """The video stream that players show: the default one, else the first. Cover pictures don't count.

    Raises MediaFormatError.
    """
    streams = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not streams:
        what = say("sound only") if container.streams.audio else say("no video")
        raise MediaFormatError(
            say(
                "{name} holds {what}: there is nothing to look at. Choose a file with a video track.",
                name=name,
                what=what,
            )
        )
    stream = next((stream for stream in streams if stream.disposition & Disposition.default), streams[0])
    if stream.codec_context is None or stream.codec_context.name not in _DECODERS:
        codec = stream.codec_context.name if stream.codec_context else say("an unknown codec")
        raise MediaFormatError(
            say(
                "{name} is encoded with {codec}, which is not read here. Convert it to H.264, H.265, VP9 or AV1.",
                name=name,
                codec=codec,
            )
        )
    return stream


def decoder_with_alpha(stream: VideoStream, limits: MediaLimits) -> VideoCodecContext | None:
    """A separate decoder for VP8 and VP9 with alpha in WebM, which libav's native decoders drop; else None."""
    name = _WITH_ALPHA.get(stream.codec_context.name)
    if name is None or stream.metadata.get("alpha_mode") != "1" or name not in av.codecs_available:
        return None
    decoder = VideoCodecContext.create(name, "r")
    assert isinstance(decoder, VideoCodecContext)
    decoder.options = {"max_pixels": str(limits.max_source_pixels)}
    return decoder


def _refuse_to_open(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    # libav's error class, since this surfaces wherever the container is read.
    raise FFmpegError(errno.EPERM, "a video may not open other files")


def pixel_aspect(stream: VideoStream) -> float:
    """A pixel's shown width over its height, from the container, else from the codec."""
    for found in (stream.sample_aspect_ratio, stream.codec_context.sample_aspect_ratio):
        if found:
            return float(found)
    return 1.0


def shown_width(width: int, aspect: float) -> int:
    """Width in square pixels of `width` stored pixels."""
    return max(1, round(width * aspect))


def transpose_of(frame: VideoFrame) -> Image.Transpose | None:
    """The operation that turns the frame upright, in quarter turns. libav gives the rotation only on decoded frames."""
    try:
        side_data: Any = frame.side_data
        matrix = side_data["DISPLAYMATRIX"]
    # PyAV raises ValueError for side data of a kind that it doesn't know.
    except (KeyError, ValueError):
        return None
    a, b, _, c, d = struct.unpack_from("=5i", bytes(matrix))
    longest = max(abs(a), abs(b), abs(c), abs(d))
    a, b, c, d = (0 if abs(value) <= longest / 2 else (1 if value > 0 else -1) for value in (a, b, c, d))
    return _TRANSPOSE.get((a, b, c, d))
