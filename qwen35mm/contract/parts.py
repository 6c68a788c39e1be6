"""What a message is made of: texts, images, videos and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from PIL import Image as PILImage

from qwen35mm.errors import PromptError
from qwen35mm_preprocess import MediaBudget, MediaPlan, MediaProcessor, MediaSource, PreparedMedia, VideoClip
from qwen35mm_preprocess.media import is_data_uri
from qwen35mm_preprocess.say import Said

_MAX_JSON_DEPTH = 64


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
    """An image or a video. A prepared or encoded source brings its own plan."""

    kind: ClassVar[Literal["image", "video"]]
    source: MediaSource | PreparedMedia | EncodedMedium
    plan: MediaPlan | None = None
    budget: MediaBudget | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_source(self.source, self.kind)
        if not isinstance(self.plan, MediaPlan | None):
            raise PromptError(f"The {self.kind}'s plan must be a MediaPlan, or None; got {type(self.plan).__name__}.")
        if not isinstance(self.budget, MediaBudget | None):
            came = type(self.budget).__name__
            raise PromptError(f"The {self.kind}'s budget must be a MediaBudget, or None; got {came}.")
        if isinstance(self.source, PreparedMedia | EncodedMedium):
            object.__setattr__(self, "plan", self.source.plan)

    def planner(self, media: MediaProcessor) -> MediaProcessor:
        """The processor, with this medium's own budget if it has one."""
        return media if self.budget is None else replace(media, budget=self.budget)


class Image(_Medium):
    """An image: a path, bytes, a PIL image, an array of uint8 [height, width, 3] (copied), or a `data:` URI.

    `plan` pins how it is read. `budget` limits the cost of a new plan; None takes the backend's.
    """

    kind = "image"
    clip: ClassVar[None] = None

    def __init__(
        self,
        source: MediaSource | PreparedMedia | EncodedMedium | np.ndarray,
        plan: MediaPlan | None = None,
        *,
        budget: MediaBudget | None = None,
    ) -> None:
        super().__init__(_picture(source) if isinstance(source, np.ndarray) else source, plan, budget=budget)


@dataclass(frozen=True, eq=False)
class Video(_Medium):
    """A video: a path, bytes or a `data:` URI.

    `plan` pins how it is read. `clip` selects the part that a new plan reads, `budget` limits its cost.
    """

    kind = "video"
    clip: VideoClip | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.clip, VideoClip | None):
            raise PromptError(f"The video's clip must be a VideoClip, or None; got {type(self.clip).__name__}.")


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


def _picture(values: np.ndarray) -> PILImage.Image:
    """A picture from a uint8 array [height, width] or [height, width, 3 or 4]."""
    is_picture = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))
    if values.dtype != np.uint8 or not is_picture or not values.size:
        came = f"{values.dtype} of shape {list(values.shape)}"
        raise PromptError(f"The image is an array of {came}; expected uint8 of shape [height, width, 3].")
    return PILImage.fromarray(values.copy())


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
            f"The {kind} is a {type(source).__name__}; expected a path, bytes, a data: URI"
            f"{', a PIL image or an array of uint8' if kind == 'image' else ''}."
        )
    elif kind == "video" and isinstance(source, PILImage.Image):
        raise PromptError("A video can't be a PIL image; use Image for it.")
