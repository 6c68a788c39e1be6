"""A hypothesis state machine: everything that can happen to an engine, against an engine that keeps nothing."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qwen35mm.cache import PrefixCache
from qwen35mm.contract import Finished, Image, Message, SamplingParams
from qwen35mm.engine import CachedPrompt, Engine, EngineSettings, Request, StepOutput
from qwen35mm.errors import QueueFullError, RequestTimeoutError
from tests.engine.exact import (
    DENSE,
    Answer,
    Chat,
    Later,
    cache_settings,
    chat_model,
    cold,
    dialog,
    endless_replies,
    picture,
    recording,
    small_blocks,
    user,
    words,
)
from tests.engine.seen import counting, seen

BLOCK = 8
CONTEXT = 240
SETTINGS = EngineSettings(context_length=CONTEXT, chunk_tokens=16, slots=3, max_waiting=4, batch_invariant=True)
LONGEST_REPLY = 14
# No request takes longer than this once everything else stands still.
PATIENCE = 600

QUESTIONS = {
    "short": user(words("short", count=3)),
    "long": user(words("long", count=18)),
    "picture": user(Image(picture(1, (32, 64))), words("look", count=3)),
    "its twin": user(Image(picture(2, (32, 64))), words("look", count=3)),
}
SYSTEM = words("system", count=12)

# Whether a system message comes first, and the questions.
History = tuple[bool, tuple[str, ...]]
HISTORIES = st.tuples(st.booleans(), st.lists(st.sampled_from(sorted(QUESTIONS)), min_size=1, max_size=3).map(tuple))


@cache
def chat() -> Chat:
    return Chat(chat_model(DENSE), min_segment=16)


def messages_of(history: History) -> list[Message]:
    return dialog([QUESTIONS[name] for name in history[1]], system=SYSTEM if history[0] else None)


@cache
def request_of(history: History) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST_REPLY)
    return chat().request(messages_of(history), params=params)


@cache
def history_of(history: History) -> CachedPrompt:
    """The history with its last question answered, as the next question would find it."""
    following = messages_of((history[0], (*history[1], "short")))
    return chat().history(following[:-1])


def drop_unpinned(prefixes: PrefixCache) -> None:
    """Drops everything that no running sequence stands on."""
    for segment in prefixes._index.unpinned():
        prefixes._remove(segment)


@cache
def expected(history: History) -> Answer:
    """The reply of an engine that keeps nothing and serves nobody else."""
    return cold(chat().loaded, request_of(history), SETTINGS)


class EngineMachine(RuleBasedStateMachine):
    """One engine at a time, and what its requests must come to."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.stack.enter_context(small_blocks(BLOCK))
        self.patch.setattr("qwen35mm.engine.runtime._root", lambda *args: bytes(range(32)))
        self.stack.enter_context(endless_replies(chat().loaded))
        counting(self.patch)
        self.logits = self.stack.enter_context(recording())
        self.folder = Path(tempfile.mkdtemp(prefix="qwen35mm-machine-"))
        self.stack.callback(shutil.rmtree, self.folder)
        self.now = 0.0
        self.open: dict[str, tuple[Request, History]] = {}
        self.asked: list[History] = []
        self.num_restarts = 0
        self.num_requests = 0

    @initialize(
        num_tokens=st.sampled_from([CONTEXT, CONTEXT, CONTEXT + 3 * BLOCK, 2 * CONTEXT]),
        num_states=st.sampled_from([0, 2, 4, 50]),
        vision_tokens=st.sampled_from([0, 2, 50]),
        host_tokens=st.sampled_from([0, 0, 100, 1000]),
        disk_bytes=st.sampled_from([None, 60_000, 300_000, 1 << 30]),
    )
    def begin(
        self, num_tokens: int, num_states: int, vision_tokens: int, host_tokens: int, disk_bytes: int | None
    ) -> None:
        loaded = chat().loaded
        config, dtype = loaded.config, loaded.model.dtype
        self.cache = cache_settings(
            loaded,
            num_tokens=num_tokens,
            state_bytes=num_states * config.state_bytes(dtype),
            vision_bytes=vision_tokens * config.text.hidden_size * dtype.itemsize,
            host_kv_bytes=host_tokens * config.kv_bytes_per_token(dtype),
            directory=None if disk_bytes is None else self.folder,
            disk_bytes=disk_bytes or 0,
        )
        self.make_engine()

    def make_engine(self) -> None:
        self.background = Later()
        self.engine = Engine(
            chat().loaded,
            SETTINGS,
            self.cache,
            reader=self.background,
            writer=self.background,
            clock=lambda: self.now,
        )

    # What people do.

    @rule(
        histories=st.lists(HISTORIES, min_size=1, max_size=3),
        retain=st.sampled_from(["conversation", "conversation", "shared", "nothing"]),
        max_tokens=st.sampled_from([1, LONGEST_REPLY]),
        patience=st.sampled_from([None, None, None, 6, 24]),
    )
    def ask(self, histories: list[History], **options: Any) -> None:
        for history in histories:
            self.submit(history, **options)

    @precondition(lambda self: self.asked)
    @rule(
        data=st.data(),
        how=st.sampled_from(["again", "edit", "go on", "go on"]),
        question=st.sampled_from(sorted(QUESTIONS)),
        chat_name=st.sampled_from([None, "one", "two"]),
    )
    def come_back(self, data: st.DataObject, how: str, question: str, **options: Any) -> None:
        has_system, names = data.draw(st.sampled_from(self.asked))
        if how == "edit":
            at = data.draw(st.integers(0, len(names) - 1))
            names = (*names[:at], question, *names[at + 1 :])
        elif how == "go on":
            names = (*names[:2], question)
        self.submit((has_system, names), **options)

    def submit(
        self,
        history: History,
        *,
        retain: Any = "conversation",
        max_tokens: int = LONGEST_REPLY,
        patience: int | None = None,
        chat_name: str | None = None,
    ) -> None:
        template = request_of(history)
        self.num_requests += 1
        request = replace(
            template,
            id=f"request {self.num_requests}",
            retain=retain,
            conversation=chat_name,
            params=template.params.with_overrides(max_tokens=max_tokens),
            deadline_s=None if patience is None else self.now + patience,
        )
        try:
            self.engine.add(request)
        except QueueFullError:
            assert self.engine.num_waiting == SETTINGS.max_waiting
            return
        self.open[request.id] = (request, history)
        self.asked.append(history)

    @rule(history=HISTORIES, chat_name=st.sampled_from([None, "one", "two"]), steps=st.sampled_from([0, 0, 6, 12, 18]))
    def commit(self, history: History, chat_name: str | None, steps: int) -> None:
        self.engine.commit(replace(history_of(history), conversation=chat_name))
        self.asked.append(history)
        self.step_and_read(steps)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.engine.cancel(request_id)
        del self.open[request_id]
        seen["cancelled"] += 1

    # What the engine does.

    @rule(count=st.integers(1, 16), reads=st.integers(0, 3))
    def step(self, count: int, reads: int) -> None:
        self.background.work(reads)
        for _ in range(count):
            self.one_step()

    @rule(count=st.integers(1, 6))
    def step_and_read(self, count: int) -> None:
        for _ in range(count):
            self.background.work(len(self.background.waiting))
            self.one_step()

    @rule()
    def finish(self) -> None:
        """Everybody gets a reply, and what is left to do in the background gets done."""
        for _ in range(PATIENCE):
            if not self.engine.has_work:
                break
            self.background.work(1)
            self.one_step()
        assert not self.engine.has_work, "nobody moves any more"
        assert not self.open

    def one_step(self) -> None:
        self.now += 1
        num_running = len(self.engine._decoder.running)
        for output in self.engine.step():
            self.take(output, num_running)
        self.engine.check_integrity()

    def take(self, output: StepOutput, num_running: int) -> None:
        assert output.request_id in self.open, "an event of a request that is over"
        request, history = self.open[output.request_id]
        if isinstance(output.event, RequestTimeoutError):
            assert request.deadline_s is not None
            assert request.deadline_s <= self.now
            seen["ended late"] += 1
            del self.open[request.id]
        elif isinstance(output.event, Exception):
            raise output.event
        elif isinstance(output.event, Finished):
            self.compare(request, history, output.event)
            del self.open[request.id]
            seen["finished in company"] += num_running > 1
            seen["finished after a restart"] += self.num_restarts > 0
            for tier in output.event.result.cache.cached_from:
                seen[f"hit {tier}"] += 1
            seen["kept embeddings"] += output.event.result.cache.num_cached_units > 0

    def compare(self, request: Request, history: History, event: Finished) -> None:
        reference, result = expected(history), event.result
        size = request.params.max_tokens
        assert result.token_ids == reference.result.token_ids[:size]
        logits = torch.stack(self.logits[request.id])
        assert torch.equal(logits[-len(result.token_ids) :], reference.logits[:size])

    # What becomes of the cache.

    @rule(
        data=st.data(),
        how=st.sampled_from(["reclaim", "clear", "state", "segment", "damage", "damage", "kill"]),
    )
    def mishap(self, data: st.DataObject, how: str) -> None:
        prefixes = self.engine.runtime.prefixes
        if how == "reclaim":
            prefixes.reclaim(data.draw(st.integers(1, CONTEXT // BLOCK)))
        elif how == "clear":
            drop_unpinned(prefixes)
        elif how == "damage":
            self.damage(data)
        elif how == "kill":
            self.restart(flush=False, num_writes=data.draw(st.integers(0, 4)))
        else:
            self.lose(data, how)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), how=st.sampled_from(["flush", "host"]), is_finished=st.booleans())
    def move_away_and_ask_again(self, data: st.DataObject, how: str, is_finished: bool) -> None:
        """What left the device comes back from where it went."""
        if is_finished:
            self.finish()
        if how == "flush":
            self.restart(flush=True, num_writes=0)
        else:
            self.engine.runtime.prefixes.reclaim(CONTEXT // BLOCK)
        self.submit(data.draw(st.sampled_from(self.asked)))

    def lose(self, data: st.DataObject, how: str) -> None:
        prefixes = self.engine.runtime.prefixes
        is_state = how == "state"
        segments = [s for s in prefixes._index if (s.address in prefixes.states if is_state else not s.pins)]
        if not segments:
            return
        segment = data.draw(st.sampled_from(segments))
        if is_state:
            prefixes.states.evict(segment.address)
            prefixes._prune(segment)
        else:
            prefixes._remove(segment)

    def restart(self, *, flush: bool, num_writes: int) -> None:
        """A clean end, or one in the middle of everything, with some of the writing done."""
        if flush:
            self.background.at_once = True
            self.background.work(len(self.background.waiting))
            self.engine.flush()
        else:
            self.background.work(num_writes)
        self.open.clear()
        self.num_restarts += 1
        self.make_engine()

    def damage(self, data: st.DataObject) -> None:
        if self.engine.runtime.disk is None:
            return
        for _ in range(4):
            self.engine.runtime.disk.write_next()
        self.background.work(len(self.background.waiting))
        files = sorted(path for path in self.folder.rglob("*") if path.is_file() and path.stat().st_size)
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        content = path.read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        how = data.draw(st.sampled_from(["truncate", "flip", "delete", "empty", "swap"]))
        if how == "delete":
            path.unlink()
        elif how == "swap":
            path.write_bytes(data.draw(st.sampled_from(files)).read_bytes())
        else:
            flipped = content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]
            path.write_bytes({"truncate": content[:at], "empty": b"", "flip": flipped}[how])
        seen["damaged a file"] += 1

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            running = {request.id for request in self.engine._waiting.values()} | set(self.engine._running)
            assert running == set(self.open)

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.end()
        finally:
            self.stack.close()

    def end(self) -> None:
        """With everybody gone, nothing is held."""
        for request_id in list(self.open):
            self.engine.cancel(request_id)
        self.engine._commits.clear()
        self.engine.check_integrity()
        runtime = self.engine.runtime
        drop_unpinned(runtime.prefixes)
        self.engine.check_integrity()
        assert runtime.pools.kv.allocator.num_free == runtime.pools.kv.allocator.num_blocks
        assert runtime.pools.states.num_free == SETTINGS.slots + 1
        assert (runtime.prefixes.num_segments, runtime.prefixes.states.num_bytes) == (0, 0)
