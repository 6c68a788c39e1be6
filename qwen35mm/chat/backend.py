"""What the page needs of a backend. Each of `qwen35mm.backends` has it; tests bring their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol

from qwen35mm.contract import Event, Message, ModelInfo, SamplingParams
from qwen35mm_preprocess import MediaProcessor


class ChatBackend(Protocol):
    """Answers conversations; see `qwen35mm.backends.LocalBackend` for what each member means."""

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

    def count_tokens(self, messages: Sequence[Message], *, enable_thinking: bool | None = None) -> int: ...

    def memory(self) -> dict[str, Any]: ...

    def stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool | None = None,
        conversation: str | None = None,
        retain: Literal["conversation", "memory", "shared", "nothing"] = "conversation",
        tenant: str | None = None,
        continue_reply: bool = False,
    ) -> AsyncIterator[Event]: ...
