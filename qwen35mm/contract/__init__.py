"""The types that all surfaces and backends share: requests for a model, and its answers.

A surface makes a `GenerationRequest`; a backend's `stream(request)` yields `Event`s. Nothing here loads torch or the
engine, so a page, a client of a remote server or a script can use it alone.
"""

from qwen35mm.contract.backend import Backend
from qwen35mm.contract.cache_report import CacheReport, MissReason, Tier
from qwen35mm.contract.events import (
    Channel,
    Event,
    Finished,
    FinishReason,
    MediaPlanned,
    MediaReport,
    Phase,
    Prefilled,
    Progress,
    PromptRead,
    Result,
    TextDelta,
    TokenLogprob,
)
from qwen35mm.contract.messages import Message, Role, iter_media, pin_plans
from qwen35mm.contract.model_info import ModelInfo
from qwen35mm.contract.parts import EncodedMedium, Image, Part, Text, ToolCall, Video
from qwen35mm.contract.request import GenerationRequest, Retain
from qwen35mm.contract.sampling import SamplingParams

__all__ = [
    "Backend",
    "CacheReport",
    "Channel",
    "EncodedMedium",
    "Event",
    "FinishReason",
    "Finished",
    "GenerationRequest",
    "Image",
    "MediaPlanned",
    "MediaReport",
    "Message",
    "MissReason",
    "ModelInfo",
    "Part",
    "Phase",
    "Prefilled",
    "Progress",
    "PromptRead",
    "Result",
    "Retain",
    "Role",
    "SamplingParams",
    "Text",
    "TextDelta",
    "Tier",
    "TokenLogprob",
    "ToolCall",
    "Video",
    "iter_media",
    "pin_plans",
]
