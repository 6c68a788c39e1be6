"""The one door to planning and preparing media: a checkpoint's processing with a budget and limits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qwen35mm_preprocess.errors import (
    MediaBudgetError,
    MediaChangedError,
    MediaError,
    MediaLimitError,
    MediaPlanError,
)
from qwen35mm_preprocess.image import check_source_size, image_patches, probe_image
from qwen35mm_preprocess.media import MediaSource, describe, detect_kind
from qwen35mm_preprocess.media_plan import (
    NUM_MARKS,
    MediaPlan,
    PreparedMedia,
    num_prompt_tokens,
    patch_timestamps,
    require_plan,
    timestamp_text,
)
from qwen35mm_preprocess.patches import media_digest
from qwen35mm_preprocess.say import Said, Saying, decimal, say
from qwen35mm_preprocess.sizes import image_size, shrink_to_tokens, video_size
from qwen35mm_preprocess.types import (
    GridTHW,
    ImageProcessing,
    MediaBudget,
    MediaKind,
    MediaLimits,
    Progress,
    Size,
    VideoClip,
    VideoProcessing,
    read_processing,
)
from qwen35mm_preprocess.video import video_patches
from qwen35mm_preprocess.video_probe import VideoInfo, count_frames, probe_video, sample_frames


@dataclass(frozen=True)
class MediaProcessor:
    """A checkpoint's processing with a budget and limits: plans media and prepares them.

    `cache_bytes_per_token` is the model's KV bytes for a token; it only feeds `MediaPlan.cache_bytes`. `blind` is the
    name of a model that reads text alone: every medium is refused.
    """

    image_processing: ImageProcessing
    video_processing: VideoProcessing
    budget: MediaBudget = field(default_factory=MediaBudget.for_cpu)
    limits: MediaLimits = field(default_factory=MediaLimits)
    cache_bytes_per_token: int = 0
    blind: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        budget: MediaBudget | None = None,
        limits: MediaLimits | None = None,
        cache_bytes_per_token: int = 0,
    ) -> MediaProcessor:
        """Reads the processing from a checkpoint's folder. Raises MediaConfigError."""
        image_processing, video_processing = read_processing(folder)
        return cls(
            image_processing,
            video_processing,
            budget or MediaBudget.for_cpu(),
            limits or MediaLimits(),
            cache_bytes_per_token,
        )

    def plan(self, source: MediaSource, kind: MediaKind | None = None, clip: VideoClip | None = None) -> MediaPlan:
        """Decides from a medium's header, and a video's packet times, what will be made of it and what that costs.

        A video is sampled at the wanted fps. If that passes its token budget, it gets fewer frames, of the size that
        they would have had, down to the checkpoint's `min_frames`; if that isn't enough, smaller frames.

        Args:
            kind: None looks at the content.
            clip: what to take of a video. Its frames keep the times that they have in the whole of it, as with
                `video_start` and `video_end` in qwen-vl-utils.

        Raises:
            MediaBudgetError: it passes its token budget even at the smallest size and with the fewest frames.
            MediaLimitError: the clip begins after the video's end.
            MediaError: it can't be read, is of another kind or format, or is over a limit.
        """
        self._look()
        if (kind or detect_kind(source, self.limits)) == "image":
            return self._plan_image(source)
        return self._plan_video(source, clip or VideoClip())

    def prepare(
        self,
        source: MediaSource,
        plan: MediaPlan | None = None,
        kind: MediaKind | None = None,
        progress: Progress | None = None,
        clip: VideoClip | None = None,
    ) -> PreparedMedia:
        """Decodes a medium exactly as its plan says, or a new one.

        A plan without a digest comes back with one, and with fewer frames where some were unreadable or, if it asks for
        that, similar. A plan with a digest comes back as it is, with the same pixels as ever, whatever the budget
        and the clip.

        Raises:
            MediaChangedError: the content is not what the plan was made for, by its digest, size or frame times.
            MediaPlanError: the plan was made for another kind, or for a checkpoint with other processing, or can't be
                one of such a medium.
            MediaError: the source can't be read or decoded, or is over a limit.
        """
        if plan is None:
            plan = self.plan(source, kind, clip)
        elif kind is not None and kind != plan.kind:
            raise MediaPlanError(f"The plan of {describe(source)} is for {plan.kind}, not {kind}. Make a new plan.")
        self.check(plan, source)
        final, warnings = plan, ()
        if plan.kind == "image":
            if progress is not None:
                progress(0, 1)
            patches, unit = image_patches(source, plan, self.image_processing, self.limits)
            units: tuple[str, ...] = (unit,)
            if progress is not None:
                progress(1, 1)
        else:
            final, patches, units, warnings = video_patches(source, plan, self.video_processing, self.limits, progress)
        digest = media_digest(units)
        if plan.digest is None:
            final = replace(final, similar_difference=None, digest=digest, unit_digests=units)
        elif digest != plan.digest:
            raise MediaChangedError(
                say(
                    "{name} has changed since its message was sent: its pixels are no longer the same. Bring the old "
                    "file back, or send the new one in a new message.",
                    name=describe(source),
                )
            )
        else:
            final = plan
        return PreparedMedia(final, patches, warnings)

    def kept(self, plan: MediaPlan | None, source: MediaSource) -> MediaPlan | None:
        """The plan by which a medium is read again; None where a new one has to be made.

        One without a digest promises no pixels. If it was made for a server it may be none of this checkpoint's.
        """
        if plan is None or plan.digest is not None:
            return plan
        check_source_size(plan.source_size, describe(source), self.limits)
        is_own = plan.processing == self._processing(plan).fingerprint() and not self._is_larger(plan)
        return plan if is_own else None

    def _processing(self, plan: MediaPlan) -> ImageProcessing | VideoProcessing:
        return self.image_processing if plan.kind == "image" else self.video_processing

    def _is_larger(self, plan: MediaPlan) -> bool:
        """Whether it has more pixels than are made of such a medium."""
        processing, (height, width) = self._processing(plan), plan.size
        if isinstance(processing, ImageProcessing):
            most = image_size(plan.source_size, processing)
            return height > most[0] or width > most[1]
        # Frames keep their size where others are left out, and rounding isn't monotonic: hence not the exact size.
        most = video_size(plan.source_size, len(plan.frame_indices or ()), processing)
        return height * width > 2 * most[0] * most[1]

    def _look(self) -> None:
        """Raises MediaError for a model that can't."""
        if self.blind is not None:
            raise MediaError(
                say(
                    "{name} reads text alone, and no pictures or videos. Choose another model, or leave them out.",
                    name=self.blind,
                )
            )

    def check(self, plan: MediaPlan, source: MediaSource) -> None:
        """Refuses a plan that can't have come from `plan`, whatever the budget was: a record may say anything, and what
        it says is allocated before the medium is read.

        Raises:
            MediaLimitError, MediaDecodeError: its medium would be over a limit.
            MediaPlanError: it is for a checkpoint with other processing, it contradicts itself, or it makes more of its
                medium than is ever made.
        """
        self._look()
        processing = self._processing(plan)
        if plan.processing != processing.fingerprint():
            raise MediaPlanError(
                say(
                    "The plan of {name} was made for a model that processes media in another way. Make a new plan.",
                    name=describe(source),
                )
            )
        check_source_size(plan.source_size, describe(source), self.limits)
        grid, (height, width) = plan.grid_thw, plan.size
        patch, factor = processing.patch_size, processing.factor
        require_plan((grid.h * patch, grid.w * patch) == plan.size, "a grid of another size")
        require_plan(height % factor == 0 == width % factor, "a size between two tokens")
        require_plan(
            plan.num_tokens == grid.num_tokens(processing.merge_size), "another number of tokens than its grid's"
        )
        in_prompt = num_prompt_tokens(plan.num_tokens, plan.timestamps_s)
        require_plan(plan.num_prompt_tokens == in_prompt, "another number of tokens than its prompt's")
        if isinstance(processing, ImageProcessing):
            require_plan(not self._is_larger(plan), "more pixels than are made of such a picture")
            return
        num_frames, num_source = len(plan.frame_indices or ()), plan.source_frames or 0
        num_read = num_frames + len(plan.similar_indices)
        require_plan(num_read <= num_source <= self.limits.max_source_frames, "more frames than the video has")
        require_plan(
            grid.t == -(-num_frames // processing.temporal_patch_size), "another number of frames than its grid's"
        )
        require_plan(not self._is_larger(plan), "more pixels than are made of such a video")

    def _plan_image(self, source: MediaSource) -> MediaPlan:
        processing, limit = self.image_processing, self.budget.max_image_tokens
        info = probe_image(source, self.limits)
        size = image_size(info.size, processing)
        notes = []
        if info.num_pictures > 1:
            notes.append(
                say("{name} holds {n} pictures; the first is used.", name=describe(source), n=info.num_pictures)
            )
        if limit is not None:
            if limit <= NUM_MARKS:
                raise MediaBudgetError(
                    say(
                        "A picture takes at least {n} tokens; the limit is {limit}. Raise it.",
                        n=NUM_MARKS + 1,
                        limit=limit,
                    )
                )
            wanted, size = size, shrink_to_tokens(size, info.size, processing.factor, limit - NUM_MARKS)
            if size != wanted:
                notes.append(_smaller_note(wanted, size, limit))
        return self._planned(processing, size, source_size=info.size, notes=tuple(notes))

    def _plan_video(self, source: MediaSource, clip: VideoClip) -> MediaPlan:
        return self.plan_frames(probe_video(source, self.limits), source, clip)

    def plan_frames(self, info: VideoInfo, source: MediaSource = "a video", clip: VideoClip | None = None) -> MediaPlan:
        """Decides what is made of a video that these are the frames of; `source` is what it is called in messages.

        Raises:
            MediaLimitError, MediaBudgetError: the clip isn't in it, or it fits no budget.
        """
        processing, budget, clip = self.video_processing, self.budget, clip or VideoClip()
        notes = list(info.warnings)
        if clip.start_s >= info.duration_s:
            raise MediaLimitError(
                say(
                    "{name} is {s} seconds long; the part from {start} seconds on isn't in it. Choose another part.",
                    name=describe(source),
                    s=decimal(info.duration_s, 1),
                    start=decimal(clip.start_s, 1),
                )
            )
        frames = info.within(clip.start_s, clip.end_s)
        part = info.cut(frames)
        fps = budget.fps or processing.fps
        max_frames = budget.max_frames or processing.max_frames
        min_frames = min(processing.min_frames, max_frames, clip.num_frames or max_frames)
        wanted = clip.num_frames or count_frames(part, fps, min_frames, part.num_frames)
        count = min(wanted, max_frames, part.num_frames)
        if count == max_frames < min(wanted, part.num_frames):
            rate = say("{n} a second", n=decimal(fps)) if clip.num_frames is None else wanted
            words = say(
                "{n} {n|frame is|frames are} used, not {rate}: at most {most} are taken from a video.",
                n=count,
                rate=rate,
                most=max_frames,
            )
            notes.append(words)
        chosen = sample_frames(part, count, min_frames)
        size = video_size(info.size, len(chosen), processing)
        if budget.max_video_tokens is not None:
            chosen, size, reductions = _fit_video(part, chosen, size, min_frames, processing, budget.max_video_tokens)
            notes += reductions
        indices = tuple(frames.start + index for index in chosen)
        times = info.frame_times(indices)
        return self._planned(
            processing,
            size,
            patch_timestamps(times, processing.temporal_patch_size),
            source_size=info.size,
            source_frames=info.num_frames,
            duration_s=info.duration_s,
            frame_indices=indices,
            frame_times_s=times,
            similar_difference=budget.similar_difference if budget.drop_similar or clip.drop_similar else None,
            notes=tuple(notes),
        )

    def _planned(
        self,
        processing: ImageProcessing | VideoProcessing,
        size: Size,
        timestamps_s: tuple[float, ...] | None = None,
        **fields: Any,
    ) -> MediaPlan:
        """The plan with its costs; without timestamps it is an image's."""
        num_units = 1 if timestamps_s is None else len(timestamps_s)
        grid = GridTHW(num_units, size[0] // processing.patch_size, size[1] // processing.patch_size)
        num_tokens = grid.num_tokens(processing.merge_size)
        num_in_prompt = num_prompt_tokens(num_tokens, timestamps_s)
        return MediaPlan(
            kind="image" if timestamps_s is None else "video",
            size=size,
            grid_thw=grid,
            num_tokens=num_tokens,
            num_prompt_tokens=num_in_prompt,
            cache_bytes=num_in_prompt * self.cache_bytes_per_token,
            processing=processing.fingerprint(),
            color=self.budget.color,
            timestamps_s=timestamps_s,
            **fields,
        )


def _fit_video(
    info: VideoInfo,
    indices: tuple[int, ...],
    size: Size,
    min_frames: int,
    processing: VideoProcessing,
    max_tokens: int,
) -> tuple[tuple[int, ...], Size, list[Said]]:
    """Fewer frames, then smaller ones, until the prompt's share is at most `max_tokens`; with notes on both."""
    patch, notes = processing.temporal_patch_size, []
    overhead = NUM_MARKS + len(timestamp_text(float(info.times_s[-1])))
    patches = -(-len(indices) // patch)
    affordable = max_tokens // (size[0] * size[1] // processing.factor**2 + overhead)
    if affordable >= patches:
        return indices, size, notes
    least = -(-min(min_frames, len(indices)) // patch)
    count = min(max(affordable, least) * patch, len(indices))
    if count < len(indices):
        fewer = sample_frames(info, count, min_frames)
        words = say(
            "{n} {n|frame is|frames are} used, not {m}, to stay within {limit} tokens.",
            n=len(fewer),
            m=len(indices),
            limit=max_tokens,
        )
        notes.append(words)
        indices = fewer
    if affordable < least:
        tokens_per_patch = max_tokens // least - overhead
        if tokens_per_patch < 1:
            raise MediaBudgetError(
                say(
                    "A video of {n} {n|frame|frames} takes at least {least} tokens; the limit is {limit}. Raise it.",
                    n=min(min_frames, len(indices)),
                    least=least * (overhead + 1),
                    limit=max_tokens,
                )
            )
        smaller = shrink_to_tokens(size, info.size, processing.factor, tokens_per_patch)
        notes.append(_smaller_note(size, smaller, max_tokens))
        size = smaller
    return indices, size, notes


def _smaller_note(wanted: Size, size: Size, max_tokens: int) -> Saying:
    return say(
        "Reduced to {width} x {height} pixels, not {w} x {h}, to stay within {limit} tokens.",
        width=str(size[1]),
        height=str(size[0]),
        w=str(wanted[1]),
        h=str(wanted[0]),
        limit=max_tokens,
    )
