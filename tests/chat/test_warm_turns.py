"""The page's turns on the real engine: what one turn leaves behind is what the next one asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.model_backend import Turn
from qwen35mm.chat.records import Node
from qwen35mm.chat.turns import Person
from qwen35mm.engine import CachedPrompt
from qwen35mm.engine.events import Event, TextDelta
from qwen35mm.prompt import Message
from qwen35mm_preprocess import MediaProcessor
from tests.chat.chat_kit import ME, PICTURE, ChatKit
from tests.chat.english import english

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
        history, compute = backend.history, backend.engine.commit
        prepare = MediaProcessor.prepare

        def noted_history(turn: Turn) -> CachedPrompt:
            self.committed.append(list(turn.messages))
            return history(turn)

        def noted_compute(source: CachedPrompt) -> None:
            self.num_history_tokens.append(len(source.prompt.token_ids))
            compute(source)

        def noted_prepare(*args: Any, **how: Any) -> Any:
            self.num_decoded += 1
            return prepare(*args, **how)

        monkeypatch.setattr(backend, "history", noted_history)
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


class Session:
    """One person's chat."""

    def __init__(self, kit: ChatKit, backend: WatchedBackend, person: Person = ME, *, thinking: bool = False) -> None:
        self._kit, self._backend, self._person = kit, backend, person
        self._settings = {"temperature": 0, "thinking": thinking}
        self.conversation: str | None = None
        self._last: str | None = None

    async def ask(self, text: str, *files: Path, stop: bool = False, edit: bool = False) -> None:
        """Asks, and waits for the commit; with `stop` the answer is stopped after its first words."""
        self._backend.pause_in_answer = stop
        attachments = [self._kit.attach(path, self._person) for path in files]
        self.conversation, self._last = await self._kit.send(
            text,
            self.conversation,
            None if edit else self._last,
            files=attachments,
            settings=self._settings,
            person=self._person,
        )
        await self._follow(stop)

    async def ask_again(self) -> None:
        assert self.conversation is not None
        question = self._kit.path(self.conversation, self._person)[-2].id
        self._last = await self._kit.turns.answer_again(self._person, self.conversation, question)
        await self._follow(False)

    def new_chat(self) -> None:
        self.conversation = self._last = None

    async def _follow(self, stop: bool) -> None:
        assert self._last is not None
        await self._kit.watch(self._last, self._person, until=lambda view: stop and view["blocks"])
        await self._kit.api.stop(self._person, self._last)
        await asyncio.to_thread(self._backend.wait_committed)

    @property
    def reply(self) -> Node:
        """The last answer, as it is stored."""
        assert self.conversation is not None
        assert self._last is not None
        return self._kit.node(self.conversation, self._last, self._person)

    @property
    def stats(self) -> dict[str, Any]:
        """What the last answer cost."""
        assert self.reply.stats is not None
        return dict(self.reply.stats)


@pytest.fixture
def kit(backend: WatchedBackend, tmp_path: Path) -> ChatKit:
    return ChatKit(tmp_path, backend)


@pytest.mark.parametrize("thinking", [False, True])
async def test_the_next_turn_asks_for_what_was_committed(kit: ChatKit, backend: WatchedBackend, thinking: bool) -> None:
    session = Session(kit, backend, thinking=thinking)
    for number, question in enumerate(QUESTIONS):
        await session.ask(question, *([PICTURE] if number == 0 else []))
        assert session.reply.status == "finished"
        assert bool(session.reply.reasoning) is thinking
    assert len(backend.asked) == len(backend.committed) == len(QUESTIONS)
    for later, committed in zip(backend.asked[1:], backend.committed, strict=False):
        assert later[:-1] == committed
    assert backend.num_decoded == 1
    assert session.stats["num_cached_tokens"] > backend.num_history_tokens[-2] - MIN_SEGMENT
    assert session.conversation is not None
    stats = (await kit.api.open(ME, session.conversation))["messages"][-1]["stats"]
    shown = [english(part) for part in stats["line"]]
    num_cached, num_prompt = session.stats["num_cached_tokens"], session.stats["num_prompt_tokens"]
    assert f"{num_cached:,} of {num_prompt:,} prompt tokens cached" in shown


@pytest.mark.parametrize("thinking", [False, True])
async def test_a_stopped_answer_is_committed_as_far_as_it_was_stored(
    kit: ChatKit, backend: WatchedBackend, thinking: bool
) -> None:
    session = Session(kit, backend, thinking=thinking)
    await session.ask(QUESTIONS[0], PICTURE, stop=True)
    stopped = session.reply
    assert stopped.status == "stopped"
    assert stopped.text
    await session.ask(QUESTIONS[1])
    assert backend.committed[0][-1].text == stopped.text
    assert backend.asked[1][:-1] == backend.committed[0]
    assert session.stats["num_cached_tokens"] > backend.num_history_tokens[0] - MIN_SEGMENT
    assert backend.num_decoded == 1


async def test_another_answer_to_the_same_question_reads_nothing_again(kit: ChatKit, backend: WatchedBackend) -> None:
    session = Session(kit, backend)
    await session.ask(QUESTIONS[0], PICTURE)
    first = session.reply.text
    await session.ask_again()
    assert session.reply.text == first
    assert session.stats["num_cached_tokens"] > 0
    assert backend.num_decoded == 1


@pytest.mark.parametrize("how", ["edited question", "new chat"])
async def test_a_known_picture_is_not_encoded_again(kit: ChatKit, backend: WatchedBackend, how: str) -> None:
    session = Session(kit, backend)
    await session.ask(QUESTIONS[0], PICTURE)
    if how == "new chat":
        session.new_chat()
    await session.ask(QUESTIONS[1], PICTURE, edit=True)
    assert session.stats["num_cached_tokens"] > 0
    assert session.stats["num_encoded_units"] == 0
    assert backend.num_decoded == (1 if how == "edited question" else 2)


async def test_on_a_shared_server_nobody_finds_another_one_s_picture(kit: ChatKit, backend: WatchedBackend) -> None:
    """Nor does a person lose the own with a new chat."""
    one, other = (Session(kit, backend, Person(name, name)) for name in ("one", "other"))
    await one.ask(QUESTIONS[0], PICTURE)
    await other.ask(QUESTIONS[0], PICTURE)
    assert (other.stats["num_cached_tokens"], other.stats["num_cached_units"]) == (0, 0)
    assert other.stats["num_encoded_units"] == 1
    one.new_chat()
    await one.ask(QUESTIONS[0], PICTURE)
    assert one.stats["num_cached_tokens"] > 0
    assert one.stats["num_encoded_units"] == 0
