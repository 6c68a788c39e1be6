"""Lists a video's frames in presentation order from its header and packet times, and samples them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import av
import numpy as np
from av.error import FFmpegError
from av.packet import Packet
from av.video.frame import VideoFrame
from PIL import Image

from qwen35mm_preprocess.animation import is_animation, probe_animation
from qwen35mm_preprocess.errors import MediaDecodeError, MediaLimitError
from qwen35mm_preprocess.formats import AVI, MATROSKA, MP4, MPEG_TS
from qwen35mm_preprocess.image import check_source_size
from qwen35mm_preprocess.media import MediaSource, describe
from qwen35mm_preprocess.say import Said, decimal, say
from qwen35mm_preprocess.types import MediaLimits, Size
from qwen35mm_preprocess.video_container import (
    SWAP_SIDES,
    OpenVideo,
    open_video,
    packets_of,
    pixel_aspect,
    shown_width,
    transpose_of,
)

# A decoder that reorders frames needs several packets before the first one.
_MAX_PACKETS_FOR_A_FRAME = 64


# A file that changed more recently may change again without a new time.
_SETTLED_S = 2.0


@dataclass(frozen=True, eq=False)
class VideoInfo:
    """A video's frames in presentation order.

    size            (height, width) upright, in square pixels
    transpose       the operation that turns a decoded frame upright, or None
    pts             int64 [N] presentation times in the stream's time base
    is_key          bool [N] whether decoding can start at a frame
    times_s         float64 [N] presentation times from the first frame; exactly index / fps at a constant rate
    fps             frames a second; the mean if the rate varies
    is_constant     every frame lies less than half a frame from its place at a constant rate
    duration_s      from the first frame to the end of the last
    can_seek        the container has an index for seeking
    pixel_aspect    a stored pixel's shown width over its height, before turning
    is_animation    read by Pillow, not by libav
    warnings        messages for the user
    """

    size: Size
    transpose: Image.Transpose | None
    pts: np.ndarray
    is_key: np.ndarray
    times_s: np.ndarray
    fps: float
    is_constant: bool
    duration_s: float
    can_seek: bool
    warnings: tuple[Said, ...]
    pixel_aspect: float = 1.0
    is_animation: bool = False

    @property
    def num_frames(self) -> int:
        return len(self.pts)

    def frame_times(self, indices: Sequence[int]) -> tuple[float, ...]:
        """Presentation times of these frames in seconds, from the file's first frame."""
        return tuple(self.times_s[list(indices)].tolist())

    def within(self, start_s: float, end_s: float | None) -> range:
        """Indices of the frames that begin in the range; if none does, the frame shown then.

        Accurate to the millisecond, the precision that a user can enter.
        """
        first = int(np.searchsorted(self.times_s, start_s - 1e-3))
        stop = self.num_frames if end_s is None else int(np.searchsorted(self.times_s, end_s + 1e-3, side="right"))
        return range(first, stop) if first < stop else range(max(first - 1, 0), max(first, 1))

    def cut(self, frames: range) -> VideoInfo:
        """The same video with only these frames, at their times."""
        at = slice(frames.start, frames.stop)
        next_s = self.times_s[frames.stop] if frames.stop < self.num_frames else self.duration_s
        duration_s = float(next_s - self.times_s[frames.start])
        parts = {name: getattr(self, name)[at] for name in ("pts", "is_key", "times_s")}
        return replace(self, duration_s=duration_s, **parts)


# What identifies the last file, and its table.
_last: tuple[tuple[object, MediaLimits], VideoInfo] | None = None


def probe_video(source: MediaSource, limits: MediaLimits) -> VideoInfo:
    """Reads a video's header and packet times. Decodes the first frame if the container may rotate it.

    The last file's table is kept: a long video is planned and read in parts.

    Raises:
        MediaError: the source is not a supported video, is damaged, has no frame or is over a limit.
    """
    global _last
    state = _state_of(source)
    if state is None:
        return _probed(source, limits)
    before = _last
    if before is None or before[0] != (state, limits):
        before = ((state, limits), _probed(source, limits))
        if _state_of(source) == state:
            _last = before
    return before[1]


def _state_of(source: MediaSource) -> tuple[object, ...] | None:
    """Identifies a file's content without reading it; None for other sources and for a file that just changed."""
    if not isinstance(source, Path):
        return None
    try:
        status = source.stat()
    except (OSError, ValueError):
        return None
    if time.time() - status.st_mtime < _SETTLED_S:
        return None
    return source.absolute(), status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def _probed(source: MediaSource, limits: MediaLimits) -> VideoInfo:
    name = describe(source)
    if is_animation(source, limits):
        return _probe_animation(source, name, limits)
    with open_video(source, limits) as video:
        codec = video.stream.codec_context
        size = (codec.height, codec.width)
        if min(size) < 1:
            raise MediaDecodeError(
                say(
                    "{name} does not tell how large its pictures are: it is damaged, or they have more than "
                    "{millions} million pixels. Copy or upload it again, or make it smaller.",
                    name=name,
                    millions=decimal(limits.max_source_pixels / 1000000.0),
                )
            )
        check_source_size(size, name, limits)
        aspect = pixel_aspect(video.stream)
        size = (size[0], shown_width(size[1], aspect))
        check_source_size(size, name, limits)
        can_seek = can_be_turned = video.format in (MP4, MATROSKA)
        pts, is_key, last_duration, is_cut, first = _read_packets(video, name, limits, decode_first=can_be_turned)
        time_base = float(video.stream.time_base or 0)
        times = (pts - pts[0]).astype(np.float64) * time_base
        declared = float(video.stream.average_rate or 0)
        announced_s = (video.container.duration or 0) / av.time_base
        # libav drops some of the packets that an edit list removes and reports others, so the count can't be compared.
        announced_frames = 0 if is_cut else video.stream.frames
        has_others = len(video.container.streams) > 1
        if video.format is AVI and pts[-1] + max(last_duration, 1) >= announced_frames:
            # It counts dropped frames too: empty chunks, which libav leaves out.
            announced_frames = len(pts)
    is_whole = announced_frames == len(pts)
    if not is_whole and has_others and _is_short(times[-1], announced_s):
        is_whole = not _is_short(_end_s(source, limits), announced_s)
    transpose = None if first is None else transpose_of(first)
    info = VideoInfo(
        size=(size[1], size[0]) if transpose in SWAP_SIDES else size,
        transpose=transpose,
        pts=pts,
        is_key=is_key,
        times_s=times,
        fps=declared,
        is_constant=True,
        duration_s=0.0,
        can_seek=can_seek,
        warnings=(),
        pixel_aspect=aspect,
    )
    return _timed(info, name, limits, last_duration * time_base, announced_frames, 0.0 if is_whole else announced_s)


def _probe_animation(source: MediaSource, name: Said, limits: MediaLimits) -> VideoInfo:
    found = probe_animation(source, limits)
    count = len(found.times_s)
    _check_num_frames(count, name, limits)
    info = VideoInfo(
        size=found.size,
        transpose=None,
        pts=np.arange(count),
        is_key=np.zeros(count, bool),
        times_s=found.times_s,
        fps=0.0,
        is_constant=True,
        duration_s=0.0,
        can_seek=False,
        warnings=(),
        is_animation=True,
    )
    return _timed(info, name, limits, found.last_s, found.num_announced, 0.0)


def _timed(
    info: VideoInfo, name: Said, limits: MediaLimits, last_s: float, announced_frames: int, announced_s: float
) -> VideoInfo:
    """Completes `info` with its rate, duration and warnings. Its `fps` is the declared rate; `last_s` is 0 if unknown.

    Raises:
        MediaLimitError: it is too long.
    """
    times, count = info.times_s, info.num_frames
    fps, is_constant = _frame_rate(times, info.fps)
    if is_constant:
        times = np.arange(count) / fps
    duration = count / fps if is_constant else float(times[-1]) + (last_s or 1 / fps)
    if duration > limits.max_duration_s:
        raise MediaLimitError(
            say(
                "{name} is {s} seconds long; at most {most} are read. Cut it, or raise the limit (--max-seconds).",
                name=name,
                s=decimal(duration, 0),
                most=decimal(limits.max_duration_s, 0),
            )
        )
    warnings = _cut_off_warning(name, count, announced_frames, duration, announced_s)
    return replace(info, times_s=times, fps=fps, is_constant=is_constant, duration_s=duration, warnings=warnings)


def _check_num_frames(count: int, name: Said, limits: MediaLimits) -> None:
    if count > limits.max_source_frames:
        raise MediaLimitError(say("{name} has more than {n} frames. Cut it.", name=name, n=limits.max_source_frames))


def _read_packets(
    video: OpenVideo, name: Said, limits: MediaLimits, *, decode_first: bool
) -> tuple[np.ndarray, np.ndarray, int, bool, VideoFrame | None]:
    """Reads all packet times without decoding more than the first frame.

    Returns:
        pts [N] and keyframe flags [N], sorted and unique; the last frame's duration in ticks, or 0; whether an edit
        list removes frames; the first picture, if `decode_first` and it can be decoded.
    """
    num_to_decode = _MAX_PACKETS_FOR_A_FRAME if decode_first else 0
    first: VideoFrame | None = None
    frames: dict[int, tuple[bool, int]] = {}
    is_cut = False
    # In MPEG-TS, a picture's second field may be a packet of its own, without a time.
    has_fields = video.format is MPEG_TS
    # Cameras give it a time: half a frame's duration after the first field's.
    field_ticks = 0.5 / float((video.stream.average_rate or 1) * (video.stream.time_base or 1))
    first_field: int | None = None
    is_vp8 = video.stream.codec_context.name in ("vp8", "libvpx")
    try:
        for packet in packets_of(video):
            if first is None and num_to_decode:
                num_to_decode -= 1
                first = _first_frame(packet)
            is_cut |= packet.is_discard
            pts = packet.pts if packet.pts is not None or has_fields else packet.dts
            # Skips the empty packet at the end, packets removed by an edit list, and a cut-off file's partial packet.
            if pts is None or packet.size == 0 or packet.is_discard or packet.is_corrupt:
                continue
            # RFC 6386, 9.1: the show_frame bit of the frame tag. Hidden frames are only references for others.
            if is_vp8 and not bytes(packet)[0] & 0x10:
                continue
            if has_fields and abs((packet.duration or 0) - field_ticks) <= 1:
                is_second = first_field is not None and abs(pts - first_field - field_ticks) <= 1
                first_field = None if is_second else pts
                if is_second:
                    continue
            frames.setdefault(pts, (packet.is_keyframe, packet.duration or 0))
            _check_num_frames(len(frames), name, limits)
    except FFmpegError:
        # Frames before the damage are usable. The announced length leads to the warning.
        pass
    if not frames:
        raise MediaDecodeError(
            say("{name} holds no frame: the file is damaged or cut off. Copy or upload it again.", name=name)
        )
    order = sorted(frames)
    is_key = np.array([frames[pts][0] for pts in order])
    return np.array(order, np.int64), is_key, frames[order[-1]][1], is_cut, first


def _first_frame(packet: Packet) -> VideoFrame | None:
    try:
        return next((frame for frame in packet.decode() if isinstance(frame, VideoFrame)), None)
    # PyAV raises ValueError if the decoder can't be opened, for example for too many pixels.
    except (FFmpegError, ValueError):
        return None


def _frame_rate(times: np.ndarray, declared: float) -> tuple[float, bool]:
    """(frames a second, whether constant): the declared rate if the times agree with it, else the measured rate."""
    if len(times) == 1 or times[-1] == 0:
        return declared or 1.0, True
    measured = (len(times) - 1) / float(times[-1])
    for fps in (declared, measured):
        if fps > 0 and np.abs(times * fps - np.arange(len(times))).max() < 0.5:
            return fps, True
    return measured, False


def _end_s(source: MediaSource, limits: MediaLimits) -> float:
    """When the last packet of any track ends: sound may be longer than the pictures."""
    end_s = 0.0
    with open_video(source, limits) as video, contextlib.suppress(FFmpegError):
        start_s = (video.container.start_time or 0) / av.time_base
        for packet in video.container.demux():
            if packet.pts is not None:
                end_s = max(end_s, float((packet.pts + (packet.duration or 0)) * packet.time_base) - start_s)
    return end_s


def _is_short(duration_s: float, announced_s: float) -> bool:
    return announced_s > duration_s * 1.1 + 1


def _cut_off_warning(
    name: Said, num_frames: int, announced_frames: int, duration_s: float, announced_s: float
) -> tuple[Said, ...]:
    if announced_frames > num_frames:
        return (
            say(
                "{name} seems to be cut off: {n} of its {m} frames could be read.",
                name=name,
                n=num_frames,
                m=announced_frames,
            ),
        )
    if _is_short(duration_s, announced_s):
        return (
            say(
                "{name} seems to be cut off: it announces {m} s, its frames end at {n} s.",
                name=name,
                n=decimal(duration_s, 1),
                m=decimal(announced_s, 1),
            ),
        )
    return ()


def count_frames(info: VideoInfo, fps: float, min_frames: int, max_frames: int) -> int:
    """How many frames to sample at `fps` (transformers' Qwen3VLVideoProcessor.sample_frames)."""
    seconds = info.num_frames / info.fps if info.is_constant else info.duration_s
    return min(max(int(seconds * fps), min_frames), max_frames, info.num_frames)


def sample_frames(info: VideoInfo, num_frames: int, min_frames: int = 1) -> tuple[int, ...]:
    """Indices of about `num_frames` frames, spread evenly over the presentation time from the first to the last.

    At a constant rate, gives exactly the `num_frames` of transformers' `sample_frames`. At a varying rate, gives the
    frames shown at evenly spread times. A long-shown frame counts once, so there may be fewer, but at least
    `min_frames`.
    """
    if info.is_constant:
        return _spread(info.num_frames, num_frames)
    moments = np.linspace(info.times_s[0], info.times_s[-1], num_frames)
    # The margin makes the last moment find the last frame despite rounding.
    shown = np.searchsorted(info.times_s, moments + 1e-9, side="right") - 1
    indices = np.unique(shown)
    least = min(min_frames, num_frames)
    if len(indices) < least:
        return _spread(info.num_frames, least)
    return tuple(indices.tolist())


def _spread(num_frames: int, count: int) -> tuple[int, ...]:
    """`count` of `num_frames` indices, spread evenly from the first to the last."""
    return tuple(np.linspace(0, num_frames - 1, count).round().astype(int).tolist())
