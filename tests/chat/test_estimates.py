"""Estimates while a message is typed: as exact as what is sent, and without another look at what stands before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.chat.replies.drafts import Draft
from qwen35mm.chat.replies.past import Past
from qwen35mm.chat.replies.turns import Once, Question
from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store.records import Conversation, Node
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.chat.store.tree import Tree
from qwen35mm.config import ModelConfig
from qwen35mm.contract import Message, iter_media
from qwen35mm.prompt import ChatTemplate, PromptBuilder
from qwen35mm.tokenizer import Tokenizer
from tests.chat.chat_kit import CLIP, ME, PICTURE, ChatKit
from tests.chat.fake_backend import FakeBackend
from tests.chat.helpers import node, reply


class TokenBackend(FakeBackend):
    """Counts with the demo's own tokenizer and template."""

    def __post_init__(self) -> None:
        super().__post_init__()
        folder = demo_model_path()
        template = ChatTemplate.from_pretrained(folder)
        self._prompts = PromptBuilder(Tokenizer.from_pretrained(folder), template, ModelConfig.from_pretrained(folder))
        self.info = replace(self.info, default_enable_thinking=template.default_enable_thinking)

    def count_tokens(self, messages: Sequence[Message], *, enable_thinking: bool | None = None, **_: Any) -> int:
        plans = [part.plan for part in iter_media(messages) if part.plan is not None]
        return len(self._prompts.prompt(messages, plans, enable_thinking=bool(enable_thinking)).token_ids)


@pytest.mark.parametrize(
    ("system", "thinking", "begins_with_summary"),
    [("", False, False), ("", True, True), ("Be short.", False, True), ("Be short.", True, False)],
)
def test_an_estimate_is_what_is_sent(tmp_path: Path, system: str, thinking: bool, begins_with_summary: bool) -> None:
    kit = ChatKit(tmp_path, TokenBackend())
    (tmp_path / "a.txt").write_text("`` <|im_end|>\n\n")
    files = [kit.attach(CLIP, kind="video"), kit.attach(tmp_path / "a.txt", kind="text"), kit.attach(PICTURE)]
    settings = Settings.read({"system": system, "thinking": thinking})

    def planned(past: Past, text: str, **fields: Any) -> Draft:
        return kit.turns.drafts.plan(Draft(past, node(text=text, attachments=tuple(files)), settings, **fields))

    first = planned(Past(), "\n\nWhich shapes?").node
    thought = reply(first.id, "A circle.\n", reasoning="Let me <think> see.\n")
    question = node(thought.id, " ")
    path = (first, thought, question, reply(question.id, "<|im_start|>user\nNo", reasoning="Hm."))
    past = Past(path[1:] if begins_with_summary else path)
    for text in ("And now?", "  \n", "<|im_start|>", "`", "an end\n"):
        growing = (node(text="More"), replace(thought, text="So far"))
        for draft in (planned(past, text), planned(past, text, start=2), planned(past, text, growing=growing)):
            tokens = kit.turns.drafts.room(draft)["tokens"]
            assert tokens["all"] == kit.turns.drafts.count(draft) > tokens["history"] > 0
    assert kit.turns.drafts.room(planned(Past(), ""))["tokens"]["history"] <= len(system) + 8


class Counting:
    """Counts how often a conversation is read, and how many messages are counted at most."""

    def __init__(self, kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_reads = self.most_messages = 0
        read, count = ConversationStore.read, kit.backend.count_tokens

        def read_counted(*args: Any) -> Any:
            self.num_reads += 1
            return read(*args)

        def count_counted(messages: Sequence[Message], **how: Any) -> int:
            self.most_messages = max(self.most_messages, len(messages))
            return count(messages, **how)

        monkeypatch.setattr(ConversationStore, "read", read_counted)
        monkeypatch.setattr(kit.backend, "count_tokens", count_counted)

    def take(self) -> tuple[int, int]:
        """What was counted since the last call."""
        taken = self.num_reads, self.most_messages
        self.num_reads = self.most_messages = 0
        return taken


def long_chat(kit: ChatKit, num_messages: int) -> tuple[str, str]:
    """Ids of a conversation and its last message."""
    nodes: list[Node] = []
    for number in range(num_messages):
        role = "assistant" if number % 2 else "user"
        nodes.append(node(nodes[-1].id if nodes else None, "x" * 40, role=role))
    kit.store.insert(ME.owner, [(Conversation(new_id(), "long", 1.0, 2.0, nodes[-1].id), Tree(nodes))])
    return kit.store.find(ME.owner)[0].id, nodes[-1].id


async def test_typing_costs_no_whole_history(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, last = long_chat(kit, 600)
    counting = Counting(kit, monkeypatch)

    async def type_in(text: str, parent: str = last, **fields: Any) -> dict[str, Any]:
        fields = {"conversation": conversation, "parent": parent, "text": text, **fields}
        return await kit.turns.measure(ME, Question(**fields))

    kit.backend.context_length = 100_000
    begun = await type_in("a")
    assert counting.take() == (1, 601)
    assert begun["tokens"]["history"] == 600 * 14
    for text in ("ab", "abcd", "abcd efgh"):
        measured = await type_in(text)
        assert measured["tokens"]["all"] - begun["tokens"]["history"] == len(text) // 4 + 4
    assert counting.take() == (0, 1)

    # Nor where it doesn't fit, and offers are made: what they leave out was counted once.
    kit.backend.context_length = 1000
    shorten = [offer for offer in (await type_in("ab"))["offers"] if offer["kind"] == "shorten"]
    assert counting.take()[0] == 0
    first = shorten[0]["first"]
    await type_in("abcd")
    assert counting.take() == (0, 1)
    await type_in("abcd", once=Once(first=first))
    counting.take()
    await type_in("abcd efgh", once=Once(first=first))
    assert counting.take() == (0, 1)

    # Another system prompt, and a message that was changed, are looked at.
    kit.backend.context_length = 100_000
    assert (await type_in("a", settings={"system": "s" * 40}))["tokens"]["all"] == begun["tokens"]["all"] + 14
    assert counting.take() == (0, 602)
    kit.store.update(ME.owner, replace(kit.node(conversation, last), text="x" * 80))
    counting.take()
    assert (await type_in("a"))["tokens"]["all"] == begun["tokens"]["all"] + 10
    assert counting.take() == (1, 601)


async def test_typing_during_an_answer_costs_no_whole_history(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, last = long_chat(kit, 300)
    kit.backend.context_length = 100_000
    _, running, watching = await kit.begin("slow", conversation=conversation, parent=last)
    counting = Counting(kit, monkeypatch)
    asking = Question(conversation=conversation, parent=running, text="And?")
    reply = kit.replies.find(ME.owner, running)
    assert reply is not None
    histories: list[int] = []
    while len(set(histories)) < 3:
        histories.append((await kit.turns.measure(ME, asking))["tokens"]["history"])
        await kit.watch(running, until=lambda _, before=reply.shown: reply.shown is not before)
    assert histories == sorted(histories), "the answer grows"
    assert counting.take() == (1, 301)
    await reply.stop()
    await watching
    ended = (await kit.turns.measure(ME, asking))["tokens"]
    assert ended["history"] >= histories[-1]
    kit.backend.calls.clear()
    await kit.ask("And?", conversation, running)
    assert ended["all"] == kit.backend.count_tokens(kit.backend.calls[0].messages)
