"""The settings that media are read with: grids, a checkpoint's processing, hard limits, token budgets.

All frozen and checked when made. Sizes are (height, width) in pixels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from qwen35mm_preprocess.errors import MediaConfigError
from qwen35mm_preprocess.say import say

MediaKind = Literal["image", "video"]
ColorMode = Literal["srgb", "checkpoint"]
"""Colours as a viewer shows them, or the file's numbers as transformers' processors take them."""
Size = tuple[int, int]

# Called with (steps done, steps in all) on the calling thread; what it raises stops the work.
Progress = Callable[[int, int], None]

PIL_BICUBIC = 3
# Of a checkpoint's files; what is longer is cut off, and is no JSON then.
_MAX_CONFIG_CHARS = 1_000_000


class GridTHW(NamedTuple):
    """A medium's size in patches: temporal patches, rows, columns (transformers' `grid_thw`)."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        """Rows of `pixel_values`."""
        return self.t * self.h * self.w

    def num_tokens(self, merge_size: int = 2) -> int:
        """Placeholder tokens in the prompt: one for every merge_size x merge_size patches."""
        return self.t * (self.h // merge_size) * (self.w // merge_size)


@dataclass(frozen=True)
class Processing:
    """What images and videos share: how pixels become patches.

    The arithmetic is that of transformers' processors for Qwen2-VL images and Qwen3-VL videos:
    bicubic resize, then rescale and normalise, then patches.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    rescale_factor: float = 1 / 255

    def __post_init__(self) -> None:
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            _check(self, name, _is_positive(getattr(self, name), Integral), "a positive integer")
        for name in ("image_mean", "image_std"):
            values = getattr(self, name)
            is_three = isinstance(values, list | tuple) and len(values) == 3
            _check(self, name, is_three and all(map(_is_finite, values)), "three finite numbers")
            object.__setattr__(self, name, tuple(map(float, values)))
        _check(self, "image_std", min(self.image_std) > 0, "three positive numbers")
        _check(self, "rescale_factor", _is_positive(self.rescale_factor), "positive")

    @property
    def factor(self) -> int:
        """Both sides of a resized picture are multiples of this many pixels (one token's side)."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Columns of `pixel_values`: 3 channels x frames x rows x columns of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def fingerprint(self) -> str:
        """Hex digest of what decides the values of `pixel_values` for given resized frames."""
        values = [type(self).__name__, *(getattr(self, field.name) for field in fields(Processing))]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ImageProcessing(Processing):
    """A checkpoint's image settings; `min_pixels` and `max_pixels` bound the resized area."""

    min_pixels: int = 65536
    max_pixels: int = 16777216

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_bounds(self, "min_pixels", "max_pixels")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ImageProcessing:
        """Reads a checkpoint's preprocessor_config.json. Raises MediaConfigError."""
        least, most = _pixel_bounds(config, "preprocessor_config.json")
        return cls(**_shared(config, "preprocessor_config.json"), min_pixels=least, max_pixels=most)


@dataclass(frozen=True)
class VideoProcessing(Processing):
    """A checkpoint's video settings.

    `min_total_pixels` and `max_total_pixels` bound the resized area summed over all sampled frames.
    `max_frame_tokens` caps one frame besides (transformers' `cap_pixels_per_frame`); None is no cap.
    """

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    min_total_pixels: int = 4096
    max_total_pixels: int = 25165824
    max_frame_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "fps", _is_positive(self.fps), "positive")
        _check_bounds(self, "min_frames", "max_frames")
        _check_bounds(self, "min_total_pixels", "max_total_pixels")
        tokens = self.max_frame_tokens
        _check(self, "max_frame_tokens", tokens is None or _is_positive(tokens, Integral), "a positive integer")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> VideoProcessing:
        """Reads a checkpoint's video_preprocessor_config.json. Raises MediaConfigError.

        Official checkpoints leave fps, min_frames and max_frames to the defaults of transformers' class.
        """
        name = "video_preprocessor_config.json"
        if config.get("num_frames") is not None:
            raise MediaConfigError(f"{name}: a fixed num_frames is not supported; leave it out and set fps.")
        least, most = _pixel_bounds(config, name)
        optional = {key: config[key] for key in ("fps", "min_frames", "max_frames") if config.get(key) is not None}
        capped = bool(config.get("cap_pixels_per_frame"))
        return cls(
            **_shared(config, name),
            **optional,
            min_total_pixels=least,
            max_total_pixels=most,
            max_frame_tokens=config.get("max_video_tokens", 768) if capped else None,
        )


@dataclass(frozen=True)
class MediaLimits:
    """Hard limits: what is over one is refused before its pixels are decoded."""

    max_image_bytes: int = 64 * 2**20
    max_video_bytes: int = 512 * 2**20
    max_source_pixels: int = 100_000_000
    max_source_frames: int = 1_000_000
    max_duration_s: float = 4 * 3600.0
    max_aspect_ratio: float = 200.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            _check(self, name, _is_positive(getattr(self, name)), "positive")

    def max_bytes(self, kind: MediaKind | None) -> int:
        """The byte limit for a kind of medium; the larger one where it isn't known."""
        if kind is None:
            return max(self.max_image_bytes, self.max_video_bytes)
        return self.max_image_bytes if kind == "image" else self.max_video_bytes


@dataclass(frozen=True)
class MediaBudget:
    """What one medium may cost in the prompt: its placeholders, the marks around them and its timestamps.

    None leaves a value to the checkpoint: `MediaBudget(color="checkpoint")` is what transformers' processors do.
    `color` costs nothing; it is chosen with the rest. With `drop_similar`, a temporal patch of a video that shows the
    same as the one kept before it is left out: no token's cell (32 x 32 pixels) may differ by `similar_difference` or
    more, as a mean over the cell of 8-bit values. The patches that stay keep their own timestamps; the first and the
    last always stay.
    """

    max_image_tokens: int | None = None
    max_video_tokens: int | None = None
    max_frames: int | None = None
    fps: float | None = None
    drop_similar: bool = False
    similar_difference: float = 4.0
    color: ColorMode = "srgb"

    def __post_init__(self) -> None:
        for name in ("max_image_tokens", "max_video_tokens", "max_frames", "fps"):
            value = getattr(self, name)
            _check(self, name, value is None or _is_positive(value), "positive or None")
        _check(self, "similar_difference", _is_positive(self.similar_difference), "positive")
        _check(self, "color", self.color in get_args(ColorMode), " or ".join(get_args(ColorMode)))

    @classmethod
    def for_device(cls, kind: str) -> MediaBudget:
        """The default of a chat on `cuda` or `cpu`: more on a GPU, which encodes media in no time."""
        return cls.for_gpu() if kind == "cuda" else cls.for_cpu()

    @classmethod
    def for_cpu(cls) -> MediaBudget:
        """The default of a chat on a CPU."""
        return cls(max_image_tokens=1280, max_video_tokens=4096)

    @classmethod
    def for_gpu(cls) -> MediaBudget:
        """The default of a chat on a GPU."""
        return cls(max_image_tokens=4096, max_video_tokens=16384)


@dataclass(frozen=True)
class VideoClip:
    """What is taken of a video, where somebody chose; the rest is for the budget to say.

    start_s, end_s   of the range, from the video's first frame; None is its end
    num_frames       spread evenly over the range; None is by the frames a second
    drop_similar     leave out what shows the same as before (see `MediaBudget`)
    """

    start_s: float = 0.0
    end_s: float | None = None
    num_frames: int | None = None
    drop_similar: bool = False

    # As `MediaPlan`'s.
    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        start, end, count = self.start_s, self.end_s, self.num_frames
        _check(self, "start_s", _is_finite(start) and start >= 0, "zero or a positive number of seconds")
        _check(self, "end_s", end is None or (_is_finite(end) and end >= start), "at least start_s, or None")
        _check(self, "num_frames", count is None or _is_positive(count, Integral), "a positive integer or None")
        _check(self, "drop_similar", isinstance(self.drop_similar, bool), "true or false")


def _is_finite(value: Any, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and -math.inf < value < math.inf


def _is_positive(value: Any, kind: type = Real) -> bool:
    return _is_finite(value, kind) and value > 0


def _check_bounds(owner: object, least: str, most: str) -> None:
    """Two whole numbers above zero, in order."""
    low, high = getattr(owner, least), getattr(owner, most)
    are_whole = _is_positive(low, Integral) and _is_positive(high, Integral)
    _check(owner, least, are_whole and low <= high, f"positive and at most {most}")


def _check(owner: object, name: str, ok: bool, expected: str) -> None:
    if not ok:
        raise MediaConfigError(f"{type(owner).__name__}.{name} must be {expected}, not {getattr(owner, name)!r}.")


def _shared(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of `Processing` from a processor's configuration."""
    required = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    if missing := [key for key in required if config.get(key) is None]:
        raise MediaConfigError(f"{name} lacks {', '.join(missing)}: the checkpoint's copy is incomplete.")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if config.get(key, True) is False:
            raise MediaConfigError(f"{name} sets {key} to false; only the processing of Qwen3.5 is supported: true.")
    if config.get("resample", PIL_BICUBIC) != PIL_BICUBIC:
        raise MediaConfigError(f"{name} sets resample to {config['resample']}; only bicubic ({PIL_BICUBIC}) is known.")
    return {key: config[key] for key in required} | {"rescale_factor": config.get("rescale_factor", 1 / 255)}


def _pixel_bounds(config: Mapping[str, Any], name: str) -> tuple[int, int]:
    """The least and the most pixels; `min_pixels` and `max_pixels` are older names and win, as in transformers."""
    size = config.get("size")
    size = size if isinstance(size, Mapping) else {}
    bounds = []
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        value = config.get(old) if config.get(old) is not None else size.get(new)
        if not _is_finite(value, Integral):
            raise MediaConfigError(f"{name} lacks size.{new}, a number of pixels: the checkpoint's copy is incomplete.")
        bounds.append(value)
    return bounds[0], bounds[1]


def family_processing() -> tuple[ImageProcessing, VideoProcessing]:
    """The processing that all of the family's own checkpoints ask for."""
    shared: dict[str, Any] = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    shared |= {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
    return ImageProcessing(**shared), VideoProcessing(**shared)


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
        raise MediaConfigError(
            say("The checkpoint lacks {name}: it can't read media. Download it completely.", name=name)
        )
    return ImageProcessing.from_dict(image), VideoProcessing.from_dict(video)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8") as file:
            content = json.loads(file.read(_MAX_CONFIG_CHARS))
    except (OSError, ValueError, RecursionError):
        raise MediaConfigError(
            say("{name} of the checkpoint is not readable JSON. Download it again.", name=path.name)
        ) from None
    if not isinstance(content, dict):
        raise MediaConfigError(
            say("{name} of the checkpoint must hold a JSON object. Download it again.", name=path.name)
        )
    return content
