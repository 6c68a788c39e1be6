"""One way to get an answer, whatever computes it: `stream(messages, params)` gives events up to `Finished`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from qwen35mm.backends.requests import History, ModelBackend, default_budget
from qwen35mm.cache import CacheSettings
from qwen35mm.engine import (
    AsyncEngine,
    Engine,
    EngineSettings,
    Event,
    Finished,
    Request,
    Retain,
    TextDelta,
)
from qwen35mm.model import LoadedModel, load
from qwen35mm.prompt import DEFAULT_MIN_SEGMENT, Message
from qwen35mm_preprocess import MediaBudget, MediaLimits

__all__ = ["LocalBackend", "default_budget"]

logger = logging.getLogger(__name__)


class LocalBackend(ModelBackend):
    """Answers with a model in this process.

    Args:
        loaded: the model.
        budget: what media may cost; None takes the defaults of the model's device.
        limits: what media are refused; None takes the defaults.
        settings: the engine's.
        cache: how much is kept of finished requests, and whether on disk too; None keeps it in memory.
        commit_history: whether a finished turn of a conversation is computed as its next turn will see it, while
            nothing else is to do.
        min_segment: fewest tokens between two places where a conversation is gone on from.

    Raises:
        ConfigError: a setting can't be used.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        budget: MediaBudget | None = None,
        limits: MediaLimits | None = None,
        settings: EngineSettings | None = None,
        cache: CacheSettings | None = None,
        commit_history: bool = True,
        min_segment: int = DEFAULT_MIN_SEGMENT,
    ) -> None:
        super().__init__(loaded, budget=budget, limits=limits, min_segment=min_segment)
        self.engine = AsyncEngine(lambda background: Engine(loaded, settings, cache, background=background))
        self.context_length = self.engine.context_length
        self._commit_history = commit_history
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="qwen35mm-history")
        self._commits: set[Future[None]] = set()

    @classmethod
    def load(
        cls, path_or_hub_id: str | Path, *, dtype: str = "auto", device: str = "auto", **options: Any
    ) -> LocalBackend:
        """Loads a checkpoint and starts its engine; `options` are the constructor's.

        Raises:
            CheckpointError, ConfigError: the checkpoint or a setting can't be used.
        """
        return cls(load(path_or_hub_id, dtype=dtype, device=device), **options)

    async def _answer(self, request: Request, history: History) -> AsyncGenerator[Event, None]:
        remember = functools.partial(self._remember, history, request.conversation, request.retain)
        events = self.engine.stream(request)
        del request
        answer: list[str] = []
        reasoning: list[str] = []
        stopped = True
        try:
            async for event in events:
                if isinstance(event, TextDelta):
                    (reasoning if event.channel == "reasoning" else answer).append(event.text)
                elif isinstance(event, Finished):
                    stopped = False
                    remember("".join(answer), "".join(reasoning))
                yield event
        except Exception:
            stopped = False
            raise
        finally:
            await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]
            if stopped:
                remember("".join(answer), "".join(reasoning))

    def memory(self) -> dict[str, int]:
        """Bytes that the cache holds, and its budgets: `kv_bytes`, `kv_budget_bytes`, and so `states` and `vision`."""
        return self.engine.memory_use()

    def commit_history(
        self,
        messages: Sequence[Message],
        *,
        conversation: str | None = None,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        tenant: str | None = None,
    ) -> None:
        """Computes a conversation that ends with a reply, in the background, so that its next turn begins at once.

        `stream` does this by itself; it is for replies that came from elsewhere. Arguments are `stream`'s.

        Raises:
            MediaError, PromptError: the messages can't become a prompt.
        """
        thinking = self._requests.thinks(self.loaded.generation, enable_thinking)
        self.engine.commit(
            self._requests.history(messages, thinking=thinking, tools=tools, conversation=conversation, tenant=tenant)
        )

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Blocks until no request, no history commit and no writing is left; False where the time was over first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._commits:
            if wait(list(self._commits), _left(deadline)).not_done:
                return False
        return self.engine.wait_idle(_left(deadline))

    def close(self) -> None:
        """Ends the engine's thread; running streams end with an error, and the disk gets what it lacks."""
        self._committer.shutdown(cancel_futures=True)
        self.engine.close()

    def _remember(self, history: History, conversation: str | None, retain: Retain, text: str, reasoning: str) -> None:
        """Has a conversation's history computed with its new reply."""
        messages = history.ended_by(text, reasoning)
        if not self._commit_history or retain != "conversation" or not messages[-1].text:
            return

        def commit() -> None:
            try:
                self.commit_history(
                    messages,
                    conversation=conversation,
                    enable_thinking=history.thinking,
                    tools=history.tools,
                    tenant=history.tenant,
                )
            except Exception:
                logger.exception("a conversation's history could not be kept for its next turn")

        try:
            future = self._committer.submit(commit)
        except RuntimeError:
            return  # closed meanwhile
        self._commits.add(future)
        future.add_done_callback(self._commits.discard)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0)
