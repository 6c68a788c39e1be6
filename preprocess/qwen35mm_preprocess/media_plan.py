"""The media plan, made once when a message is sent and stored with it, and the prepared medium."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, get_args

import numpy as np

from qwen35mm_preprocess.errors import MediaPlanError
from qwen35mm_preprocess.patches import Patches
from qwen35mm_preprocess.say import Said, Saying, is_said
from qwen35mm_preprocess.types import ColorMode, GridTHW, MediaKind, Size

# <|vision_start|> and <|vision_end|> around every span.
NUM_MARKS = 2


def timestamp_text(time_s: float) -> str:
    """The text before a temporal patch of a video, as in transformers' Qwen3VLProcessor."""
    return f"<{time_s:.1f} seconds>"


def patch_timestamps(times_s: Sequence[float], temporal_patch_size: int) -> tuple[float, ...]:
    """One time per temporal patch: the mean of its first and last frame's times.

    The last frame fills up the last patch. Equal to `_calculate_timestamps` of transformers' Qwen3VLProcessor.
    """
    padded = list(times_s) + [times_s[-1]] * (-len(times_s) % temporal_patch_size)
    firsts, lasts = padded[::temporal_patch_size], padded[temporal_patch_size - 1 :: temporal_patch_size]
    return tuple((first + last) / 2 for first, last in zip(firsts, lasts, strict=True))


def num_prompt_tokens(num_tokens: int, timestamps_s: Sequence[float] | None = None) -> int:
    """Upper bound on tokens: placeholders, their marks and, for a video, the timestamps of its temporal patches."""
    if timestamps_s is None:
        return num_tokens + NUM_MARKS
    # These texts have at most one token a character.
    return num_tokens + sum(NUM_MARKS + len(timestamp_text(time)) for time in timestamps_s)


@dataclass(frozen=True)
class MediaPlan:
    """One medium's frames, size and cost. Later changes of settings must not change any of it.

    source_size, size   (height, width) in pixels, upright, in the file and after the resize
    grid_thw            patches after the resize
    num_tokens          placeholder tokens
    num_prompt_tokens   upper bound on tokens with the vision marks and the timestamps (one token a character)
    cache_bytes         KV bytes of `num_prompt_tokens` in the model that the plan was made for
    processing          fingerprint of the checkpoint's processing
    source_frames       a video: pictures in the file
    duration_s          a video: seconds
    frame_indices       a video: the frames to use, by presentation order; [n]
    frame_times_s       their presentation times, from the first frame of the file; [n]
    timestamps_s        of each temporal patch: the mean of its first and last frame's time; [grid_thw.t]
    similar_difference  a video not yet prepared: drop temporal patches that differ by less (see `MediaBudget`)
    similar_indices     a prepared video: the frames dropped as similar, by presentation order
    notes               what was reduced or left out, and why: values of `say`
    digest              hex SHA-256 of the final pixels; None until prepared
    unit_digests        one per span in the prompt: an image, or a temporal patch of a video
    color               how its colours are read; the default is that of plans from before there was a choice
    """

    # For programs that store plans as JSON with pydantic: strict types and no dropped keys.
    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid", "allow_inf_nan": False}

    kind: MediaKind
    source_size: Size
    size: Size
    grid_thw: GridTHW
    num_tokens: int
    num_prompt_tokens: int
    cache_bytes: int
    processing: str
    source_frames: int | None = None
    duration_s: float | None = None
    frame_indices: tuple[int, ...] | None = None
    frame_times_s: tuple[float, ...] | None = None
    timestamps_s: tuple[float, ...] | None = None
    similar_difference: float | None = None
    notes: tuple[str | dict[str, Any], ...] = ()
    digest: str | None = None
    unit_digests: tuple[str, ...] | None = None
    similar_indices: tuple[int, ...] = ()
    color: ColorMode = "checkpoint"

    def __post_init__(self) -> None:
        if self.kind not in ("image", "video"):
            raise MediaPlanError(f"A media plan is of kind image or video, not {self.kind!r}.")
        require_plan(self.color in get_args(ColorMode), "colours of another kind")
        require_plan(min(self.grid_thw) > 0 and min(self.size) > 0 and self.num_tokens > 0, "a size of zero")
        require_plan(min(self.num_prompt_tokens, self.cache_bytes) >= 0, "a cost below zero")
        if self.kind == "image":
            require_plan(self.grid_thw.t == 1, "an image of several temporal patches")
        else:
            indices, times, timestamps = self.frame_indices, self.frame_times_s, self.timestamps_s
            if indices is None or times is None or timestamps is None:
                raise MediaPlanError("The media plan is damaged: a video without frames. Make a new plan.")
            require_plan(0 < len(indices) == len(times), "frames and times that don't match")
            require_plan(indices[0] >= 0, "a frame before the first")
            require_plan(len(timestamps) == self.grid_thw.t, "timestamps and temporal patches that don't match")
            require_plan(all(a < b for a, b in pairwise(indices)), "frames out of order")
            dropped = self.similar_indices
            require_plan(all(a < b for a, b in pairwise(dropped)), "dropped frames out of order")
            require_plan(set(dropped).isdisjoint(indices), "frames that are used and dropped")
        require_plan(all(map(is_said, self.notes)), "notes of another form")
        # Notes from JSON become `Saying` again, with an English `str` and a hash.
        notes = tuple(Saying(note) if isinstance(note, dict) else note for note in self.notes)
        object.__setattr__(self, "notes", notes)
        units = None if self.unit_digests is None else len(self.unit_digests)
        require_plan(units == (None if self.digest is None else self.grid_thw.t), "digests and spans that don't match")

    def unpinned(self) -> MediaPlan:
        """The same plan without digests: `prepare` then accepts any content that fits."""
        return replace(self, digest=None, unit_digests=None)

    def with_frames(
        self, frame_indices: Sequence[int], temporal_patch_size: int, notes: Sequence[str | dict[str, Any]] = ()
    ) -> MediaPlan:
        """A video's plan reduced to these frames, with its costs recomputed and `notes` added."""
        assert self.frame_indices is not None
        assert self.frame_times_s is not None
        times_of = dict(zip(self.frame_indices, self.frame_times_s, strict=True))
        times = tuple(times_of[index] for index in frame_indices)
        timestamps = patch_timestamps(times, temporal_patch_size)
        num_tokens = self.num_tokens // self.grid_thw.t * len(timestamps)
        num_in_prompt = num_prompt_tokens(num_tokens, timestamps)
        return replace(
            self,
            grid_thw=self.grid_thw._replace(t=len(timestamps)),
            num_tokens=num_tokens,
            num_prompt_tokens=num_in_prompt,
            cache_bytes=self.cache_bytes // self.num_prompt_tokens * num_in_prompt,
            frame_indices=tuple(frame_indices),
            frame_times_s=times,
            timestamps_s=timestamps,
            notes=(*self.notes, *notes),
        )


@dataclass(frozen=True, eq=False)
class PreparedMedia:
    """A medium ready for the vision tower.

    plan      the plan with its digests, without unreadable frames and frames dropped as similar
    patches   grid_thw.num_patches rows; the patches of a merge block are adjacent
    warnings  problems that did not stop the preparation, as messages for the user
    """

    plan: MediaPlan
    patches: Patches
    warnings: tuple[Said, ...] = ()

    @property
    def pixel_values(self) -> np.ndarray:
        """float32 [grid_thw.num_patches, 3 * temporal_patch_size * patch_size**2], computed at each call.

        Columns are ordered by channel, frame, row, column.
        """
        return self.patches.values()


def require_plan(ok: bool, what: str) -> None:
    """Raises MediaPlanError with `what` unless `ok`."""
    if not ok:
        raise MediaPlanError(f"The media plan is damaged: {what}. Make a new plan.")
