"""Plans images and videos for Qwen3.5 under a token budget, decodes them safely and cuts them into patches.

Needs no torch.

plan = processor.plan("holiday.mp4")          # from the header and the packet times: what will it cost?
media = processor.prepare("holiday.mp4", plan)
media.pixel_values, media.plan.grid_thw, media.plan.timestamps_s, media.plan.digest

The names below load on first use: errors and messages need neither NumPy nor PyAV.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35mm_preprocess.errors import (
        MediaBudgetError,
        MediaChangedError,
        MediaConfigError,
        MediaDecodeError,
        MediaError,
        MediaFormatError,
        MediaLimitError,
        MediaPlanError,
        MediaSourceError,
    )
    from qwen35mm_preprocess.media import MediaSource, describe, detect_kind
    from qwen35mm_preprocess.media_plan import MediaPlan, PreparedMedia, timestamp_text
    from qwen35mm_preprocess.patches import Patches
    from qwen35mm_preprocess.positions import TextRun, VisionRun, mrope_positions
    from qwen35mm_preprocess.processor import MediaProcessor
    from qwen35mm_preprocess.types import (
        GridTHW,
        ImageProcessing,
        MediaBudget,
        MediaKind,
        MediaLimits,
        VideoClip,
        VideoProcessing,
        family_processing,
        read_processing,
    )

_HOMES = {
    "GridTHW": "qwen35mm_preprocess.types",
    "ImageProcessing": "qwen35mm_preprocess.types",
    "MediaBudget": "qwen35mm_preprocess.types",
    "MediaBudgetError": "qwen35mm_preprocess.errors",
    "MediaChangedError": "qwen35mm_preprocess.errors",
    "MediaConfigError": "qwen35mm_preprocess.errors",
    "MediaDecodeError": "qwen35mm_preprocess.errors",
    "MediaError": "qwen35mm_preprocess.errors",
    "MediaFormatError": "qwen35mm_preprocess.errors",
    "MediaKind": "qwen35mm_preprocess.types",
    "MediaLimitError": "qwen35mm_preprocess.errors",
    "MediaLimits": "qwen35mm_preprocess.types",
    "MediaPlan": "qwen35mm_preprocess.media_plan",
    "MediaPlanError": "qwen35mm_preprocess.errors",
    "MediaProcessor": "qwen35mm_preprocess.processor",
    "MediaSource": "qwen35mm_preprocess.media",
    "MediaSourceError": "qwen35mm_preprocess.errors",
    "Patches": "qwen35mm_preprocess.patches",
    "PreparedMedia": "qwen35mm_preprocess.media_plan",
    "TextRun": "qwen35mm_preprocess.positions",
    "VideoClip": "qwen35mm_preprocess.types",
    "VideoProcessing": "qwen35mm_preprocess.types",
    "VisionRun": "qwen35mm_preprocess.positions",
    "describe": "qwen35mm_preprocess.media",
    "detect_kind": "qwen35mm_preprocess.media",
    "mrope_positions": "qwen35mm_preprocess.positions",
    "family_processing": "qwen35mm_preprocess.types",
    "read_processing": "qwen35mm_preprocess.types",
    "timestamp_text": "qwen35mm_preprocess.media_plan",
}

__all__ = [
    "GridTHW",
    "ImageProcessing",
    "MediaBudget",
    "MediaBudgetError",
    "MediaChangedError",
    "MediaConfigError",
    "MediaDecodeError",
    "MediaError",
    "MediaFormatError",
    "MediaKind",
    "MediaLimitError",
    "MediaLimits",
    "MediaPlan",
    "MediaPlanError",
    "MediaProcessor",
    "MediaSource",
    "MediaSourceError",
    "Patches",
    "PreparedMedia",
    "TextRun",
    "VideoClip",
    "VideoProcessing",
    "VisionRun",
    "describe",
    "detect_kind",
    "family_processing",
    "mrope_positions",
    "read_processing",
    "timestamp_text",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'qwen35mm_preprocess' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
