"""Videos: decodes, resizes and patchifies the planned frames one at a time, so that memory stays bounded.

Seeks to a frame if that is cheaper than decoding everything before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
from av.error import FFmpegError
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace, VideoReformatter
from PIL import Image

from qwen35mm_preprocess.animation import animation_frames, is_animation
from qwen35mm_preprocess.color import Encoding, convert
from qwen35mm_preprocess.errors import MediaChangedError, MediaDecodeError
from qwen35mm_preprocess.image import load_image
from qwen35mm_preprocess.media import MediaSource, describe
from qwen35mm_preprocess.media_plan import MediaPlan
from qwen35mm_preprocess.patches import Patches, empty_patches, unit_digest, write_frame
from qwen35mm_preprocess.rgb import to_rgb
from qwen35mm_preprocess.say import Said, Saying, say
from qwen35mm_preprocess.types import ColorMode, MediaLimits, Progress, VideoProcessing
from qwen35mm_preprocess.video_container import (
    OpenVideo,
    decoder_with_alpha,
    open_video,
    packets_of,
    pixel_aspect,
    shown_width,
    transpose_of,
)
from qwen35mm_preprocess.video_probe import VideoInfo, probe_video

# The frames of one temporal patch: (index, uint8 [H, W, 3]).
_Unit = list[tuple[int, np.ndarray]]


def video_patches(
    source: MediaSource,
    plan: MediaPlan,
    processing: VideoProcessing,
    limits: MediaLimits,
    progress: Progress | None = None,
) -> tuple[MediaPlan, Patches, tuple[str, ...], tuple[Said, ...]]:
    """Decodes, resizes and patchifies the frames of a plan: (plan, patches, unit digests, warnings).

    The returned plan lacks frames that could not be decoded and temporal patches dropped as similar.

    Raises:
        MediaChangedError: the plan was made for another file.
        MediaDecodeError: none of the frames could be decoded.
        MediaError: the source can't be opened.
    """
    info = probe_video(source, limits)
    check_same_video(info, plan, source)
    frames = _resized_frames(source, info, plan, plan.frame_indices or (), limits, progress)
    temporal = processing.temporal_patch_size
    units = iter(lambda: list(itertools.islice(frames, temporal)), [])
    patches = empty_patches(plan.grid_thw, processing)
    used: list[int] = []
    similar: list[int] = []
    digests: list[str] = []
    for unit, keep in _mark_similar(units, processing.factor, plan.similar_difference):
        if not keep:
            similar += [index for index, _ in unit]
            continue
        # The last frame fills up the last temporal patch.
        pictures = [unit[min(slot, len(unit) - 1)][1] for slot in range(temporal)]
        for slot, picture in enumerate(pictures):
            write_frame(picture, patches, plan.grid_thw, processing, len(digests), slot)
        used += [index for index, _ in unit]
        digests.append(unit_digest(processing, plan.size, pictures))
    if not used:
        raise MediaDecodeError(
            say(
                "{name} could not be decoded: none of its frames is readable. Copy or upload it again.",
                name=describe(source),
            )
        )
    num_patches = len(digests) * plan.grid_thw.h * plan.grid_thw.w
    if num_patches < len(patches):
        # A copy frees the rest.
        patches = replace(patches, pixels=patches.pixels[:num_patches].copy())
    notes, warnings = [], list(info.warnings)
    num_planned = len(plan.frame_indices or ())
    if num_unreadable := num_planned - len(similar) - len(used):
        notes.append(lost_note(num_unreadable, num_planned))
        warnings.append(notes[-1])
    if similar:
        words = say(
            "{n} {n|frame is left out: it shows|frames are left out: they show} the same as before.", n=len(similar)
        )
        notes.append(words)
    final = replace(plan.with_frames(used, temporal, notes), similar_indices=tuple(similar))
    return final, patches, tuple(digests), tuple(warnings)


class SampledFrame(NamedTuple):
    """A planned frame: index, presentation time, the model's input (uint8 [H, W, 3]), whether it counts as similar."""

    index: int
    time_s: float
    pixels: np.ndarray
    is_similar: bool


def sampled_frames(
    source: MediaSource,
    plan: MediaPlan,
    processing: VideoProcessing,
    limits: MediaLimits,
    difference: float,
    progress: Progress | None = None,
) -> Iterator[SampledFrame]:
    """Yields the plan's decodable frames, including those dropped as similar.

    Args:
        difference: the difference from which on a frame isn't similar (`MediaBudget.similar_difference`).

    Raises:
        MediaChangedError: the plan was made for another file.
        MediaError: the source can't be opened.
    """
    info = probe_video(source, limits)
    check_same_video(info, plan, source)
    indices = sorted((*(plan.frame_indices or ()), *plan.similar_indices))
    frames = _resized_frames(source, info, plan, indices, limits, progress)
    units = iter(lambda: list(itertools.islice(frames, processing.temporal_patch_size)), [])
    for unit, keep in _mark_similar(units, processing.factor, difference):
        for index, pixels in unit:
            yield SampledFrame(index, float(info.times_s[index]), pixels, not keep)


def check_same_video(info: VideoInfo, plan: MediaPlan, source: MediaSource) -> None:
    """Raises MediaChangedError if the plan was made for another file."""
    assert plan.frame_indices is not None
    assert plan.frame_times_s is not None
    same = info.size == plan.source_size and info.num_frames == plan.source_frames
    # To the millisecond: versions of libav may round the same file's rate differently.
    if not same or not np.allclose(info.frame_times(plan.frame_indices), plan.frame_times_s, rtol=0, atol=1e-3):
        raise MediaChangedError(
            say(
                "{name} is not the video that was planned: {n} frames of {w} x {h} pixels were expected, {m} of "
                "{width} x {height} came, or their times differ. Bring the old file back, or send the new one in a "
                "new message.",
                name=describe(source),
                n=plan.source_frames or 0,
                w=str(plan.source_size[1]),
                h=str(plan.source_size[0]),
                m=info.num_frames,
                width=str(info.size[1]),
                height=str(info.size[0]),
            )
        )


def _resized_frames(
    source: MediaSource,
    info: VideoInfo,
    plan: MediaPlan,
    indices: Sequence[int],
    limits: MediaLimits,
    progress: Progress | None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the decodable frames at the planned size: (index, uint8 [H, W, 3])."""
    height, width = plan.size
    for done, (index, frame) in enumerate(decode_frames(source, info, indices, limits, plan.color), start=1):
        yield index, np.asarray(frame.resize((width, height), Image.Resampling.BICUBIC))
        if progress is not None:
            progress(done, len(indices))


def _mark_similar(units: Iterable[_Unit], cell: int, difference: float | None) -> Iterator[tuple[_Unit, bool]]:
    """Yields (unit, keep). A unit is kept if it shows something new, or is the first or the last."""
    shown: np.ndarray | None = None
    held: _Unit | None = None
    for unit in units:
        if held is not None:
            yield held, False
            held = None
        before = shown
        if before is None or difference is None or any(_differs(before, frame, cell, difference) for _, frame in unit):
            shown = unit[-1][1]
            yield unit, True
        else:
            held = unit
    if held is not None:
        yield held, True


def _differs(before: np.ndarray, after: np.ndarray, cell: int, difference: float) -> bool:
    """Whether any cell's mean absolute difference reaches `difference`. By cell, so that small movements count."""
    height, width, _ = before.shape
    absolute = np.abs(before.astype(np.int16) - after)
    cells = absolute.reshape(height // cell, cell, width // cell, cell * 3)
    return bool(cells.mean(axis=(1, 3)).max() >= difference)


# A seek flushes the decoder and refills its pipeline. It pays off only if it skips this many frames.
_MIN_FRAMES_SKIPPED = 16


def decode_frames(
    source: MediaSource, info: VideoInfo, indices: Sequence[int], limits: MediaLimits, color: ColorMode = "srgb"
) -> Iterator[tuple[int, Image.Image]]:
    """Yields (index, frame) for `indices` (rising, in presentation order), upright and in mode RGB, one at a time.

    Finds frames by presentation time. Skips frames that can't be decoded.

    Raises:
        MediaError: the source can't be opened.
    """
    if info.is_animation:
        yield from animation_frames(source, indices, limits, color)
        return
    remaining = list(indices)
    if info.can_seek:
        for index, frame in _decode(source, info, remaining.copy(), limits, color, seek=True):
            if index != remaining[0]:
                break
            yield remaining.pop(0), frame
    # If a seek lost a frame (open groups of pictures, a wrong index), decode from the start.
    if remaining:
        yield from _decode(source, info, remaining, limits, color, seek=False)


def small_frames(
    source: MediaSource, info: VideoInfo, side: int, limits: MediaLimits
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (index, uint8 [side * side * 3]) for every decodable frame in presentation order, not turned upright.

    For comparisons: skips what a decoder does for beauty, and keeps the video's own colours.

    Raises:
        MediaError: the source can't be opened.
    """
    if info.is_animation:
        for index, image in animation_frames(source, range(info.num_frames), limits, "checkpoint"):
            yield index, np.asarray(image.resize((side, side), Image.Resampling.BOX)).reshape(-1)
        return
    wanted = {int(pts): index for index, pts in enumerate(info.pts)}
    with open_video(source, limits) as video:
        video.stream.thread_type = "AUTO"
        video.stream.codec_context.options = {**video.stream.codec_context.options, "skip_loop_filter": "all"}
        small = VideoReformatter()
        for index, frame in _decode_run(video, wanted, _decoder_of(None)):
            pixels = small.reformat(frame, side, side, "rgb24", interpolation="AREA").to_ndarray()
            yield index, pixels.reshape(-1)


def first_frame(source: MediaSource, limits: MediaLimits, color: ColorMode = "srgb") -> Image.Image:
    """The first decodable frame, upright and in mode RGB. Reads nothing after it.

    Raises:
        MediaError: the file is not a supported video, is over a limit or has no decodable frame.
    """
    if is_animation(source, limits):
        return load_image(source, limits, color)
    with open_video(source, limits) as video:
        try:
            decoder = decoder_with_alpha(video.stream, limits) if color == "srgb" else None
            for frame in itertools.chain.from_iterable(map(_decoder_of(decoder), video.container.demux(video.stream))):
                return _upright(_frame_to_rgb(frame, color), pixel_aspect(video.stream), transpose_of(frame))
        # PyAV raises ValueError if the decoder can't be opened, for example for too many pixels.
        except (FFmpegError, ValueError):
            pass
    raise MediaDecodeError(
        say("{name} has no frame that can be decoded. Copy or upload it again.", name=describe(source))
    )


def seek_runs(is_key: np.ndarray, indices: Sequence[int]) -> list[tuple[int | None, list[int]]]:
    """Splits rising frame indices into runs: (keyframe to seek to, or None to continue decoding; indices)."""
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
    source: MediaSource, info: VideoInfo, indices: list[int], limits: MediaLimits, color: ColorMode, *, seek: bool
) -> Iterator[tuple[int, Image.Image]]:
    with open_video(source, limits) as video:
        video.stream.thread_type = "AUTO"
        for key, run in seek_runs(info.is_key, indices) if seek else [(None, indices)]:
            if key is not None:
                try:
                    video.container.seek(int(info.pts[key]), stream=video.stream)
                except FFmpegError:
                    return
            wanted = {int(info.pts[index]): index for index in run}
            decoder = decoder_with_alpha(video.stream, limits) if color == "srgb" else None
            for index, frame in _decode_run(video, wanted, _decoder_of(decoder)):
                yield index, _upright(_frame_to_rgb(frame, color), info.pixel_aspect, info.transpose)


def _upright(image: Image.Image, aspect: float, transpose: Image.Transpose | None) -> Image.Image:
    """The image with square pixels, rotated as the container says."""
    if (width := shown_width(image.width, aspect)) != image.width:
        image = image.resize((width, image.height), Image.Resampling.BICUBIC)
    return image if transpose is None else image.transpose(transpose)


def _decoder_of(decoder: VideoCodecContext | None) -> Callable[[Packet], list[VideoFrame]]:
    """A function that decodes a packet: with the stream's decoder, or with `decoder`, which an empty packet drains."""
    if decoder is None:
        return lambda packet: cast(list[VideoFrame], packet.decode())
    return lambda packet: decoder.decode(packet if packet.size else None)


def _decode_run(
    video: OpenVideo, wanted: dict[int, int], decode: Callable[[Packet], list[VideoFrame]]
) -> Iterator[tuple[int, VideoFrame]]:
    """Decodes from the container's position to the last frame in `wanted` (presentation time to index)."""
    last, missing = max(wanted), dict(wanted)
    try:
        for packet in packets_of(video):
            try:
                frames = decode(packet)
            # PyAV raises ValueError if the decoder can't be opened, for example for too many pixels.
            except (FFmpegError, ValueError):
                continue
            for frame in frames:
                pts = frame.pts if frame.pts is not None else frame.dts
                # A damaged file may repeat a time.
                if pts in missing and not frame.is_corrupt:
                    yield missing.pop(pts), frame
                if pts is not None and pts >= last:
                    return
    except FFmpegError:
        return


# Video without a declared matrix is BT.709 from this size on and BT.601 below, as in players.
_HD_WIDTH, _HD_HEIGHT = 1280, 576
_UNSPECIFIED = 2
# Combing: how much more lines of different fields differ than lines of one field (of 255), in what share of a frame.
_COMB, _COMBED_SHARE = 60, 0.002


def _frame_to_rgb(frame: VideoFrame, color: ColorMode) -> Image.Image:
    matrix = None
    if color == "srgb":
        encoding = Encoding.of_code_points(frame.color_primaries, frame.color_trc)
        if frame.colorspace == _UNSPECIFIED and (frame.width >= _HD_WIDTH or frame.height > _HD_HEIGHT):
            matrix = Colorspace.ITU709
        if encoding is not None:
            wide = frame.format.components[0].bits > 8
            values = frame.to_ndarray(format="rgb48le" if wide else "rgb24", src_colorspace=matrix)
            return Image.fromarray(convert(values, encoding))
    if any(component.is_alpha for component in frame.format.components):
        return to_rgb(Image.fromarray(frame.to_ndarray(format="rgba", src_colorspace=matrix)), color)
    values = frame.to_ndarray(format="rgb24", src_colorspace=matrix)
    if color == "srgb" and frame.interlaced_frame and _is_combed(values):
        # The two fields are half a frame apart in time: use the first and interpolate its missing lines.
        field = Image.fromarray(np.ascontiguousarray(values[::2]))
        return field.resize((frame.width, frame.height), Image.Resampling.BICUBIC)
    return Image.fromarray(values)


def _is_combed(values: np.ndarray) -> bool:
    """Whether the two fields of uint8 [H, W, 3] show different moments. Many files marked as interlaced don't."""
    green = values[: values.shape[0] // 4 * 4, :, 1].astype(np.int16)
    even, odd, next_even, next_odd = (green[start::4] for start in range(4))
    across = np.abs(even - odd) + np.abs(odd - next_even) + np.abs(next_even - next_odd)
    within = np.abs(even - next_even) + np.abs(odd - next_odd)
    return bool(np.mean(across > within * 2 + _COMB) > _COMBED_SHARE)


def lost_note(num_lost: int, num_planned: int) -> Saying:
    """The note on frames that could not be decoded."""
    return say("{n} of {m} frames could not be decoded and {n|is|are} left out.", n=num_lost, m=num_planned)
