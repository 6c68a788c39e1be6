"""Decodes chosen frames of a video, by seeking where that is cheaper than decoding everything before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from qwen35mm_preprocess.image import to_rgb
from qwen35mm_preprocess.media import MediaSource
from qwen35mm_preprocess.types import MediaLimits
from qwen35mm_preprocess.video_container import open_video
from qwen35mm_preprocess.video_probe import VideoInfo

# A seek flushes the decoder and refills its pipeline: worth it only if at least this many frames are skipped.
_MIN_FRAMES_SKIPPED = 16


def decode_frames(
    source: MediaSource, info: VideoInfo, indices: Sequence[int], limits: MediaLimits
) -> Iterator[tuple[int, Image.Image]]:
    """Yields (index, frame) for `indices` (rising, in presentation order), upright and in mode RGB, one at a time.

    Frames are found by their presentation time. Those that can't be decoded are left out.

    Raises:
        MediaError: the source can't be opened.
    """
    remaining = list(indices)
    if info.can_seek:
        for index, frame in _decode(source, info, remaining.copy(), limits, seek=True):
            if index != remaining[0]:
                break
            yield remaining.pop(0), frame
    # Also where a seek lost a frame (open groups of pictures, a wrong index): then from the start.
    if remaining:
        yield from _decode(source, info, remaining, limits, seek=False)


def seek_runs(is_key: np.ndarray, indices: Sequence[int]) -> list[tuple[int | None, list[int]]]:
    """Splits rising frame indices into runs to decode: (keyframe to seek to, or None to just go on; indices)."""
    keys = np.flatnonzero(is_key)
    runs: list[tuple[int | None, list[int]]] = [(None, [])]
    position = 0
    for index in indices:
        before = int(np.searchsorted(keys, index, side="right")) - 1
        key = int(keys[before]) if before >= 0 else 0
        if key - position >= _MIN_FRAMES_SKIPPED:
            runs.append((key, []))
        runs[-1][1].append(index)
        position = index + 1
    return [run for run in runs if run[1]]


def _decode(
    source: MediaSource, info: VideoInfo, indices: list[int], limits: MediaLimits, *, seek: bool
) -> Iterator[tuple[int, Image.Image]]:
    with open_video(source, limits) as video:
        for key, run in seek_runs(info.is_key, indices) if seek else [(None, indices)]:
            if key is not None:
                try:
                    video.container.seek(int(info.pts[key]), stream=video.stream)
                except FFmpegError:
                    return
            wanted = {int(info.pts[index]): index for index in run}
            for index, frame in _decode_run(video.container, video.stream, wanted):
                image = _frame_to_rgb(frame)
                yield index, image if info.transpose is None else image.transpose(info.transpose)


def _decode_run(
    container: InputContainer, stream: VideoStream, wanted: dict[int, int]
) -> Iterator[tuple[int, VideoFrame]]:
    """Decodes from the container's position to the last frame in `wanted`, presentation time to index."""
    last = max(wanted)
    try:
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            # PyAV's own ValueError: the decoder could not be opened at all, as for too many pixels.
            except (FFmpegError, ValueError):
                continue
            for frame in frames:
                pts = frame.pts if frame.pts is not None else frame.dts
                if pts in wanted and not frame.is_corrupt:
                    yield wanted[pts], frame
                if pts is not None and pts >= last:
                    return
    except FFmpegError:
        return


def _frame_to_rgb(frame: VideoFrame) -> Image.Image:
    if any(component.is_alpha for component in frame.format.components):
        return to_rgb(Image.fromarray(frame.to_ndarray(format="rgba")))
    return Image.fromarray(frame.to_ndarray(format="rgb24"))
