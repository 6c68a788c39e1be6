"""What a message is made of: texts, images, videos and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, Protocol

import numpy as np
from PIL import Image as PILImage

from qwen35mm.errors import PromptError
from qwen35mm_preprocess import (
    MediaBudget,
    MediaLimits,
    MediaPlan,
    MediaProcessor,
    MediaSource,
    PreparedMedia,
    VideoClip,
)
from qwen35mm_preprocess.media import is_data_uri
from qwen35mm_preprocess.say import Said

_MAX_JSON_DEPTH = 64


class Tensor(Protocol):
    """A tensor of torch, which isn't loaded here."""

    def detach(self) -> Any: ...


@dataclass(frozen=True)
class Text:
    """A text, always taken literally."""

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise PromptError(f"A text part must hold a string; got {type(self.text).__name__}.")


@dataclass(frozen=True, eq=False)
class EncodedMedium:
    """A medium encoded for a server: content parts in OpenAI's form, the plan it was read by, and warnings.

    See `qwen35mm.backends.remote.media`.
    """

    parts: tuple[dict[str, Any], ...] = field(repr=False)
    plan: MediaPlan
    warnings: tuple[Said, ...] = ()


@dataclass(frozen=True)
class _Medium:
    """An image or a video. A prepared or encoded source brings its own plan.

    Attributes:
        stand_in: what the model reads in its place if it can't be read, such as "[image left out]". None makes that an
            error.
    """

    kind: ClassVar[Literal["image", "video"]]
    source: MediaSource | PreparedMedia | EncodedMedium
    plan: MediaPlan | None = None
    budget: MediaBudget | None = field(default=None, kw_only=True)
    stand_in: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_source(self.source, self.kind)
        if not isinstance(self.plan, MediaPlan | None):
            raise PromptError(f"The {self.kind}'s plan must be a MediaPlan, or None; got {type(self.plan).__name__}.")
        if not isinstance(self.budget, MediaBudget | None):
            came = type(self.budget).__name__
            raise PromptError(f"The {self.kind}'s budget must be a MediaBudget, or None; got {came}.")
        if not isinstance(self.stand_in, str | None):
            came = type(self.stand_in).__name__
            raise PromptError(f"The {self.kind}'s stand_in must be a string, or None; got {came}.")
        if isinstance(self.source, PreparedMedia | EncodedMedium):
            object.__setattr__(self, "plan", self.source.plan)

    def planner(self, media: MediaProcessor) -> MediaProcessor:
        """The processor, with this medium's own budget if it has one."""
        return media if self.budget is None else replace(media, budget=self.budget)


class Image(_Medium):
    """An image: a path, bytes, an open file, a `data:` URI, a PIL image, or an array or a torch tensor (copied).

    Arrays are uint8 [height, width, 3]. Tensors may also be [3, height, width], and floats from 0 to 1.

    `plan` pins how it is read. `budget` limits the cost of a new plan; None takes the backend's. `stand_in` is what the
    model reads in its place if it can't be read; None makes that an error.
    """

    kind = "image"
    clip: ClassVar[None] = None

    def __init__(
        self,
        source: MediaSource | PreparedMedia | EncodedMedium | BinaryIO | np.ndarray | Tensor,
        plan: MediaPlan | None = None,
        *,
        budget: MediaBudget | None = None,
        stand_in: str | None = None,
    ) -> None:
        whole = _picture(source) if is_array(source) else _whole(source)
        super().__init__(whole, plan, budget=budget, stand_in=stand_in)


@dataclass(frozen=True, eq=False, init=False)
class Video(_Medium):
    """A video: a path, bytes, an open file or a `data:` URI. `from_frames` makes one of pictures.

    `plan` pins how it is read. `clip` selects the part that a new plan reads, `budget` limits its cost. `stand_in` is
    as in `Image`.
    """

    kind = "video"
    clip: VideoClip | None = None

    def __init__(
        self,
        source: MediaSource | PreparedMedia | EncodedMedium | BinaryIO,
        plan: MediaPlan | None = None,
        clip: VideoClip | None = None,
        *,
        budget: MediaBudget | None = None,
        stand_in: str | None = None,
    ) -> None:
        if not isinstance(clip, VideoClip | None):
            raise PromptError(f"The video's clip must be a VideoClip, or None; got {type(clip).__name__}.")
        object.__setattr__(self, "clip", clip)
        super().__init__(_whole(source), plan, budget=budget, stand_in=stand_in)

    @classmethod
    def from_frames(
        cls,
        frames: Sequence[MediaSource | np.ndarray | Tensor],
        *,
        fps: float | None = None,
        times_s: Sequence[float] | None = None,
        budget: MediaBudget | None = None,
    ) -> Video:
        """A video of pictures of one size, each as for `Image`; it is sampled like any other.

        Args:
            fps: frames a second; without it and `times_s`, two.
            times_s: when each frame is shown, in rising order.

        Raises:
            PromptError, MediaError: a frame can't be read, or sizes or times don't fit.
        """
        # Loaded here: most programs make no video of pictures.
        from qwen35mm_preprocess.frames import clip_of_pictures
        from qwen35mm_preprocess.image import load_image

        sources = [_picture(frame) if is_array(frame) else _whole(frame) for frame in frames]
        pictures = [load_image(source, MediaLimits()) for source in sources]
        return cls(clip_of_pictures(pictures, fps=fps, times_s=times_s), budget=budget)


Part = Text | Image | Video


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant made; `arguments` holds JSON values only."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PromptError("A tool call needs the function's name.")
        if self.id is not None and not isinstance(self.id, str):
            raise PromptError(f"A tool call's id must be a string; got {type(self.id).__name__}.")
        if not isinstance(self.arguments, Mapping):
            raise PromptError(f"The arguments of the tool call {self.name!r} must be an object of names and values.")
        check_json(self.arguments, f"The arguments of the tool call {self.name!r}")

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


def check_json(value: Any, what: str, depth: int = 0) -> None:
    """Raises PromptError unless `value` is made of JSON types, at most 64 deep."""
    if depth > _MAX_JSON_DEPTH:
        raise PromptError(f"{what}: nested more than {_MAX_JSON_DEPTH} deep.")
    if value is None or isinstance(value, str | int | float):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise PromptError(f"{what}: names must be strings; got {type(key).__name__}.")
            check_json(item, what, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_json(item, what, depth + 1)
    else:
        raise PromptError(f"{what}: a {type(value).__name__} is not a JSON value.")


def is_picture(value: object) -> bool:
    """Whether a bare value is a picture: one of PIL's, an array or a tensor."""
    return isinstance(value, PILImage.Image) or is_array(value)


def is_array(value: object) -> bool:
    """Whether it is an array of NumPy or a tensor of torch."""
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _is_tensor(value: object) -> bool:
    # Told by the name, so that torch needn't be loaded.
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def _whole(source: Any) -> Any:
    """The bytes of an open file, from its start; anything else unchanged."""
    if not callable(getattr(source, "read", None)):
        return source
    if callable(getattr(source, "seekable", None)) and source.seekable():
        source.seek(0)
    data = source.read()
    if not isinstance(data, bytes | bytearray):
        raise PromptError(f"The file gives {type(data).__name__}, not bytes. Open it with mode 'rb'.")
    return bytes(data)


def _picture(values: Any) -> PILImage.Image:
    """A picture from a uint8 array [height, width] or [height, width, 3 or 4]; tensors see `_pixels`."""
    came = f"{values.dtype} of shape {list(values.shape)}"
    if not isinstance(values, np.ndarray):
        values = _pixels(values, came)
    has_shape = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))
    if values.dtype != np.uint8 or not has_shape or not values.size:
        raise PromptError(f"The image is an array of {came}; expected uint8 of shape [height, width, 3].")
    return PILImage.fromarray(values.copy())


def _pixels(tensor: Any, came: str) -> np.ndarray:
    """A tensor with colours first or last, uint8 or floats from 0 to 1, as an array with colours last.

    Raises:
        PromptError: it could be read in two ways, or in none.
    """
    values = tensor.detach().cpu()
    if values.is_floating_point():
        pixels = values.float().numpy()
        if not pixels.size or not (pixels.min() >= 0 and pixels.max() <= 1):
            raise PromptError(f"The image is a tensor of {came}; floats must lie between 0 and 1.")
        pixels = np.rint(pixels * 255).astype(np.uint8)
    else:
        pixels = values.numpy()
    if pixels.ndim != 3:
        return pixels
    first, last = pixels.shape[0] in (1, 3, 4), pixels.shape[2] in (3, 4)
    if first and last:
        raise PromptError(
            f"The image is a tensor of {came}, whose colours may be first or last. Pass an array instead."
        )
    if not first:
        return pixels
    return pixels[0] if pixels.shape[0] == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))


def _check_source(source: object, kind: str) -> None:
    if isinstance(source, str):
        scheme, mark, _ = source[:64].partition("://")
        if mark and not is_data_uri(source):
            raise PromptError(
                f"The {kind} is an address ({scheme}://...): remote media are not fetched. "
                "Download it first and pass the file, or send it as a data: URI."
            )
        if not source:
            raise PromptError(f"The {kind}'s path is empty.")
    elif isinstance(source, PreparedMedia | EncodedMedium):
        if source.plan.kind != kind:
            raise PromptError(f"The {kind} was prepared as {source.plan.kind}; prepare it again as what it is.")
    elif not isinstance(source, Path | bytes | PILImage.Image):
        raise PromptError(
            f"The {kind} is a {type(source).__name__}; expected a path, bytes, an open file, a data: URI"
            f"{', a PIL image, an array of uint8 or a tensor' if kind == 'image' else ' or Video.from_frames'}."
        )
    elif kind == "video" and isinstance(source, PILImage.Image):
        raise PromptError("A video can't be a PIL image; use Image for it, or Video.from_frames for several.")
