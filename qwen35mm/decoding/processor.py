"""A `MediaProcessor` whose media are read in other processes, and what else is made of a file there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from qwen35mm.decoding.answers import (
    Answer,
    Data,
    Reads,
    plan_values,
    read_here,
    read_list,
    read_patches,
    read_plan,
    read_said,
    require,
)
from qwen35mm.decoding.decoders import Decoders, timeout_for
from qwen35mm.pools import Asker
from qwen35mm_preprocess import (
    MediaKind,
    MediaLimits,
    MediaPlan,
    MediaPlanError,
    MediaProcessor,
    MediaSource,
    PreparedMedia,
    VideoClip,
    describe,
    detect_kind,
)
from qwen35mm_preprocess.image import load_image
from qwen35mm_preprocess.media import is_data_uri
from qwen35mm_preprocess.types import Progress

T = TypeVar("T")

# A picture that is to be shown: of each pixel of the source so many bytes at most, and something for its head.
_BYTES_PER_PIXEL, _HEAD_BYTES = 4, 1 << 20


@dataclass(frozen=True)
class DecodingProcessor(MediaProcessor):
    """Plans and prepares as `MediaProcessor` does, in another process. What needs no look at the medium is done here,
    and a PIL image, which was opened here.

    Attributes:
        decoders: the processes.
        asker: who waits for the media; when they leave, the work ends.
    """

    decoders: Decoders = field(kw_only=True, compare=False, repr=False)
    asker: Asker | None = field(default=None, kw_only=True, compare=False, repr=False)

    @classmethod
    def of(cls, processor: MediaProcessor, decoders: Decoders) -> DecodingProcessor:
        """The same processing, budget and limits."""
        return cls(*(getattr(processor, each.name) for each in fields(MediaProcessor)), decoders=decoders)

    @property
    def direct(self) -> MediaProcessor:
        """What reads in the process that it is in."""
        return MediaProcessor(*(getattr(self, each.name) for each in fields(MediaProcessor)))

    def plan(self, source: MediaSource, kind: MediaKind | None = None, clip: VideoClip | None = None) -> MediaPlan:
        """As `MediaProcessor.plan`. Raises what it raises, and what `Decoders.call` does."""
        self._look()
        if isinstance(source, Image.Image):
            return super().plan(source, kind, clip)
        read = partial(_read_plan, processor=self, kind=kind)
        return self.read(source, _plan, self.direct, kind, clip, read=read)

    def prepare(
        self,
        source: MediaSource,
        plan: MediaPlan | None = None,
        kind: MediaKind | None = None,
        progress: Progress | None = None,
        clip: VideoClip | None = None,
    ) -> PreparedMedia:
        """As `MediaProcessor.prepare`. Raises what it raises, and what `Decoders.call` does."""
        self._look()
        if isinstance(source, Image.Image):
            return super().prepare(source, plan, kind, progress, clip)
        if plan is not None:
            if kind is not None and kind != plan.kind:
                raise MediaPlanError(f"The plan of {describe(source)} is for {plan.kind}, not {kind}. Make a new plan.")
            self.check(plan, source)
            kind = plan.kind
        read = partial(read_prepared, processor=self, kind=kind, given=plan)
        asked = (self.direct, plan, kind, clip)
        reads_video = kind != "image"
        return self.read(source, _prepare, *asked, read=read, reads_video=reads_video, progress=progress)

    def read(
        self,
        source: Any,
        function: Callable[..., Answer],
        *arguments: Any,
        read: Reads[T],
        reads_video: bool = False,
        progress: Progress | None = None,
    ) -> T:
        """What `read` makes of `function(source, *arguments)`. Raises what `Decoders.call` does.

        Args:
            reads_video: whether it may decode frames from all of a video.
        """
        timeout_s = timeout_for(_num_bytes(source), self.limits, reads_video=reads_video)
        how = {"name": describe(source), "timeout_s": timeout_s, "progress": progress, "asker": self.asker}
        return self.decoders.call(function, source, *arguments, read=read, **how)


def asked_by(media: MediaProcessor, asker: Asker | None) -> MediaProcessor:
    """The same, but what it reads in other processes ends when the asker leaves."""
    return replace(media, asker=asker) if isinstance(media, DecodingProcessor) else media


def read_by(
    media: MediaProcessor,
    source: MediaSource,
    function: Callable[..., Answer],
    *arguments: Any,
    read: Reads[T],
    progress: Progress | None = None,
) -> T:
    """What `read` makes of `function(source, *arguments)`, called where `media` reads media.

    Raises:
        MediaError: what the function raises; and what `Decoders.call` does, where there are some.
    """
    if isinstance(media, DecodingProcessor):
        return media.read(source, function, *arguments, read=read, progress=progress)
    reports = {} if progress is None else {"progress": progress}
    return read_here(read, function(source, *arguments, **reports))


def picture_by(
    media: MediaProcessor, path: Path, function: Callable[..., bytes | None], *arguments: Any
) -> bytes | None:
    """The picture, as a file's bytes, that a function makes of a file. Raises what `read_by` does."""
    read = partial(_read_bytes, most=most_bytes(media))
    return read_by(media, path, _bytes, function, *arguments, read=read)


def most_bytes(media: MediaProcessor) -> int:
    """The most that a picture of a medium may have as a file."""
    return _BYTES_PER_PIXEL * max(media.limits.max_source_pixels, MediaLimits().max_source_pixels) + _HEAD_BYTES


def kind_by(media: MediaProcessor, source: MediaSource) -> MediaKind:
    """See `detect_kind`. Raises what `read_by` does."""
    return read_by(media, source, _kind, media.limits, read=_read_kind)


def check_picture_by(media: MediaProcessor, source: MediaSource) -> None:
    """Decodes all of a picture. Raises MediaError where it can't be, and what `read_by` does."""
    read_by(media, source, _load, media.limits, read=lambda values, data: None)


def _plan(source: MediaSource, processor: MediaProcessor, kind: MediaKind | None, clip: VideoClip | None) -> Answer:
    return Answer(plan_values(processor.plan(source, kind, clip)))


def _read_plan(values: Any, data: Data, processor: MediaProcessor, kind: MediaKind | None) -> MediaPlan:
    return read_plan(values, processor, kind)


def _prepare(
    source: MediaSource,
    processor: MediaProcessor,
    plan: MediaPlan | None,
    kind: MediaKind | None,
    clip: VideoClip | None,
    progress: Progress | None = None,
) -> Answer:
    return prepared_answer(processor.prepare(source, plan, kind, progress, clip))


def prepared_answer(medium: PreparedMedia, **more: Any) -> Answer:
    """A prepared medium as `read_prepared` reads it, with more values beside."""
    values = {"plan": plan_values(medium.plan), "warnings": medium.warnings, **more}
    return Answer(values, (medium.patches.pixels.reshape(-1).data,))


def read_prepared(
    values: Any, data: Data, processor: MediaProcessor, kind: MediaKind | None, given: MediaPlan | None = None
) -> PreparedMedia:
    """A prepared medium. Raises NonsenseError, and what wrong types lead to.

    Args:
        given: the plan that it was prepared by; None where a new one was made.
    """
    plan = read_plan(values["plan"], processor, kind, given)
    require(plan.digest is not None, "a plan without a digest")
    return PreparedMedia(plan, read_patches(data, plan, processor), read_warnings(values))


def read_warnings(values: Any) -> tuple[Any, ...]:
    """What went wrong without stopping. Raises NonsenseError."""
    return tuple(read_said(warning) for warning in read_list(values["warnings"]))


def _bytes(source: Any, function: Callable[..., bytes | None], *arguments: Any) -> Answer:
    made = function(source, *arguments)
    return Answer(made is not None, () if made is None else (made,))


def _read_bytes(values: Any, data: Data, most: int) -> bytes | None:
    require(isinstance(values, bool), "neither bytes nor none")
    return data.take(most) if values else None


def _kind(source: MediaSource, limits: MediaLimits) -> Answer:
    return Answer(detect_kind(source, limits))


def _read_kind(values: Any, data: Data) -> MediaKind:
    require(values in ("image", "video"), "no kind of a medium")
    return values


def _load(source: MediaSource, limits: MediaLimits) -> Answer:
    load_image(source, limits)
    return Answer()


def _num_bytes(source: MediaSource) -> int:
    if isinstance(source, Path) or (isinstance(source, str) and not is_data_uri(source)):
        try:
            return Path(source).stat().st_size
        except (OSError, ValueError):
            return 0
    return len(source) if isinstance(source, bytes | str) else 0
