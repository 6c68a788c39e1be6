"""The one door to planning and preparing media: a checkpoint's processing with a budget and limits."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qwen35mm_preprocess.budget import plan_image, plan_video
from qwen35mm_preprocess.errors import MediaChangedError, MediaConfigError, MediaPlanError
from qwen35mm_preprocess.image import image_patches, probe_image
from qwen35mm_preprocess.media import MediaSource, describe, detect_kind
from qwen35mm_preprocess.media_plan import MediaPlan, PreparedMedia
from qwen35mm_preprocess.patches import media_digest
from qwen35mm_preprocess.types import ImageProcessing, MediaBudget, MediaKind, MediaLimits, Progress, VideoProcessing
from qwen35mm_preprocess.video import video_patches


@dataclass(frozen=True)
class MediaProcessor:
    """A checkpoint's processing with a budget and limits: plans media and prepares them.

    `cache_bytes_per_token` is the model's KV bytes for a token; it only feeds `MediaPlan.cache_bytes`.
    """

    image_processing: ImageProcessing
    video_processing: VideoProcessing
    budget: MediaBudget = field(default_factory=MediaBudget.for_cpu)
    limits: MediaLimits = field(default_factory=MediaLimits)
    cache_bytes_per_token: int = 0

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

    def plan(self, source: MediaSource, kind: MediaKind | None = None) -> MediaPlan:
        """Plans a medium under the budget, before its pixels are decoded; `kind` None looks at the content.

        Raises:
            MediaError: see `plan_image` and `plan_video`.
        """
        common = (self.budget, self.limits, self.cache_bytes_per_token)
        if (kind or detect_kind(source, self.limits)) == "image":
            return plan_image(source, self.image_processing, *common)
        return plan_video(source, self.video_processing, *common)

    def prepare(
        self,
        source: MediaSource,
        plan: MediaPlan | None = None,
        kind: MediaKind | None = None,
        progress: Progress | None = None,
    ) -> PreparedMedia:
        """Decodes a medium exactly as its plan says, or a new one.

        A plan without a digest comes back with one, and with fewer frames where some were unreadable or, if it asks for
        that, similar. A plan with a digest comes back as it is, with the same pixels as ever, whatever the budget.

        Raises:
            MediaChangedError: the content is not what the plan was made for, by its digest, size or frame times.
            MediaPlanError: the plan was made for another kind, or for a checkpoint with other processing.
            MediaError: the source can't be read or decoded, or is over a limit.
        """
        if plan is None:
            plan = self.plan(source, kind)
        elif kind is not None and kind != plan.kind:
            raise MediaPlanError(f"The plan of {describe(source)} is for {plan.kind}, not {kind}. Make a new plan.")
        processing = self.image_processing if plan.kind == "image" else self.video_processing
        if plan.processing != processing.fingerprint():
            raise MediaPlanError(
                f"The plan of {describe(source)} was made for a model that processes media in another way. "
                "Make a new plan."
            )
        final, warnings = plan, ()
        if plan.kind == "image":
            _check_same_image(source, plan, self.limits)
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
                f"{describe(source)} has changed since its message was sent: its pixels are no longer the same. "
                f"Bring the old file back, or send the new one in a new message."
            )
        else:
            final = plan
        return PreparedMedia(final, patches, warnings)


def read_processing(folder: str | Path) -> tuple[ImageProcessing, VideoProcessing]:
    """The processing that a checkpoint's folder asks for.

    Read from preprocessor_config.json and video_preprocessor_config.json, or from the processor_config.json that
    newer versions of transformers write. Raises MediaConfigError.
    """
    folder = Path(folder)
    joint = _read_json(folder / "processor_config.json") or {}
    image = _read_json(folder / "preprocessor_config.json") or joint.get("image_processor")
    video = _read_json(folder / "video_preprocessor_config.json") or joint.get("video_processor")
    if not isinstance(image, dict) or not isinstance(video, dict):
        name = "video_preprocessor_config.json" if isinstance(image, dict) else "preprocessor_config.json"
        raise MediaConfigError(f"The checkpoint lacks {name}: it can't read media. Download it completely.")
    return ImageProcessing.from_dict(image), VideoProcessing.from_dict(video)


def _check_same_image(source: MediaSource, plan: MediaPlan, limits: MediaLimits) -> None:
    size = probe_image(source, limits).size
    if size != plan.source_size:
        raise MediaChangedError(
            f"{describe(source)} is not the image that was planned: {plan.source_size[1]} x {plan.source_size[0]} "
            f"pixels were expected, {size[1]} x {size[0]} came. Bring the old file back, or send the new one in a new "
            f"message."
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise MediaConfigError(f"{path.name} of the checkpoint is not readable JSON. Download it again.") from None
