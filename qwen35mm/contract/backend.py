"""The interface of every backend. `qwen35mm.backends` implements it; tests bring their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from qwen35mm.contract.events import Event
from qwen35mm.contract.messages import Message
from qwen35mm.contract.model_info import ModelInfo
from qwen35mm.contract.request import GenerationRequest
from qwen35mm_preprocess import MediaProcessor


class Backend(Protocol):
    """Answers requests; see `qwen35mm.backends.LocalBackend` for what each member means."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def media(self) -> MediaProcessor: ...

    @property
    def is_demo(self) -> bool: ...

    @property
    def idles(self) -> bool: ...

    @property
    def context_length(self) -> int: ...

    def wait_idle(self, timeout_s: float | None = None) -> bool: ...

    def count_tokens(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int: ...

    def memory(self) -> dict[str, Any]: ...

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]: ...
