"""From a prompt to a stream of events: scheduling, running the model, sampling, text."""

from qwen35mm.engine.engine import Engine, EngineSettings
from qwen35mm.engine.events import (
    Event,
    Finished,
    MediaPlanned,
    MediaReport,
    Progress,
    Result,
    TextDelta,
)
from qwen35mm.engine.request import Request, StepOutput
from qwen35mm.engine.shell import AsyncEngine

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineSettings",
    "Event",
    "Finished",
    "MediaPlanned",
    "MediaReport",
    "Progress",
    "Request",
    "Result",
    "StepOutput",
    "TextDelta",
]
