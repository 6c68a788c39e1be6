"""What a person does with conversations: messages, branches, what is refused, and what a failing store leaves."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.chat.replies.turns import MAX_TEXT_CHARS, BusyError
from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store import store
from qwen35mm.chat.store.records import Attachment
from qwen35mm.errors import ConfigError, NotFoundError, PromptError, StorageError
from tests.chat.chat_kit import ME, OTHER, PICTURE, ChatKit


def statuses(kit: ChatKit, conversation: str) -> list[tuple[str, str, str]]:
    return [(node.role, node.text.strip(), node.status) for node in kit.path(conversation)]


async def test_a_message_and_its_answer(kit: ChatKit) -> None:
    ann = replace(ME, tenant="ann's")
    kit.backend.info = replace(kit.backend.info, adapters=("poet",))
    settings = {"system": "Be short.", "temperature": 0.5, "thinking": True, "adapter": "poet"}
    asked = await kit.ask("echo one", settings=settings, person=ann)
    assert statuses(kit, asked.conversation) == [("user", "echo one", "finished"), ("assistant", "one", "finished")]
    (call,) = kit.backend.calls
    assert kit.prompt == [("system", "Be short."), ("user", "echo one")]
    assert (call.params.temperature, call.params.top_k, call.enable_thinking) == (0.5, 20, True)
    assert (call.conversation, call.retain, call.tenant) == (asked.conversation, "conversation", "ann's")
    assert call.adapter == "poet"
    assert kit.node(asked.conversation, asked.reply).model == "Fake-1B"
    again = await kit.ask("echo two", asked.conversation, asked.reply)
    assert again.conversation == asked.conversation
    # What isn't said again stays as it was.
    assert kit.prompt == [("system", "Be short."), ("user", "echo one"), ("assistant", "one"), ("user", "echo two")]


async def test_a_model_that_is_chosen_meanwhile_is_not_named_for_another_s_answer(
    kit: ChatKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = map(str, itertools.count())
    changing = property(lambda backend: replace(backend.__dict__["info"], name=next(names)))
    monkeypatch.setattr(type(kit.backend), "info", changing, raising=False)
    asked = await kit.ask("echo one")
    await kit.watch(await kit.turns.answer_again(ME, asked.conversation, kit.path(asked.conversation)[0].id))
    answers = kit.store.read(ME.owner, asked.conversation)[1].children(kit.path(asked.conversation)[0].id)
    assert [answer.model for answer in answers] == [call.model for call in kit.backend.calls]


@pytest.mark.parametrize(
    ("text", "title"),
    [("\n  echo hello \nmore", "echo hello"), ("echo " + "x" * 80, "echo " + "x" * 54 + "…"), ("", "a.png, b.png")],
)
async def test_a_conversation_is_called_by_its_first_line(kit: ChatKit, text: str, title: str) -> None:
    files = [] if text else [kit.attach(PICTURE, name="a.png"), kit.attach(PICTURE, name="b.png")]
    asked = await kit.ask(text, files=files)
    assert kit.store.read(ME.owner, asked.conversation)[0].title == title


async def test_an_edit_is_a_branch(kit: ChatKit) -> None:
    first = await kit.ask("echo one")
    second = await kit.ask("echo two", first.conversation, first.reply)
    edited = await kit.ask("echo other", first.conversation, first.reply)
    assert kit.prompt == [("user", "echo one"), ("assistant", "one"), ("user", "echo other")]
    assert [text for _, text, _ in statuses(kit, first.conversation)] == ["echo one", "one", "echo other", "other"]
    await kit.api.branch(ME, first.conversation, kit.node(first.conversation, second.reply).parent or "")
    assert kit.path(first.conversation)[-1].id == second.reply
    root = await kit.ask("echo root", first.conversation)
    assert kit.prompt == [("user", "echo root")]
    chat = await kit.api.open(ME, first.conversation)
    assert chat["messages"][0]["branch"]["of"] == 2
    assert {edited.conversation, root.conversation} == {first.conversation}


async def test_another_answer_stands_beside_the_first(kit: ChatKit) -> None:
    asked = await kit.ask("echo one")
    question = kit.path(asked.conversation)[0].id
    reply_id = await kit.turns.answer_again(ME, asked.conversation, question)
    await kit.watch(reply_id)
    assert kit.prompt == [("user", "echo one")]
    tree = kit.store.read(ME.owner, asked.conversation)[1]
    assert [node.id for node in tree.children(question)] == [asked.reply, reply_id]
    with pytest.raises(PromptError, match="Only a question"):
        await kit.turns.answer_again(ME, asked.conversation, reply_id)


async def test_an_answer_knows_what_made_it_also_where_that_is_its_own(kit: ChatKit) -> None:
    asked = await kit.ask("echo one", settings={"temperature": 0.5, "system": "Be short. " * 100})
    first = kit.node(asked.conversation, asked.reply)
    own = Settings.read({"temperature": 1.5, "thinking": True})
    reply_id = await kit.turns.answer_again(ME, asked.conversation, first.parent or "", own)
    await kit.watch(reply_id)
    call = kit.backend.calls[-1]
    assert (call.params.temperature, call.enable_thinking, kit.prompt) == (1.5, True, [("user", "echo one")])
    common = {"top_k": 20, "weights": "bf16"}
    other = kit.node(asked.conversation, reply_id)
    told = first.settings or {}
    assert told["system"] == ("Be short. " * 100)[:200]
    assert {"temperature": 0.5, "thinking": False, **common}.items() <= told.items()
    assert {"temperature": 1.5, "thinking": True, **common}.items() <= (other.settings or {}).items()
    assert "system" not in (other.settings or {})
    # The conversation's own stay as they are.
    assert kit.store.read(ME.owner, asked.conversation)[0].settings["temperature"] == 0.5
    # An archive may bring anything.
    odd = {"temperature": "hot", "seed": 5, "weights": 5, "x": {}}
    kit.store.update(ME.owner, replace(other, settings=odd))
    views = (await kit.api.answers(ME, asked.conversation, reply_id))["answers"]
    assert [view["id"] for view in views] == [asked.reply, reply_id]
    assert views[0]["settings"] == told
    assert views[1]["settings"] == {"seed": 5}


async def test_a_question_whose_answer_was_deleted_can_be_answered(kit: ChatKit) -> None:
    asked = await kit.ask("echo one")
    question = kit.path(asked.conversation)[0].id
    assert not (await kit.api.open(ME, asked.conversation))["messages"][0]["unanswered"]
    await kit.api.delete_message(ME, asked.conversation, asked.reply)
    assert (await kit.api.open(ME, asked.conversation))["messages"][0]["unanswered"]
    with pytest.raises(PromptError, match="Answer it first"):
        await kit.send("echo two", asked.conversation, question)
    reply_id = (await kit.api.again(ME, asked.conversation, question))["reply"]
    await kit.watch(reply_id)
    await kit.ask("echo two", asked.conversation, reply_id)
    assert kit.prompt == [("user", "echo one"), ("assistant", "one"), ("user", "echo two")]


async def test_a_cut_answer_goes_on(kit: ChatKit) -> None:
    asked = await kit.ask("length of it")
    assert asked.view["status"] == "length"
    before = kit.node(asked.conversation, asked.reply)
    assert await kit.turns.go_on(ME, asked.conversation, asked.reply) == asked.reply
    assert kit.node(asked.conversation, asked.reply).text == before.text
    view = await kit.watch(asked.reply)
    assert kit.backend.calls[-1].continue_reply
    assert kit.backend.calls[-1].messages[-1].text == before.text
    assert kit.node(asked.conversation, asked.reply).text == f"{before.text}and its end."
    assert view["status"] == "finished"
    with pytest.raises(PromptError, match="can be continued"):
        await kit.turns.go_on(ME, asked.conversation, asked.reply)


async def test_an_answer_that_was_cut_in_its_thinking_goes_on(kit: ChatKit) -> None:
    asked = await kit.ask("think it")
    kit.change(asked, status="length", text="")
    await kit.turns.go_on(ME, asked.conversation, asked.reply)
    assert (await kit.watch(asked.reply))["status"] == "finished"
    last = kit.backend.calls[-1].messages[-1]
    assert (last.text, last.reasoning) == ("", "Let me see. That is it.")
    assert kit.node(asked.conversation, asked.reply).text == "and its end."


async def test_where_the_model_cannot_go_on_that_is_said_and_the_answer_stays(kit: ChatKit) -> None:
    asked = await kit.ask("length")
    before = kit.node(asked.conversation, asked.reply)
    kit.backend.info = replace(kit.backend.info, continues=False)
    with pytest.raises(PromptError, match="Regenerate it"):
        await kit.turns.go_on(ME, asked.conversation, asked.reply)
    assert kit.node(asked.conversation, asked.reply) == before


async def test_a_reply_that_a_killed_process_left_can_be_continued(kit: ChatKit) -> None:
    asked = await kit.ask("echo half")
    kit.change(asked, status="running")
    chat = await kit.api.open(ME, asked.conversation)
    assert (chat["messages"][-1]["status"], chat["running"]) == ("interrupted", [])
    await kit.turns.go_on(ME, asked.conversation, asked.reply)
    assert (await kit.watch(asked.reply))["status"] == "finished"


async def test_a_message_from_another_tab_goes_to_the_end_of_its_branch(kit: ChatKit) -> None:
    first = await kit.ask("echo one")
    here = {"conversation": first.conversation, "parent": first.reply}
    second = await kit.ask("echo two", **here)
    await kit.ask("echo edited", **here)
    queued = await kit.ask("echo three", **here, at_end=True)
    assert kit.prompt[-3:] == [("user", "echo edited"), ("assistant", "edited"), ("user", "echo three")]
    # On the branch that it was meant for, though another one is shown.
    await kit.ask("echo on", first.conversation, second.reply)
    await kit.api.branch(ME, first.conversation, queued.reply)
    await kit.ask("echo end", first.conversation, second.reply, at_end=True)
    assert kit.prompt[-3:] == [("user", "echo on"), ("assistant", "on"), ("user", "echo end")]


async def test_questions_without_answers_are_left_out(kit: ChatKit) -> None:
    failed = await kit.ask("refuse no")
    await kit.ask("echo on", failed.conversation, failed.reply)
    assert kit.prompt == [("user", "echo on")]


async def test_one_answer_at_a_time_in_a_conversation(kit: ChatKit) -> None:
    conversation, reply_id = await kit.send("slow")
    question = kit.path(conversation)[0].id
    for attempt in (
        kit.send("echo x", conversation, reply_id),
        kit.turns.answer_again(ME, conversation, question),
        kit.turns.go_on(ME, conversation, reply_id),
    ):
        with pytest.raises(BusyError, match="One answer at a time") as refused:
            await attempt
        assert refused.value.answers == [reply_id]
    await kit.api.stop(ME, reply_id)
    assert len(kit.path(conversation)) == 2


async def test_a_person_has_so_many_answers_at_one_time(kit: ChatKit) -> None:
    replies = [(await kit.send("slow"))[1] for _ in range(ME.max_replies)]
    with pytest.raises(BusyError, match="You already have 2 answers") as refused:
        await kit.send("echo x")
    assert refused.value.answers == replies[:1]
    assert (await kit.ask("echo mine", person=OTHER)).view["status"] == "finished"
    await kit.api.stop(ME, replies[0])
    await kit.ask("echo y")
    await kit.api.stop(ME, replies[1])


async def test_requests_at_the_same_moment_count(kit: ChatKit) -> None:
    asked = await kit.ask("echo one")
    sent = await asyncio.gather(
        *(kit.send("slow", asked.conversation, asked.reply) for _ in range(3)), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in sent) == ["BusyError", "BusyError", "tuple"]
    assert len(kit.store.read(ME.owner, asked.conversation)[1].nodes) == 4
    new = await asyncio.gather(*(kit.send("slow") for _ in range(3)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in new) == ["BusyError", "BusyError", "tuple"]
    for reply in kit.replies.of(ME.owner):
        await reply.stop()
    await kit.ask("echo two")


@pytest.mark.parametrize(
    ("text", "how", "error", "words"),
    [
        (" \n", {}, PromptError, "Type a question"),
        ("x" * (MAX_TEXT_CHARS + 1), {}, PromptError, "at most 2,000,000 characters"),
        ("x", {"files": [Attachment("0" * 64, "image", "x", 0)] * 65}, PromptError, "at most 64 files; got 65"),
        ("x", {"parent": "0" * 32}, PromptError, "no messages before"),
        ("x", {"settings": {"temperature": 9}}, ConfigError, "Temperature"),
    ],
    ids=["empty", "long", "files", "parent", "settings"],
)
async def test_what_can_t_be_a_message_is_refused(
    kit: ChatKit, text: str, how: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await kit.send(text, **how)
    assert kit.store.find(ME.owner) == []
    assert kit.backend.calls == []


async def test_only_own_files_that_are_there_are_attached(kit: ChatKit) -> None:
    theirs = kit.attach(PICTURE, OTHER)
    for digest in (theirs.digest, "0" * 64, "../../etc/passwd"):
        with pytest.raises(NotFoundError, match=r"'mine\.png' no longer exists"):
            await kit.send("x", files=[Attachment(digest, "image", "mine.png", 0)])
    gone = kit.attach(PICTURE)
    kit.store.media.delete(gone.digest)
    with pytest.raises(NotFoundError, match="Add it again"):
        await kit.send("x", files=[gone])
    assert kit.store.find(ME.owner) == []


async def test_deleting_ends_what_is_written_there_only(kit: ChatKit) -> None:
    asked = await kit.ask("echo one")
    conversation, reply_id, watching = await kit.begin("slow", conversation=asked.conversation, parent=asked.reply)
    elsewhere = await kit.ask("echo two")
    with pytest.raises(NotFoundError):
        await kit.api.delete_message(ME, elsewhere.conversation, reply_id)
    assert kit.replies.of(ME.owner, conversation)
    side = kit.path(elsewhere.conversation)[-1].id
    await kit.api.delete_message(ME, elsewhere.conversation, side)
    assert len(kit.path(elsewhere.conversation)) == 1
    await kit.api.delete_message(ME, conversation, reply_id)
    assert (await watching)["status"] == "stopped"
    assert [node.text.strip() for node in kit.path(conversation)] == ["echo one", "one", "slow"]
    assert kit.backend.active == 0
    _, _, watching = await kit.begin("slow")
    running = kit.replies.of(ME.owner)[0].work.conversation_id
    await kit.api.delete(ME, running)
    await watching
    with pytest.raises(NotFoundError):
        kit.store.read(ME.owner, running)[0]
    assert kit.backend.active == 0


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Lets the `number`th of the store's writes of one kind fail, in the middle of a transaction."""
    real, counted = getattr(store, name), 0

    def failing(*args: Any, **how: Any) -> Any:
        nonlocal counted
        counted += 1
        if counted == number:
            raise StorageError("The disk is full.")
        return real(*args, **how)

    monkeypatch.setattr(store, name, failing)


def state(kit: ChatKit) -> list[Any]:
    """All conversations with all messages, but for the moments of their last changes."""
    found = []
    for line in kit.store.find(ME.owner):
        conversation, tree = kit.store.read(ME.owner, line.id)
        found.append((conversation.id, conversation.head, dict(conversation.settings), dict(tree.nodes)))
    return found


@pytest.mark.parametrize(
    ("doing", "name", "number"),
    [
        ("begin", "insert_node", 2),
        ("send", "insert_node", 1),
        ("send", "insert_node", 2),
        ("send", "update_row", 1),
        ("go on", "update_row", 2),
    ],
)
async def test_what_fails_in_the_middle_changes_nothing(
    kit: ChatKit, monkeypatch: pytest.MonkeyPatch, doing: str, name: str, number: int
) -> None:
    picture = kit.attach(PICTURE)
    asked = await kit.ask("length of it", settings={"seed": 1})
    await kit.ask("echo other", asked.conversation)
    await kit.api.branch(ME, asked.conversation, asked.reply)

    async def attempt() -> str:
        if doing == "go on":
            return await kit.turns.go_on(ME, asked.conversation, asked.reply)
        place = () if doing == "begin" else (asked.conversation, asked.reply)
        return (await kit.send("two", *place, files=[picture], settings={"seed": 2}))[1]

    before = state(kit)
    with monkeypatch.context() as patch:
        fail_at(patch, name, number)
        with pytest.raises(StorageError, match="The disk is full"):
            await attempt()
    assert state(kit) == before
    assert kit.replies.of(ME.owner) == []
    # Also its file is still there to be sent again.
    assert (await kit.watch(await attempt()))["status"] == "finished"


async def test_a_lost_text_file_is_found_out_before_anything_is_stored(kit: ChatKit, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("some words")
    notes = kit.attach(tmp_path / "notes.txt", kind="text")
    asked = await kit.ask("echo one", files=[notes])
    assert 'Document "notes.txt"' in kit.backend.calls[-1].messages[0].text
    before = state(kit)
    kit.store.media.delete(notes.digest)
    with pytest.raises(StorageError, match="no longer stored"):
        await kit.send("echo two", asked.conversation, asked.reply)
    with pytest.raises(StorageError, match="no longer stored"):
        await kit.turns.answer_again(ME, asked.conversation, kit.path(asked.conversation)[0].id)
    assert state(kit) == before
    assert kit.replies.of(ME.owner) == []
