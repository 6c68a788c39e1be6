"""The types that all surfaces and backends share: requests for a model, and its answers.

A surface makes a `GenerationRequest`; a backend's `stream(request)` yields `Event`s. Nothing here loads torch or the
engine, so a page, a client of a remote server or a script can use it alone.

The names below load on first use: the command line describes its sampling options without NumPy and PyAV.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "Backend": "qwen35mm.contract.backend",
    "CacheReport": "qwen35mm.contract.cache_report",
    "Channel": "qwen35mm.contract.events",
    "EncodedMedium": "qwen35mm.contract.parts",
    "Event": "qwen35mm.contract.events",
    "FinishReason": "qwen35mm.contract.events",
    "Finished": "qwen35mm.contract.events",
    "GenerationRequest": "qwen35mm.contract.request",
    "Image": "qwen35mm.contract.parts",
    "MediaPlanned": "qwen35mm.contract.events",
    "MediaReport": "qwen35mm.contract.events",
    "Message": "qwen35mm.contract.messages",
    "MissReason": "qwen35mm.contract.cache_report",
    "ModelInfo": "qwen35mm.contract.model_info",
    "Part": "qwen35mm.contract.parts",
    "Phase": "qwen35mm.contract.events",
    "Prefilled": "qwen35mm.contract.events",
    "Progress": "qwen35mm.contract.events",
    "PromptRead": "qwen35mm.contract.events",
    "Result": "qwen35mm.contract.events",
    "Retain": "qwen35mm.contract.request",
    "Role": "qwen35mm.contract.messages",
    "SamplingParams": "qwen35mm.contract.sampling",
    "Text": "qwen35mm.contract.parts",
    "TextDelta": "qwen35mm.contract.events",
    "Tier": "qwen35mm.contract.cache_report",
    "TokenLogprob": "qwen35mm.contract.events",
    "ToolCall": "qwen35mm.contract.parts",
    "Video": "qwen35mm.contract.parts",
    "iter_media": "qwen35mm.contract.messages",
    "pin_plans": "qwen35mm.contract.messages",
}

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


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'qwen35mm.contract' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
