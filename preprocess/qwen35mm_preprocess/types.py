"""Settings for reading media: grids, a checkpoint's processing, hard limits, token budgets.

All are frozen and checked on construction. Sizes are (height, width) in pixels.
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
"""`srgb`: colours as a viewer shows them. `checkpoint`: the file's raw values, as transformers' processors use them."""
Size = tuple[int, int]

# Called with (steps done, total steps) on the calling thread. An exception from it stops the work.
Progress = Callable[[int, int], None]

PIL_BICUBIC = 3
# A longer checkpoint file is cut off here and then fails to parse.
_MAX_CONFIG_CHARS = 1_000_000


class GridTHW(NamedTuple):
    """Size in patches: temporal patches, rows, columns (transformers' `grid_thw`)."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        """Rows of `pixel_values`."""
        return self.t * self.h * self.w

    def num_tokens(self, merge_size: int = 2) -> int:
        """Placeholder tokens in the prompt: one per merge_size x merge_size patches."""
        return self.t * (self.h // merge_size) * (self.w // merge_size)


@dataclass(frozen=True)
class Processing:
    """How pixels become patches, for images and videos alike.

    Follows transformers' processors for Qwen2-VL images and Qwen3-VL videos: bicubic resize, rescale, normalise, cut
    into patches.
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
        """Side of one token in pixels. Both sides of a resized picture are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Columns of `pixel_values`: 3 channels x frames x rows x columns of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def fingerprint(self) -> str:
        """Hex digest of the settings that determine `pixel_values` for given resized frames."""
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
    `max_frame_tokens` also caps each frame (transformers' `cap_pixels_per_frame`); None means no cap.
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
    """Hard limits: a medium over any of them is refused before its pixels are decoded."""

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
        """The byte limit for this kind of medium; the larger limit if the kind is unknown."""
        if kind is None:
            return max(self.max_image_bytes, self.max_video_bytes)
        return self.max_image_bytes if kind == "image" else self.max_video_bytes


@dataclass(frozen=True)
class MediaBudget:
    """What one medium may cost in the prompt, counting placeholders, the marks around them and timestamps.

    None means the checkpoint's own value: `MediaBudget(color="checkpoint")` does what transformers' processors do.
    `color` costs no tokens. `drop_similar` drops a video's temporal patch if it shows the same as the last kept one:
    in every token's cell (32 x 32 pixels) the mean difference of 8-bit values is below `similar_difference`. Kept
    patches keep their timestamps. The first and the last patch are always kept.
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
        """The chat's default for `cuda` or `cpu`. It is larger on a GPU, which encodes media much faster."""
        return cls.for_gpu() if kind == "cuda" else cls.for_cpu()

    @classmethod
    def for_cpu(cls) -> MediaBudget:
        """The chat's default on a CPU."""
        return cls(max_image_tokens=1280, max_video_tokens=4096)

    @classmethod
    def for_gpu(cls) -> MediaBudget:
        """The chat's default on a GPU."""
        return cls(max_image_tokens=4096, max_video_tokens=16384)


@dataclass(frozen=True)
class VideoClip:
    """The part of a video that a user chose. The budget decides everything else.

    start_s, end_s   seconds from the video's first frame; None is its end
    num_frames       spread evenly over the range; None samples at the budget's fps
    drop_similar     drop frames that show the same as before (see `MediaBudget`)
    """

    start_s: float = 0.0
    end_s: float | None = None
    num_frames: int | None = None
    drop_similar: bool = False

    # Same as `MediaPlan`.
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
    """Raises MediaConfigError unless both fields are positive integers and `least` <= `most`."""
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
    """(min, max) pixels. The older names `min_pixels` and `max_pixels` win, as in transformers."""
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
    """The processing of all official Qwen3.5 checkpoints."""
    shared: dict[str, Any] = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    shared |= {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
    return ImageProcessing(**shared), VideoProcessing(**shared)


def read_processing(folder: str | Path) -> tuple[ImageProcessing, VideoProcessing]:
    """Reads the processing from a checkpoint's folder. Raises MediaConfigError.

    Reads preprocessor_config.json and video_preprocessor_config.json, or the processor_config.json that newer versions
    of transformers write.
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
