"""A `MediaProcessor` that reads media in other processes, and other functions of files that run there."""

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

# Most bytes of a picture to show: so many per pixel of the source, plus its header.
_BYTES_PER_PIXEL, _HEAD_BYTES = 4, 1 << 20


@dataclass(frozen=True)
class DecodingProcessor(MediaProcessor):
    """Plans and prepares as `MediaProcessor` does, but in another process.

    Checks that don't read the medium run here, and so do PIL images, which are already open.

    Attributes:
        decoders: the processes.
        asker: who waits for the media; the work ends when they leave.
    """

    decoders: Decoders = field(kw_only=True, compare=False, repr=False)
    asker: Asker | None = field(default=None, kw_only=True, compare=False, repr=False)

    @classmethod
    def of(cls, processor: MediaProcessor, decoders: Decoders) -> DecodingProcessor:
        """`processor` with the same processing, budget and limits, reading in `decoders`."""
        return cls(*(getattr(processor, each.name) for each in fields(MediaProcessor)), decoders=decoders)

    @property
    def direct(self) -> MediaProcessor:
        """The same processor, reading in the current process."""
        return MediaProcessor(*(getattr(self, each.name) for each in fields(MediaProcessor)))

    def plan(self, source: MediaSource, kind: MediaKind | None = None, clip: VideoClip | None = None) -> MediaPlan:
        """See `MediaProcessor.plan`. Raises its errors and those of `Decoders.call`."""
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
        """See `MediaProcessor.prepare`. Raises its errors and those of `Decoders.call`."""
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
        """Calls `function(source, *arguments)` in a child and applies `read` to its answer. Raises as `Decoders.call`.

        Args:
            reads_video: whether it may decode frames from the whole video.
        """
        timeout_s = timeout_for(_num_bytes(source), self.limits, reads_video=reads_video)
        how = {"name": describe(source), "timeout_s": timeout_s, "progress": progress, "asker": self.asker}
        return self.decoders.call(function, source, *arguments, read=read, **how)


def asked_by(media: MediaProcessor, asker: Asker | None) -> MediaProcessor:
    """The same processor; its work in other processes ends when the asker leaves."""
    return replace(media, asker=asker) if isinstance(media, DecodingProcessor) else media


def read_by(
    media: MediaProcessor,
    source: MediaSource,
    function: Callable[..., Answer],
    *arguments: Any,
    read: Reads[T],
    progress: Progress | None = None,
) -> T:
    """Calls `function(source, *arguments)` where `media` reads media, and applies `read` to its answer.

    Raises:
        MediaError: the function's errors, and those of `Decoders.call` if it runs in a child.
    """
    if isinstance(media, DecodingProcessor):
        return media.read(source, function, *arguments, read=read, progress=progress)
    reports = {} if progress is None else {"progress": progress}
    return read_here(read, function(source, *arguments, **reports))


def picture_by(
    media: MediaProcessor, path: Path, function: Callable[..., bytes | None], *arguments: Any
) -> bytes | None:
    """The picture, as a file's bytes, that a function makes from a file. Raises as `read_by`."""
    read = partial(_read_bytes, most=most_bytes(media))
    return read_by(media, path, _bytes, function, *arguments, read=read)


def most_bytes(media: MediaProcessor) -> int:
    """Most bytes of a picture made from a medium."""
    return _BYTES_PER_PIXEL * max(media.limits.max_source_pixels, MediaLimits().max_source_pixels) + _HEAD_BYTES


def kind_by(media: MediaProcessor, source: MediaSource) -> MediaKind:
    """See `detect_kind`. Raises as `read_by`."""
    return read_by(media, source, _kind, media.limits, read=_read_kind)


def check_picture_by(media: MediaProcessor, source: MediaSource) -> None:
    """Decodes the whole picture. Raises MediaError if that fails, and as `read_by`."""
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
    """A prepared medium in the form of `read_prepared`, with additional values."""
    values = {"plan": plan_values(medium.plan), "warnings": medium.warnings, **more}
    return Answer(values, (medium.patches.pixels.reshape(-1).data,))


def read_prepared(
    values: Any, data: Data, processor: MediaProcessor, kind: MediaKind | None, given: MediaPlan | None = None
) -> PreparedMedia:
    """A prepared medium from an answer. Raises NonsenseError, and errors of wrong types.

    Args:
        given: the plan that it was prepared by; None if the child made a new one.
    """
    plan = read_plan(values["plan"], processor, kind, given)
    require(plan.digest is not None, "a plan without a digest")
    return PreparedMedia(plan, read_patches(data, plan, processor), read_warnings(values))


def read_warnings(values: Any) -> tuple[Any, ...]:
    """Warnings about a medium. Raises NonsenseError."""
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
