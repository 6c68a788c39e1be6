"""What the engine is asked to do, and what it says back."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from qwen35mm.engine.events import Event
from qwen35mm.errors import Qwen35mmError
from qwen35mm.prompt import Prompt
from qwen35mm.sampling import SamplingParams
from qwen35mm_preprocess import PreparedMedia


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and how to answer it.

    `media` are the prompt's images and videos in order of appearance. `arrival_s` (of `time.monotonic`)
    is where the time to the first token is counted from.
    """

    prompt: Prompt
    params: SamplingParams
    media: tuple[PreparedMedia, ...] = ()
    arrival_s: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class StepOutput:
    """One event of one request; an error is the last that a request gives."""

    request_id: str
    event: Event | Qwen35mmError
