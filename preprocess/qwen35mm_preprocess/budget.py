"""Plans a medium before its pixels are decoded: which frames, what size, how many tokens and cache bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qwen35mm_preprocess.errors import MediaBudgetError
from qwen35mm_preprocess.image import probe_image
from qwen35mm_preprocess.media import MediaSource, describe
from qwen35mm_preprocess.media_plan import MediaPlan, timestamp_text
from qwen35mm_preprocess.sizes import image_size, shrink_to_tokens, video_size
from qwen35mm_preprocess.types import (
    GridTHW,
    ImageProcessing,
    MediaBudget,
    MediaLimits,
    Processing,
    Size,
    VideoProcessing,
)
from qwen35mm_preprocess.video_probe import (
    VideoInfo,
    count_frames,
    frame_times,
    patch_timestamps,
    probe_video,
    sample_frames,
)

# <|vision_start|> and <|vision_end|> around every span.
_MARKS = 2


def plan_image(
    source: MediaSource,
    processing: ImageProcessing,
    budget: MediaBudget,
    limits: MediaLimits,
    cache_bytes_per_token: int,
) -> MediaPlan:
    """Decides from an image's header what will be made of it.

    Raises:
        MediaBudgetError: it passes its token budget even at the smallest size.
        MediaError: it can't be read, is of another kind or format, or is over a limit.
    """
    info = probe_image(source, limits)
    name = describe(source)
    size = image_size(info.size, processing)
    notes = []
    if info.num_pictures > 1:
        notes.append(f"{name} holds {info.num_pictures} pictures; the first is used.")
    if budget.max_image_tokens is not None:
        max_tokens = budget.max_image_tokens - _MARKS
        if max_tokens < 1:
            raise MediaBudgetError(
                f"An image takes at least {_MARKS + 1} tokens; the limit is {budget.max_image_tokens}. Raise it."
            )
        wanted, size = size, shrink_to_tokens(size, info.size, processing.factor, max_tokens)
        if size != wanted:
            notes.append(_smaller_note(wanted, size, budget.max_image_tokens))
    grid = GridTHW(1, size[0] // processing.patch_size, size[1] // processing.patch_size)
    num_tokens = grid.num_tokens(processing.merge_size)
    return MediaPlan(
        kind="image",
        source_size=info.size,
        size=size,
        grid_thw=grid,
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens + _MARKS,
        cache_bytes=(num_tokens + _MARKS) * cache_bytes_per_token,
        processing=processing.fingerprint(),
        notes=tuple(notes),
    )


def plan_video(
    source: MediaSource,
    processing: VideoProcessing,
    budget: MediaBudget,
    limits: MediaLimits,
    cache_bytes_per_token: int,
) -> MediaPlan:
    """Decides from a video's header and packet times what will be made of it.

    A video is sampled at the wanted fps. If that passes `max_video_tokens`, it gets fewer frames, of the size that they
    would have had, down to the checkpoint's `min_frames`; if that isn't enough, smaller frames.

    Raises:
        MediaBudgetError: it passes its token budget even with the fewest and smallest frames.
        MediaError: it can't be read, is of another kind or format, or is over a limit.
    """
    info = probe_video(source, limits)
    notes = list(info.warnings)
    fps = budget.fps or processing.fps
    max_frames = budget.max_frames or processing.max_frames
    min_frames = min(processing.min_frames, max_frames)
    count = count_frames(info, fps, min_frames, max_frames)
    if count == max_frames < count_frames(info, fps, min_frames, info.num_frames):
        notes.append(f"{count} frames are used, not {fps:g} a second: at most {max_frames} are taken from a video.")
    indices = sample_frames(info, count, min_frames)
    size = video_size(info.size, len(indices), processing)
    if budget.max_video_tokens is not None:
        indices, size, reductions = _fit_video(info, indices, size, min_frames, processing, budget.max_video_tokens)
        notes += reductions
    times = frame_times(info, indices)
    timestamps = patch_timestamps(times, processing.temporal_patch_size)
    grid = GridTHW(len(timestamps), size[0] // processing.patch_size, size[1] // processing.patch_size)
    num_tokens = grid.num_tokens(processing.merge_size)
    num_prompt_tokens = _video_prompt_tokens(num_tokens // grid.t, timestamps)
    return MediaPlan(
        kind="video",
        source_size=info.size,
        size=size,
        grid_thw=grid,
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        cache_bytes=num_prompt_tokens * cache_bytes_per_token,
        processing=processing.fingerprint(),
        source_frames=info.num_frames,
        duration_s=info.duration_s,
        frame_indices=indices,
        frame_times_s=times,
        timestamps_s=timestamps,
        similar_difference=budget.similar_difference if budget.drop_similar else None,
        notes=tuple(notes),
    )


def with_frames(
    plan: MediaPlan, frame_indices: Sequence[int], temporal_patch_size: int, notes: Sequence[str] = ()
) -> MediaPlan:
    """A video's plan reduced to some of its frames, with its costs counted again and `notes` added."""
    assert plan.frame_indices is not None
    assert plan.frame_times_s is not None
    times_of = dict(zip(plan.frame_indices, plan.frame_times_s, strict=True))
    timestamps = patch_timestamps([times_of[index] for index in frame_indices], temporal_patch_size)
    tokens_per_patch = plan.num_tokens // plan.grid_thw.t
    num_prompt_tokens = _video_prompt_tokens(tokens_per_patch, timestamps)
    return replace(
        plan,
        grid_thw=plan.grid_thw._replace(t=len(timestamps)),
        num_tokens=tokens_per_patch * len(timestamps),
        num_prompt_tokens=num_prompt_tokens,
        cache_bytes=plan.cache_bytes // plan.num_prompt_tokens * num_prompt_tokens,
        frame_indices=tuple(frame_indices),
        frame_times_s=tuple(times_of[index] for index in frame_indices),
        timestamps_s=timestamps,
        notes=(*plan.notes, *notes),
    )


def _fit_video(
    info: VideoInfo,
    indices: tuple[int, ...],
    size: Size,
    min_frames: int,
    processing: VideoProcessing,
    max_tokens: int,
) -> tuple[tuple[int, ...], Size, list[str]]:
    """Fewer frames, then smaller ones, until the prompt's share is at most `max_tokens`; with notes on both."""
    patch, notes = processing.temporal_patch_size, []
    overhead = _MARKS + len(timestamp_text(float(info.times_s[-1])))
    patches = -(-len(indices) // patch)
    affordable = max_tokens // (_tokens(size, processing) + overhead)
    if affordable >= patches:
        return indices, size, notes
    least = -(-min(min_frames, len(indices)) // patch)
    count = min(max(affordable, least) * patch, len(indices))
    if count < len(indices):
        fewer = sample_frames(info, count, min_frames)
        notes.append(f"{len(fewer)} frames are used, not {len(indices)}, to stay within {max_tokens:,} tokens.")
        indices = fewer
    if affordable < least:
        tokens_per_patch = max_tokens // least - overhead
        if tokens_per_patch < 1:
            raise MediaBudgetError(
                f"A video of {min(min_frames, len(indices))} frames takes at least {least * (overhead + 1)} tokens; "
                f"the limit is {max_tokens}. Raise it."
            )
        smaller = shrink_to_tokens(size, info.size, processing.factor, tokens_per_patch)
        notes.append(_smaller_note(size, smaller, max_tokens))
        size = smaller
    return indices, size, notes


def _tokens(size: Size, processing: Processing) -> int:
    """Placeholder tokens of one image or one temporal patch."""
    return size[0] * size[1] // processing.factor**2


def _video_prompt_tokens(tokens_per_patch: int, timestamps: Sequence[float]) -> int:
    # A tokenizer makes at most one token of a character of these texts.
    return sum(tokens_per_patch + _MARKS + len(timestamp_text(time)) for time in timestamps)


def _smaller_note(wanted: Size, size: Size, max_tokens: int) -> str:
    return (
        f"Reduced to {size[1]} x {size[0]} pixels, not {wanted[1]} x {wanted[0]}, to stay within {max_tokens:,} tokens."
    )
