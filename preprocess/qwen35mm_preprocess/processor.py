"""Plans and prepares media with a checkpoint's processing, a budget and limits."""

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
    """Plans and prepares media with a checkpoint's processing, a budget and limits.

    `cache_bytes_per_token` is the model's KV bytes per token, used only for `MediaPlan.cache_bytes`. `blind` names a
    text-only model, for which every medium is refused.
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
        """Decides a medium's frames, size and cost from its header and, for a video, its packet times.

        A video is sampled at the wanted fps. If it exceeds its token budget, it first gets fewer frames of the same
        size, down to the checkpoint's `min_frames`, then smaller frames.

        Args:
            kind: None detects it from the content.
            clip: the part of a video to use. Frames keep their times in the whole video, as with `video_start` and
                `video_end` in qwen-vl-utils.

        Raises:
            MediaBudgetError: it exceeds its token budget even with the fewest and smallest frames.
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
        """Decodes a medium exactly as its plan says. Makes a plan if there is none.

        A plan without a digest comes back with one. It then lacks unreadable frames and, if it asks for that, similar
        ones. A plan with a digest comes back unchanged and gives the same pixels, whatever the budget and the clip.

        Raises:
            MediaChangedError: the digest, size or frame times differ from the plan's.
            MediaPlanError: the plan is for another kind or other processing, or can't belong to such a medium.
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
        """The plan to read a medium again with; None if it needs a new one.

        A plan without a digest does not fix the pixels, and a server may have made it for another checkpoint.
        """
        if plan is None or plan.digest is not None:
            return plan
        check_source_size(plan.source_size, describe(source), self.limits)
        is_own = plan.processing == self._processing(plan).fingerprint() and not self._is_larger(plan)
        return plan if is_own else None

    def _processing(self, plan: MediaPlan) -> ImageProcessing | VideoProcessing:
        return self.image_processing if plan.kind == "image" else self.video_processing

    def _is_larger(self, plan: MediaPlan) -> bool:
        """Whether the plan has more pixels than this checkpoint would ever use."""
        processing, (height, width) = self._processing(plan), plan.size
        if isinstance(processing, ImageProcessing):
            most = image_size(plan.source_size, processing)
            return height > most[0] or width > most[1]
        # Twice the area: frames keep their size when others are dropped, and rounding isn't monotonic.
        most = video_size(plan.source_size, len(plan.frame_indices or ()), processing)
        return height * width > 2 * most[0] * most[1]

    def _look(self) -> None:
        """Raises MediaError if the model is text-only."""
        if self.blind is not None:
            raise MediaError(
                say(
                    "{name} reads text alone, and no pictures or videos. Choose another model, or leave them out.",
                    name=self.blind,
                )
            )

    def check(self, plan: MediaPlan, source: MediaSource) -> None:
        """Refuses a plan that `plan` can't have made under any budget.

        A stored plan may say anything, and its size is allocated before the medium is read.

        Raises:
            MediaLimitError, MediaDecodeError: its medium would be over a limit.
            MediaPlanError: it is for other processing, contradicts itself, or has more pixels or frames than possible.
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
        """Plans a video from its frame table; `source` names it in messages.

        Raises:
            MediaLimitError: the clip isn't in the video.
            MediaBudgetError: it can't fit the budget.
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
        chosen = sample_frames(part, count, min_frames)
        size = video_size(info.size, len(chosen), processing)
        reductions: list[Said] = []
        if budget.max_video_tokens is not None:
            chosen, size, reductions = _fit_video(part, chosen, size, min_frames, processing, budget.max_video_tokens)
        if count == max_frames < min(wanted, part.num_frames):
            rate = say("{n} a second", n=decimal(fps)) if clip.num_frames is None else wanted
            words = say(
                "{n} {n|frame is|frames are} used, not {rate}: at most {most} are taken from a video.",
                n=len(chosen),
                rate=rate,
                most=max_frames,
            )
            notes.append(words)
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
        """The plan with its costs. Without timestamps it is for an image."""
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
    """Takes fewer, then smaller frames until they cost at most `max_tokens`: (indices, size, notes)."""
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
