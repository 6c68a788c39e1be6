"""Images and videos for Qwen3.5: planned under a token budget, decoded safely, cut into patches. Without torch.

plan = processor.plan("holiday.mp4")          # from the header and the packet times: what will it cost?
media = processor.prepare("holiday.mp4", plan)
media.pixel_values, media.plan.grid_thw, media.plan.timestamps_s, media.plan.digest
"""

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
from qwen35mm_preprocess.processor import MediaProcessor, read_processing
from qwen35mm_preprocess.types import (
    GridTHW,
    ImageProcessing,
    MediaBudget,
    MediaKind,
    MediaLimits,
    VideoClip,
    VideoProcessing,
)

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
    "mrope_positions",
    "read_processing",
    "timestamp_text",
]
