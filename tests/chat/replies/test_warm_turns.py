"""The page's turns on the real engine: what one turn leaves behind is what the next one asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.chat.replies.titles import Titles
from qwen35mm.chat.replies.turns import Person
from qwen35mm.contract import Event, GenerationRequest, Image, Message, Text, TextDelta
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess import MediaProcessor
from qwen35mm_preprocess.say import english
from tests.chat.chat_kit import ME, PICTURE, Asked, ChatKit

QUESTIONS = ("What do you see?", "How many shapes are there?", "What color is the star?")
# The demo's prompts are short: with the usual least length no part of them would be kept.
MIN_SEGMENT = 8


@pytest.fixture
def backend(demo: LoadedModel) -> Iterator[LocalBackend]:
    with LocalBackend(demo, min_segment=MIN_SEGMENT) as backend:
        yield backend


@pytest.fixture
def spies(backend: LocalBackend) -> Iterator[SimpleNamespace]:
    """What the real backend is asked for, what it commits, and which media are decoded."""
    with ExitStack() as stack:

        def spy(target: Any, name: str) -> mock.Mock:
            return stack.enter_context(mock.patch.object(target, name, wraps=getattr(target, name)))

        decode = mock.patch.object(MediaProcessor, "prepare", autospec=True, side_effect=MediaProcessor.prepare)
        yield SimpleNamespace(
            stream=spy(backend, "stream"),
            history=spy(backend, "history"),
            commit=spy(backend.engine, "commit"),
            decode=stack.enter_context(decode),
        )


class WarmKit(ChatKit):
    """Asks after the answer of before, and waits until what was said is committed."""

    def __init__(self, folder: Path, backend: LocalBackend) -> None:
        super().__init__(folder, backend)
        self._engine = backend

    async def say(self, text: str, after: Asked | None = None, **how: Any) -> Asked:
        settings = {"temperature": 0, "thinking": how.pop("thinking", False)}
        before = (after.conversation, after.reply) if after else (None, None)
        return await self.ask(text, *before, settings=settings, **how)

    def picture(self, person: Person = ME) -> dict[str, Any]:
        """The arguments that send the picture along."""
        return {"person": person, "files": [self.attach(PICTURE, person)]}

    async def watch(self, reply_id: str, person: Person = ME, **how: Any) -> dict[str, Any]:
        view = await super().watch(reply_id, person, **how)
        await self.api.stop(person, reply_id)
        assert await asyncio.to_thread(self._engine.wait_idle, 60), "the engine is still busy"
        return view

    def stats(self, asked: Asked, person: Person = ME) -> dict[str, Any]:
        """What an answer cost."""
        return dict(self.node(asked.conversation, asked.reply, person).stats or {})


@pytest.fixture
def kit(backend: LocalBackend, tmp_path: Path) -> WarmKit:
    return WarmKit(tmp_path, backend)


def assert_goes_on_from_what_was_committed(kit: WarmKit, spies: SimpleNamespace, asked: Asked) -> None:
    """The last prompt begins with the messages that were committed before, and all but a segment of them is cached."""
    committed, source = spies.history.call_args_list[-2].args[0], spies.commit.call_args_list[-2].args[0]
    assert list(spies.stream.call_args.args[0].messages[:-1]) == list(committed.messages)
    assert kit.stats(asked)["num_cached_tokens"] > len(source.prompt.token_ids) - MIN_SEGMENT
    assert spies.decode.call_count == 1


@pytest.mark.parametrize("thinking", [False, True])
async def test_the_next_turn_asks_for_what_was_committed(kit: WarmKit, spies: SimpleNamespace, thinking: bool) -> None:
    asked = await kit.say(QUESTIONS[0], thinking=thinking, **kit.picture())
    for question in QUESTIONS[1:]:
        asked = await kit.say(question, asked, thinking=thinking)
        assert asked.view["status"] == "finished"
        assert bool(asked.view["reasoning"]) is thinking
        assert_goes_on_from_what_was_committed(kit, spies, asked)
    stats = (await kit.api.open(ME, asked.conversation))["messages"][-1]["stats"]
    shown = [english(value) for _, value in stats]
    num_cached, num_prompt = kit.stats(asked)["num_cached_tokens"], kit.stats(asked)["num_prompt_tokens"]
    assert f"{num_prompt:,} tokens, {num_prompt - num_cached:,} of them computed" in shown


async def test_a_title_between_two_turns_costs_the_second_nothing(
    kit: WarmKit, backend: LocalBackend, spies: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalBackend, "is_demo", False)
    titles = Titles(kit.store, backend, kit.replies, quiet_s=0.0)
    asked = await kit.say(QUESTIONS[0], **kit.picture())
    while titles.are_pending(ME.owner):
        await asyncio.sleep(0.01)
    assert spies.stream.call_args.args[0].messages[0].text.startswith("Write a title")
    assert kit.store.conversation(ME.owner, asked.conversation).titled
    asked = await kit.say(QUESTIONS[1], asked)
    assert_goes_on_from_what_was_committed(kit, spies, asked)


@pytest.mark.parametrize("retain", ["memory", "conversation"])
async def test_what_is_kept_in_memory_alone_is_warm_and_never_on_the_disk(
    demo: LoadedModel, tmp_path: Path, retain: Any
) -> None:
    params = demo.generation.with_overrides(temperature=0.0, max_tokens=16)
    with LocalBackend(demo, min_segment=MIN_SEGMENT, cache=tmp_path) as backend:
        messages = [Message("user", (Image(PICTURE), Text(QUESTIONS[0])))]
        how: dict[str, Any] = {"retain": retain, "conversation": "one", "tenant": "one", "enable_thinking": False}
        for question in (QUESTIONS[1], None):
            events = [event async for event in backend.stream(GenerationRequest(messages, params, **how))]
            result = events[-1].result  # pyright: ignore[reportAttributeAccessIssue]
            assert await asyncio.to_thread(backend.wait_idle, 60)
            answer = Message("assistant", (Text(result.text),))
            messages += [answer, Message("user", (Text(question or ""),))]
        assert result.cache.num_cached_tokens > 0
        assert result.cache.num_encoded_units == 0
    kinds = {path.suffix for path in tmp_path.rglob("*.*") if path.suffix in (".kv", ".state", ".vision")}
    assert kinds == ({".kv", ".state", ".vision"} if retain == "conversation" else set())


@pytest.mark.parametrize("thinking", [False, True])
async def test_a_stopped_answer_is_committed_as_far_as_it_was_stored(
    kit: WarmKit, backend: LocalBackend, spies: SimpleNamespace, thinking: bool
) -> None:
    async def held_after_its_first_words(request: GenerationRequest) -> AsyncIterator[Event]:
        async with aclosing(LocalBackend.stream(backend, request)) as events:
            async for event in events:
                yield event
                if isinstance(event, TextDelta) and event.channel == "answer":
                    await asyncio.Event().wait()

    spies.stream.side_effect = held_after_its_first_words
    settings = {"temperature": 0, "thinking": thinking}
    conversation, reply_id = await kit.send(QUESTIONS[0], settings=settings, **kit.picture())
    view = await kit.watch(reply_id, until=lambda view: view["blocks"])
    spies.stream.side_effect = None
    stopped = kit.node(conversation, reply_id)
    assert stopped.status == "stopped"
    assert stopped.text
    asked = await kit.say(QUESTIONS[1], Asked(conversation, reply_id, view), thinking=thinking)
    assert spies.history.call_args_list[0].args[0].messages[-1].text == stopped.text
    assert_goes_on_from_what_was_committed(kit, spies, asked)


async def test_another_answer_to_the_same_question_reads_nothing_again(kit: WarmKit, spies: SimpleNamespace) -> None:
    asked = await kit.say(QUESTIONS[0], **kit.picture())
    question, first = kit.path(asked.conversation)
    reply_id = await kit.turns.answer_again(ME, asked.conversation, question.id)
    again = Asked(asked.conversation, reply_id, await kit.watch(reply_id))
    assert kit.node(asked.conversation, reply_id).text == first.text
    assert kit.stats(again)["num_cached_tokens"] > 0
    assert spies.decode.call_count == 1


async def test_a_known_picture_is_not_encoded_again(kit: WarmKit, spies: SimpleNamespace) -> None:
    asked = await kit.say(QUESTIONS[0], **kit.picture())
    # As an edited question, and in a new chat.
    for conversation, num_decoded in ((asked.conversation, 1), (None, 2)):
        how = {"temperature": 0, "thinking": False}
        again = await kit.ask(QUESTIONS[1], conversation, settings=how, **kit.picture())
        assert kit.stats(again)["num_cached_tokens"] > 0
        assert kit.stats(again)["num_encoded_units"] == 0
        assert spies.decode.call_count == num_decoded


async def test_on_a_shared_server_nobody_finds_another_one_s_picture(kit: WarmKit) -> None:
    """Nor does a person lose the own with a new chat."""
    one, other = (Person(name, name) for name in ("one", "other"))
    await kit.say(QUESTIONS[0], **kit.picture(one))
    others = kit.stats(await kit.say(QUESTIONS[0], **kit.picture(other)), other)
    assert (others["num_cached_tokens"], others["num_cached_units"], others["num_encoded_units"]) == (0, 0, 1)
    own = kit.stats(await kit.say(QUESTIONS[0], **kit.picture(one)), one)
    assert own["num_cached_tokens"] > 0
    assert own["num_encoded_units"] == 0
