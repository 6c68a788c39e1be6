"""Chat with images and videos on your own machine, with the Qwen3.5 family of hybrid models.

    from qwen35mm import Image, LocalBackend, Message, Text

    backend = LocalBackend.load("path/or/hub-id")
    async for event in backend.stream([Message("user", (Image("photo.jpg"), Text("What is this?")))]):
        ...

The names below are loaded when they are first used: importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.cache import CacheReport, CacheSettings
    from qwen35mm.engine import EngineSettings, Event, Finished, MediaPlanned, Prefilled, Progress, Result, TextDelta
    from qwen35mm.errors import Qwen35mmError
    from qwen35mm.model import LoadedModel, load
    from qwen35mm.prompt import Image, Message, Text, ToolCall, Video, pin_plans
    from qwen35mm.sampling import SamplingParams
    from qwen35mm_preprocess import MediaBudget, MediaError, MediaLimits, MediaPlan

__version__ = "0.1.0"

_HOMES = {
    "CacheReport": "qwen35mm.cache",
    "CacheSettings": "qwen35mm.cache",
    "EngineSettings": "qwen35mm.engine",
    "Event": "qwen35mm.engine",
    "Finished": "qwen35mm.engine",
    "Image": "qwen35mm.prompt",
    "LoadedModel": "qwen35mm.model",
    "LocalBackend": "qwen35mm.backends.local",
    "MediaBudget": "qwen35mm_preprocess",
    "MediaError": "qwen35mm_preprocess",
    "MediaLimits": "qwen35mm_preprocess",
    "MediaPlan": "qwen35mm_preprocess",
    "MediaPlanned": "qwen35mm.engine",
    "Message": "qwen35mm.prompt",
    "Prefilled": "qwen35mm.engine",
    "Progress": "qwen35mm.engine",
    "Qwen35mmError": "qwen35mm.errors",
    "Result": "qwen35mm.engine",
    "SamplingParams": "qwen35mm.sampling",
    "Text": "qwen35mm.prompt",
    "TextDelta": "qwen35mm.engine",
    "ToolCall": "qwen35mm.prompt",
    "Video": "qwen35mm.prompt",
    "load": "qwen35mm.model",
    "pin_plans": "qwen35mm.prompt",
}

__all__ = [
    "CacheReport",
    "CacheSettings",
    "EngineSettings",
    "Event",
    "Finished",
    "Image",
    "LoadedModel",
    "LocalBackend",
    "MediaBudget",
    "MediaError",
    "MediaLimits",
    "MediaPlan",
    "MediaPlanned",
    "Message",
    "Prefilled",
    "Progress",
    "Qwen35mmError",
    "Result",
    "SamplingParams",
    "Text",
    "TextDelta",
    "ToolCall",
    "Video",
    "__version__",
    "load",
    "pin_plans",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'qwen35mm' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
