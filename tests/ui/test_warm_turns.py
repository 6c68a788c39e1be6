"""The page's turns on the real engine: what one turn leaves behind is what the next one asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.backends import LocalBackend
from qwen35mm.engine import CachedPrompt
from qwen35mm.engine.events import CacheReport, Event, TextDelta
from qwen35mm.prompt import Message
from qwen35mm.ui.handlers import ChatHandlers
from qwen35mm.ui.render import status_line
from qwen35mm.ui.state import Conversation
from qwen35mm_preprocess import MediaProcessor

PICTURE = asset_path("samples") / "three-shapes.png"
QUESTIONS = ("What do you see?", "How many shapes are there?", "What color is the star?")
# The demo's prompts are short: with the usual least length no part of them would be kept.
MIN_SEGMENT = 8


class WatchedBackend:
    """The real one, with notes on what it was asked for and on what it commits.

    `pause_in_answer` holds a stream before the next event once there are words of an answer.
    """

    def __init__(self, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self._backend = backend
        self.pause_in_answer = False
        self.asked: list[list[Message]] = []
        self.committed: list[list[Message]] = []
        self.num_history_tokens: list[int] = []
        self.num_decoded = 0
        commit, compute = backend.commit_history, backend.engine.commit
        prepare = MediaProcessor.prepare

        def noted_commit(messages: Sequence[Message], **how: Any) -> None:
            self.committed.append(list(messages))
            commit(messages, **how)

        def noted_compute(source: CachedPrompt) -> None:
            self.num_history_tokens.append(len(source.prompt.token_ids))
            compute(source)

        def noted_prepare(*args: Any, **how: Any) -> Any:
            self.num_decoded += 1
            return prepare(*args, **how)

        monkeypatch.setattr(backend, "commit_history", noted_commit)
        monkeypatch.setattr(backend.engine, "commit", noted_compute)
        monkeypatch.setattr(MediaProcessor, "prepare", noted_prepare)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def stream(self, messages: Sequence[Message], *args: Any, **how: Any) -> AsyncIterator[Event]:
        self.asked.append(list(messages))
        events = self._backend.stream(messages, *args, **how)
        try:
            async for event in events:
                yield event
                if self.pause_in_answer and isinstance(event, TextDelta) and event.channel == "answer":
                    await asyncio.Event().wait()
        finally:
            await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    def wait_committed(self) -> None:
        assert self._backend.wait_idle(60), "the engine is still busy"


@pytest.fixture
def demo() -> Iterator[LocalBackend]:
    backend = LocalBackend.load(demo_model_path(), min_segment=MIN_SEGMENT)
    yield backend
    backend.close()


@pytest.fixture
def backend(demo: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> WatchedBackend:
    return WatchedBackend(demo, monkeypatch)


class Page:
    """A session without a browser."""

    def __init__(self, backend: WatchedBackend, *, thinking: bool = False, shared: bool = False) -> None:
        self.conversation = Conversation()
        self._backend = backend
        self._handlers = ChatHandlers(backend, [], shared=shared)  # pyright: ignore[reportArgumentType]
        self._settings = (thinking, 0.0, "", "")

    async def ask(self, text: str, *files: Path, stop: bool = False) -> None:
        """Asks, and waits for the commit; with `stop` the answer is stopped after its first words."""
        self._backend.pause_in_answer = stop
        entered = {"text": text, "files": [str(file) for file in files]}
        async for _ in self._handlers.send(entered, self.conversation, *self._settings):
            if stop and self.conversation.turns[-1].reply.answer:
                await self._handlers.stop(self.conversation)
        await asyncio.to_thread(self._backend.wait_committed)

    async def ask_again(self) -> None:
        async for _ in self._handlers.retry(self.conversation, *self._settings):
            pass
        await asyncio.to_thread(self._backend.wait_committed)

    async def new_chat(self) -> None:
        await self._handlers.new_chat(self.conversation)

    @property
    def cache(self) -> CacheReport:
        """Of the last answer."""
        result = self.conversation.turns[-1].reply.result
        assert result is not None
        return result.cache

    @property
    def num_prompt_tokens(self) -> int:
        result = self.conversation.turns[-1].reply.result
        assert result is not None
        return result.num_prompt_tokens


@pytest.mark.parametrize("thinking", [False, True])
async def test_the_next_turn_asks_for_what_was_committed(backend: WatchedBackend, thinking: bool) -> None:
    page = Page(backend, thinking=thinking)
    for number, question in enumerate(QUESTIONS):
        await page.ask(question, *([PICTURE] if number == 0 else []))
        reply = page.conversation.turns[-1].reply
        assert reply.status == "finished"
        assert bool(reply.reasoning) is thinking
    assert len(backend.asked) == len(backend.committed) == len(QUESTIONS)
    for later, committed in zip(backend.asked[1:], backend.committed, strict=False):
        assert later[:-1] == committed
    assert backend.num_decoded == 1
    assert page.cache.num_cached_tokens > backend.num_history_tokens[-2] - MIN_SEGMENT
    shown = f"{page.cache.num_cached_tokens:,} of {page.num_prompt_tokens:,} prompt tokens from the cache"
    assert shown in status_line(page.conversation)


@pytest.mark.parametrize("thinking", [False, True])
async def test_a_stopped_answer_is_committed_as_far_as_it_was_shown(backend: WatchedBackend, thinking: bool) -> None:
    page = Page(backend, thinking=thinking)
    await page.ask(QUESTIONS[0], PICTURE, stop=True)
    reply = page.conversation.turns[-1].reply
    assert reply.status == "stopped"
    assert reply.answer
    await page.ask(QUESTIONS[1])
    assert backend.committed[0][-1].text == reply.answer
    assert backend.asked[1][:-1] == backend.committed[0]
    assert page.cache.num_cached_tokens > backend.num_history_tokens[0] - MIN_SEGMENT
    assert backend.num_decoded == 1


async def test_another_answer_to_the_same_question_reads_nothing_again(backend: WatchedBackend) -> None:
    page = Page(backend)
    await page.ask(QUESTIONS[0], PICTURE)
    first = page.conversation.turns[-1].reply.answer
    await page.ask_again()
    assert page.conversation.turns[-1].reply.answer == first
    assert page.cache.num_cached_tokens > 0
    assert backend.num_decoded == 1


async def test_a_known_picture_in_a_new_chat(backend: WatchedBackend) -> None:
    page = Page(backend)
    await page.ask(QUESTIONS[0], PICTURE)
    await page.new_chat()
    await page.ask(QUESTIONS[1], PICTURE)
    assert page.cache.num_cached_tokens > 0
    assert page.cache.num_encoded_units == 0


async def test_on_a_shared_server_nobody_finds_another_one_s_picture(backend: WatchedBackend) -> None:
    """Nor does a session lose its own with a new chat."""
    one, other = Page(backend, shared=True), Page(backend, shared=True)
    await one.ask(QUESTIONS[0], PICTURE)
    await other.ask(QUESTIONS[0], PICTURE)
    assert (other.cache.num_cached_tokens, other.cache.num_cached_units) == (0, 0)
    assert other.cache.num_encoded_units == 1
    await one.new_chat()
    await one.ask(QUESTIONS[0], PICTURE)
    assert one.cache.num_cached_tokens > 0
    assert one.cache.num_encoded_units == 0
