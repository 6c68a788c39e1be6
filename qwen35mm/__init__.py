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
    from qwen35mm.backends.scripting.functions import ToolResult
    from qwen35mm.backends.scripting.mcp_tools import McpTools
    from qwen35mm.backends.scripting.replies import ReplyStream
    from qwen35mm.backends.scripting.rounds import FunctionStream
    from qwen35mm.backends.scripting.texts import Score
    from qwen35mm.cache import CacheSettings
    from qwen35mm.contract import (
        CacheReport,
        Event,
        Finished,
        GenerationRequest,
        Image,
        MediaPlanned,
        Message,
        Prefilled,
        Progress,
        PromptRead,
        Result,
        SamplingParams,
        Text,
        TextDelta,
        TokenLogprob,
        ToolCall,
        Video,
        pin_plans,
    )
    from qwen35mm.engine import EngineSettings
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
    from qwen35mm_preprocess import MediaBudget, MediaError, MediaLimits, MediaPlan, VideoClip

__version__ = "0.2.0"

_HOMES = {
    "BatchError": "qwen35mm.errors",
    "CacheReport": "qwen35mm.contract",
    "CacheSettings": "qwen35mm.cache",
    "Chat": "qwen35mm.backends.scripting.chat",
    "CheckpointError": "qwen35mm.errors",
    "ConfigError": "qwen35mm.errors",
    "ContextTooLongError": "qwen35mm.errors",
    "EngineError": "qwen35mm.errors",
    "EngineSettings": "qwen35mm.engine",
    "Event": "qwen35mm.contract",
    "Finished": "qwen35mm.contract",
    "FunctionStream": "qwen35mm.backends.scripting.rounds",
    "GenerationRequest": "qwen35mm.contract",
    "Image": "qwen35mm.contract",
    "LoadedModel": "qwen35mm.model",
    "LocalBackend": "qwen35mm.backends.local",
    "McpTools": "qwen35mm.backends.scripting.mcp_tools",
    "MediaBudget": "qwen35mm_preprocess",
    "MediaError": "qwen35mm_preprocess",
    "MediaLimits": "qwen35mm_preprocess",
    "MediaPlan": "qwen35mm_preprocess",
    "MediaPlanned": "qwen35mm.contract",
    "Message": "qwen35mm.contract",
    "Prefilled": "qwen35mm.contract",
    "Progress": "qwen35mm.contract",
    "PromptError": "qwen35mm.errors",
    "PromptRead": "qwen35mm.contract",
    "QueueFullError": "qwen35mm.errors",
    "Qwen35mmError": "qwen35mm.errors",
    "RemoteBackend": "qwen35mm.backends.remote.backend",
    "ReplyStream": "qwen35mm.backends.scripting.replies",
    "RequestError": "qwen35mm.errors",
    "RequestTimeoutError": "qwen35mm.errors",
    "Result": "qwen35mm.contract",
    "SamplingParams": "qwen35mm.contract",
    "Score": "qwen35mm.backends.scripting.texts",
    "Text": "qwen35mm.contract",
    "TextDelta": "qwen35mm.contract",
    "TokenLogprob": "qwen35mm.contract",
    "ToolCall": "qwen35mm.contract",
    "ToolResult": "qwen35mm.backends.scripting.functions",
    "Video": "qwen35mm.contract",
    "VideoClip": "qwen35mm_preprocess",
    "load": "qwen35mm.model",
    "pin_plans": "qwen35mm.contract",
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
    "FunctionStream",
    "GenerationRequest",
    "Image",
    "LoadedModel",
    "LocalBackend",
    "McpTools",
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
    "ToolResult",
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
