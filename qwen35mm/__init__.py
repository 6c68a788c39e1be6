"""Chat with images and videos on your own machine, with the Qwen3.5 family of hybrid models.

    from qwen35mm import LocalBackend

    with LocalBackend.load("path/or/hub-id") as model:
        print(model.chat().ask("What is this?", images="photo.jpg"))

docs/python.md is the guide. The names below are loaded when they are first used: importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35mm.backends.local import LocalBackend
    from qwen35mm.backends.remote.backend import RemoteBackend
    from qwen35mm.backends.scripting.chat import Chat
    from qwen35mm.backends.scripting.replies import ReplyStream
    from qwen35mm.backends.scripting.texts import Score
    from qwen35mm.cache import CacheReport, CacheSettings
    from qwen35mm.engine import (
        EngineSettings,
        Event,
        Finished,
        MediaPlanned,
        Prefilled,
        Progress,
        PromptRead,
        Result,
        TextDelta,
        TokenLogprob,
    )
    from qwen35mm.errors import (
        BatchError,
        CheckpointError,
        ConfigError,
        ContextTooLongError,
        EngineError,
        PromptError,
        QueueFullError,
        Qwen35mmError,
        RequestError,
        RequestTimeoutError,
    )
    from qwen35mm.model import LoadedModel, load
    from qwen35mm.prompt import Image, Message, Text, ToolCall, Video, pin_plans
    from qwen35mm.sampling import SamplingParams
    from qwen35mm_preprocess import MediaBudget, MediaError, MediaLimits, MediaPlan, VideoClip

__version__ = "0.1.0"

_HOMES = {
    "BatchError": "qwen35mm.errors",
    "CacheReport": "qwen35mm.cache",
    "CacheSettings": "qwen35mm.cache",
    "Chat": "qwen35mm.backends.scripting.chat",
    "CheckpointError": "qwen35mm.errors",
    "ConfigError": "qwen35mm.errors",
    "ContextTooLongError": "qwen35mm.errors",
    "EngineError": "qwen35mm.errors",
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
    "PromptError": "qwen35mm.errors",
    "PromptRead": "qwen35mm.engine",
    "QueueFullError": "qwen35mm.errors",
    "Qwen35mmError": "qwen35mm.errors",
    "RemoteBackend": "qwen35mm.backends.remote.backend",
    "ReplyStream": "qwen35mm.backends.scripting.replies",
    "RequestError": "qwen35mm.errors",
    "RequestTimeoutError": "qwen35mm.errors",
    "Result": "qwen35mm.engine",
    "SamplingParams": "qwen35mm.sampling",
    "Score": "qwen35mm.backends.scripting.texts",
    "Text": "qwen35mm.prompt",
    "TextDelta": "qwen35mm.engine",
    "TokenLogprob": "qwen35mm.engine",
    "ToolCall": "qwen35mm.prompt",
    "Video": "qwen35mm.prompt",
    "VideoClip": "qwen35mm_preprocess",
    "load": "qwen35mm.model",
    "pin_plans": "qwen35mm.prompt",
}

__all__ = [
    "BatchError",
    "CacheReport",
    "CacheSettings",
    "Chat",
    "CheckpointError",
    "ConfigError",
    "ContextTooLongError",
    "EngineError",
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
    "PromptError",
    "PromptRead",
    "QueueFullError",
    "Qwen35mmError",
    "RemoteBackend",
    "ReplyStream",
    "RequestError",
    "RequestTimeoutError",
    "Result",
    "SamplingParams",
    "Score",
    "Text",
    "TextDelta",
    "TokenLogprob",
    "ToolCall",
    "Video",
    "VideoClip",
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
