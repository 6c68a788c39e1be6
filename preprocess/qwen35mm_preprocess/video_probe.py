"""What a video's container says about its frames: a demux of the packet times, without decoding."""

from __future__ import annotations

from dataclasses import dataclass

import av
import numpy as np
from av.error import FFmpegError
from PIL import Image

from qwen35mm_preprocess.errors import MediaDecodeError, MediaLimitError
from qwen35mm_preprocess.formats import MATROSKA, MP4
from qwen35mm_preprocess.image import check_source_size
from qwen35mm_preprocess.media import MediaSource, describe
from qwen35mm_preprocess.types import MediaLimits, Size
from qwen35mm_preprocess.video_container import OpenVideo, open_video
from qwen35mm_preprocess.video_rotation import SWAPS_SIDES, read_transpose


@dataclass(frozen=True, eq=False)
class VideoInfo:
    """A video's frames in presentation order.

    size            (height, width) upright
    transpose       the operation that puts a decoded frame upright, or None
    pts             int64 [N] presentation times in the stream's time base
    is_key          bool [N] whether decoding can start at a frame
    times_s         float64 [N] presentation times from the first frame; at a constant rate index / fps, to the bit
    fps             frames a second, as a mean where the rate varies
    is_constant     every frame lies less than half a frame from where a constant rate puts it
    duration_s      from the first frame to the end of the last
    can_seek        the container has an index to seek by
    warnings        in words for a person
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
    warnings: tuple[str, ...]

    @property
    def num_frames(self) -> int:
        return len(self.pts)


def probe_video(source: MediaSource, limits: MediaLimits) -> VideoInfo:
    """Reads a video's header and packet times.

    Raises:
        MediaError: not a video that is read here, damaged, without a single frame, or over a limit.
    """
    name = describe(source)
    with open_video(source, limits) as video:
        codec = video.stream.codec_context
        transpose = _read_transpose(video)
        size = (codec.width, codec.height) if transpose in SWAPS_SIDES else (codec.height, codec.width)
        if min(size) < 1:
            raise MediaDecodeError(
                f"{name} does not tell how large its pictures are: it is damaged, or they have more than "
                f"{limits.max_source_pixels / 1e6:g} million pixels. Copy or upload it again, or make it smaller."
            )
        check_source_size(size, name, limits)
        pts, is_key, last_duration = _packet_times(video, name, limits)
        time_base = float(video.stream.time_base or 0)
        times = (pts - pts[0]).astype(np.float64) * time_base
        declared = float(video.stream.average_rate or 0)
        announced_s = (video.container.duration or 0) / av.time_base
        announced_frames = video.stream.frames
        can_seek = video.format in (MP4, MATROSKA)
    fps, is_constant = _frame_rate(times, declared)
    if is_constant:
        times = np.arange(len(pts)) / fps
    duration = len(pts) / fps if is_constant else float(times[-1]) + (last_duration * time_base or 1 / fps)
    if duration > limits.max_duration_s:
        raise MediaLimitError(
            f"{name} is {duration:,.0f} seconds long; at most {limits.max_duration_s:,.0f} are read. Cut it."
        )
    return VideoInfo(
        size=size,
        transpose=transpose,
        pts=pts,
        is_key=is_key,
        times_s=times,
        fps=fps,
        is_constant=is_constant,
        duration_s=duration,
        can_seek=can_seek,
        warnings=_cut_off_warning(name, len(pts), announced_frames, duration, announced_s),
    )


def _read_transpose(video: OpenVideo) -> Image.Transpose | None:
    # libav reads the same stream and must find it where it left it.
    position = video.file.tell()
    try:
        place = video.container.streams.video.index(video.stream)
        return read_transpose(video.file, video.format, video.stream.id, place)
    finally:
        video.file.seek(position)


def _packet_times(video: OpenVideo, name: str, limits: MediaLimits) -> tuple[np.ndarray, np.ndarray, int]:
    """pts [N] and keyframe flags [N], sorted and without repeats, and the last frame's duration in ticks (or 0)."""
    frames: dict[int, tuple[bool, int]] = {}
    is_vp8 = video.stream.codec_context.name in ("vp8", "libvpx")
    try:
        for packet in video.container.demux(video.stream):
            pts = packet.pts if packet.pts is not None else packet.dts
            # The empty packet at the end, what an edit list cuts away, half a packet at the end of a cut-off file.
            if pts is None or packet.size == 0 or packet.is_discard or packet.is_corrupt:
                continue
            # RFC 6386, 9.1: the show_frame bit of the frame tag; a hidden frame only serves others.
            if is_vp8 and not bytes(packet)[0] & 0x10:
                continue
            frames.setdefault(pts, (packet.is_keyframe, packet.duration or 0))
            if len(frames) > limits.max_source_frames:
                raise MediaLimitError(f"{name} has more than {limits.max_source_frames:,} frames. Cut it.")
    except FFmpegError:
        # What was read up to the damage is usable; the announced length tells that there should be more.
        pass
    if not frames:
        raise MediaDecodeError(f"{name} holds no frame: the file is damaged or cut off. Copy or upload it again.")
    order = sorted(frames)
    return np.array(order, np.int64), np.array([frames[pts][0] for pts in order]), frames[order[-1]][1]


def _frame_rate(times: np.ndarray, declared: float) -> tuple[float, bool]:
    """Frames a second, and whether it is constant: by the declared rate if the times agree, else as measured."""
    if len(times) == 1 or times[-1] == 0:
        return declared or 1.0, True
    measured = (len(times) - 1) / float(times[-1])
    for fps in (declared, measured):
        if fps > 0 and np.abs(times * fps - np.arange(len(times))).max() < 0.5:
            return fps, True
    return measured, False


def _cut_off_warning(
    name: str, num_frames: int, announced_frames: int, duration_s: float, announced_s: float
) -> tuple[str, ...]:
    if announced_frames > num_frames:
        return (f"{name} seems to be cut off: {num_frames} of its {announced_frames} frames could be read.",)
    if announced_s > duration_s * 1.1 + 1:
        return (f"{name} seems to be cut off: it announces {announced_s:.1f} s, its frames end at {duration_s:.1f} s.",)
    return ()
