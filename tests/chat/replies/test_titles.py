"""Titles that the model writes: when, by what request, and what becomes of what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from qwen35mm.chat.replies.titles import Titles, title_of
from tests.chat.chat_kit import ME, OTHER, Asked, ChatKit
from tests.chat.fake_backend import FakeBackend


class TitleKit(ChatKit):
    """Conversations whose titles the model writes as soon as nobody asks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FakeBackend(idles=True))
        self.titles = Titles(self.store, self.backend, self.replies, quiet_s=0.0)

    async def watch(self, reply_id: str, *args: Any, **how: Any) -> dict[str, Any]:
        view = await super().watch(reply_id, *args, **how)
        # Its end is told to others right after it is seen.
        await asyncio.sleep(0)
        return view

    @property
    def asked_for_titles(self) -> list[Any]:
        return [call for call in self.backend.calls if call.messages[-1].text.startswith("Write a title")]

    def title(self, asked: Asked) -> tuple[str, bool]:
        conversation = self.store.conversation(ME.owner, asked.conversation)
        return conversation.title, conversation.titled

    async def until(self, condition: Callable[[], Any]) -> None:
        with anyio.fail_after(20):
            while not condition():
                await asyncio.sleep(0.005)

    async def settled(self) -> None:
        await self.until(lambda: not self.titles.are_pending(ME.owner))


@pytest.fixture
def kit(tmp_path: Path) -> TitleKit:
    return TitleKit(tmp_path)


async def test_the_first_finished_answer_brings_a_title(kit: TitleKit) -> None:
    stopped = await kit.ask("length of it")
    assert not kit.titles.are_pending(ME.owner)
    asked = await kit.ask(f"echo {'blue stars ' * 500}", stopped.conversation, stopped.reply)
    assert kit.title(asked) == ("length of it", False)
    assert kit.titles.are_pending(ME.owner)
    assert not kit.titles.are_pending(OTHER.owner)
    kit.backend.title = 'Title: "Blue  stars".'
    await kit.settled()
    assert kit.title(asked) == ("Blue stars", True)
    (call,) = kit.asked_for_titles
    (message,) = call.messages
    # Short, bounded, without thinking; nothing of it stays, and nothing of the conversation's cache is touched.
    assert len(message.text) < 2_500
    assert "Question: echo blue stars" in message.text
    assert "Answer: blue stars" in message.text
    assert (call.retain, call.params.max_tokens, call.params.thinking_budget) == ("nothing", 32, 0)
    # Of several models it loads none, so it unloads none. An answer stays with the model that it was made for.
    assert (call.loads, kit.backend.calls[0].loads, kit.backend.calls[0].model) == (False, True, "Fake-1B")
    assert getattr(call, "conversation", None) is None
    await kit.ask("echo more", asked.conversation, asked.reply)
    await kit.settled()
    assert len(kit.asked_for_titles) == 1


async def test_a_title_waits_for_whoever_asks(kit: TitleKit) -> None:
    _, reply, watching = await kit.begin("slow")
    asked = await kit.ask("echo one")
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert kit.asked_for_titles == []
    await kit.api.stop(ME, reply)
    await watching
    await kit.until(lambda: kit.asked_for_titles and kit.backend.active)
    # Somebody asks in the middle of it: it ends before the answer begins, and comes again after it.
    conversation, _ = await kit.send("echo two", person=OTHER)
    await kit.until(lambda: not kit.backend.active)
    assert kit.title(asked) == ("echo one", False)
    kit.backend.title = "One"
    (reply_in_line,) = kit.replies.of(OTHER.owner, conversation)
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert len(kit.asked_for_titles) == 1
    await kit.watch(reply_in_line.node.id, OTHER)
    await kit.settled()
    assert kit.title(asked) == ("One", True)


async def test_a_person_s_title_stays_also_where_it_comes_meanwhile(kit: TitleKit) -> None:
    asked = await kit.ask("echo one")
    await kit.until(lambda: kit.asked_for_titles)
    await kit.api.rename(ME, asked.conversation, "Mine")
    kit.backend.title = "The model's"
    await kit.settled()
    assert kit.title(asked) == ("Mine", True)
    deleted = await kit.ask("echo two")
    await kit.api.delete(ME, deleted.conversation)
    await kit.settled()


@pytest.mark.parametrize("how", ["preference", "demo", "paid for"])
async def test_where_it_is_off_nothing_is_asked(kit: TitleKit, how: str) -> None:
    kit.backend.title = "x"
    if how == "preference":
        await kit.api.preferences(ME, {"titles": False})
    kit.backend.is_demo, kit.backend.idles = how == "demo", how != "paid for"
    asked = await kit.ask("echo one")
    await kit.settled()
    assert (kit.asked_for_titles, kit.title(asked)) == ([], ("echo one", False))


async def test_changing_the_model_waits_for_no_title(kit: TitleKit) -> None:
    await kit.ask("echo one")
    await kit.until(lambda: kit.backend.active)
    await kit.titles.rest()
    assert kit.backend.active == 0
    kit.backend.title = "One"
    await kit.settled()


async def test_what_is_no_title_leaves_the_old_one(kit: TitleKit) -> None:
    kit.backend.title = "I can't do that.\nWhat do you mean?"
    asked = await kit.ask("echo one")
    await kit.settled()
    assert kit.title(asked) == ("echo one", True)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Blue stars", "Blue stars"),
        ("\n **“Blaue Sterne”**\n", "Blaue Sterne"),
        ("# Titel: Blaue Sterne", "Blaue Sterne"),
        ("标题：蓝色的星星。", "蓝色的星星"),
        ("**Title:** C++ or C#", "C++ or C#"),
        ("", None),
        ("one\ntwo", None),
        ("word " * 13, None),
        ("x" * 81, None),
        ("a\u202eb", None),
    ],
)
def test_what_a_title_is(text: str, title: str | None) -> None:
    assert title_of(text) == title
