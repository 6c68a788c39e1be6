from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import asset_path
from qwen35mm.engine.events import Event, MediaPlanned
from qwen35mm.prompt import Message
from qwen35mm.sampling import SamplingParams
from qwen35mm.ui.run import BUG_MESSAGE, ReplyRun
from qwen35mm.ui.state import Conversation, Turn
from tests.ui.fake_backend import FakeBackend, make_plan, make_result


def start(backend: FakeBackend, text: str, files: tuple[Path, ...] = ()) -> tuple[ReplyRun, Turn]:
    conversation = Conversation()
    turn = conversation.begin(text, files)
    return ReplyRun(backend, conversation, turn, SamplingParams(), False), turn


async def finish(run: ReplyRun) -> int:
    """How often the run wanted to be drawn."""
    return len([None async for _ in run.updates(interval_s=0.01, heartbeat_s=0.05)])


async def test_a_reply_is_collected() -> None:
    backend = FakeBackend()
    run, turn = start(backend, "think Hello you")
    await finish(run)
    assert turn.reply.status == "finished"
    assert turn.reply.reasoning == "Let me see. That is it."
    assert turn.reply.answer == "Hello you "
    assert turn.reply.result == make_result("Hello you")
    assert turn.reply.progress is None
    assert turn.reply.thinking_s is not None


async def test_updates_are_bundled() -> None:
    """500 words a second, drawn at most every 50 ms."""
    backend = FakeBackend()
    run, turn = start(backend, "slow")
    loop = asyncio.get_running_loop()
    times_s = []
    async for _ in run.updates(interval_s=0.05):
        times_s.append(loop.time())
        if len(times_s) == 5:
            run.stop()
    assert min(later - earlier for earlier, later in pairwise(times_s[:5])) >= 0.045
    assert len(turn.reply.answer.split()) > len(times_s)


async def test_without_news_there_is_a_heartbeat() -> None:
    backend = FakeBackend()
    run, _ = start(backend, "phases")
    beats = 0
    async for _ in run.updates(interval_s=0.0, heartbeat_s=0.01):
        beats += 1
        if beats == 5:
            run.stop()
    assert beats >= 5


async def test_stop_closes_the_stream_and_keeps_the_text() -> None:
    backend = FakeBackend()
    run, turn = start(backend, "slow")
    open_streams = []
    async for _ in run.updates(interval_s=0.0):
        open_streams.append(backend.active)
        if "word" in turn.reply.answer:
            run.stop()
    assert set(open_streams[:-1]) == {1}
    assert open_streams[-1] == 0
    assert turn.reply.status == "stopped"
    assert turn.is_kept


async def test_stop_before_the_first_step() -> None:
    backend = FakeBackend()
    run, turn = start(backend, "slow")
    run.stop()
    assert await finish(run) == 1
    assert turn.reply.status == "stopped"
    assert backend.calls == []


async def test_an_error_of_ours_is_quoted() -> None:
    run, turn = start(FakeBackend(), "refuse It is too long.")
    await finish(run)
    assert (turn.reply.status, turn.reply.error) == ("failed", "It is too long.")


async def test_any_other_error_is_logged_and_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "qwen35mm.ui.run"):
        run, turn = start(FakeBackend(), "break")
        await finish(run)
    assert (turn.reply.status, turn.reply.error) == ("failed", BUG_MESSAGE)
    assert "secret detail" in caplog.text


async def test_a_broken_file_fails_without_reaching_the_backend(tmp_path: Path) -> None:
    broken = tmp_path / "clip.mp4"
    broken.write_bytes(b"nothing")
    backend = FakeBackend()
    run, turn = start(backend, "What is it?", (broken,))
    await finish(run)
    assert turn.reply.status == "failed"
    assert "'clip.mp4'" in (turn.reply.error or "")
    assert str(tmp_path) not in (turn.reply.error or "")
    assert backend.calls == []


class NotedBackend(FakeBackend):
    """Notes what was reduced, and warns of every medium in each turn, as the real one does."""

    async def stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **_: Any
    ) -> AsyncIterator[Event]:
        plans = tuple(make_plan(part, notes=("made smaller",)) for message in messages for part in message.media)
        yield MediaPlanned(plans, ("a frame was unreadable",))
        async for event in self._script(messages[-1]):
            yield event


async def test_what_was_reduced_is_told_once() -> None:
    picture = asset_path("samples") / "one-shape.png"
    backend, conversation = NotedBackend(), Conversation()
    notes = []
    for files in ((picture,), ()):
        turn = conversation.begin("echo Hello", files)
        await finish(ReplyRun(backend, conversation, turn, SamplingParams(), False))
        notes.append(turn.reply.notes)
    assert notes == [("made smaller", "a frame was unreadable"), ()]
