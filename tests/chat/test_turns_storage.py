"""A store that fails in the middle of a message: nothing is changed, and the message can be sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qwen35mm.chat import store
from qwen35mm.errors import StorageError
from tests.chat.chat_kit import ME, PICTURE, ChatKit


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
    return sorted(found, key=lambda each: each[0])


async def test_a_new_conversation_comes_whole_or_not_at_all(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = kit.attach(PICTURE)
    with monkeypatch.context() as patch:
        fail_at(patch, "_insert_node", 2)
        with pytest.raises(StorageError, match="The disk is full"):
            await kit.send("one", files=[picture])
    assert state(kit) == []
    assert kit.replies.of(ME.owner) == []
    asked = await kit.ask("one", files=[picture])
    assert kit.path(asked.conversation)[1].text == "1 image "


@pytest.mark.parametrize(("name", "number"), [("_insert_node", 1), ("_insert_node", 2), ("_update", 1)])
async def test_a_later_message_changes_nothing_when_it_fails(
    kit: ChatKit, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    first = await kit.ask("echo one", settings={"seed": 1})
    other = await kit.ask("echo other", first.conversation)
    assert kit.path(other.conversation)[-1].id == other.reply
    await kit.api.branch(ME, first.conversation, first.reply)
    before = state(kit)
    picture = kit.attach(PICTURE)
    with monkeypatch.context() as patch:
        fail_at(patch, name, number)
        with pytest.raises(StorageError, match="The disk is full"):
            await kit.send("two", first.conversation, first.reply, files=[picture], settings={"seed": 2})
    assert state(kit) == before
    assert kit.replies.of(ME.owner) == []
    # Its file is still there to be sent again.
    again = await kit.ask("two", first.conversation, first.reply, files=[picture], settings={"seed": 2})
    assert kit.node(first.conversation, again.reply).text == "1 image "


async def test_going_on_changes_nothing_when_it_fails(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = await kit.ask("length of it")
    before = state(kit)
    with monkeypatch.context() as patch:
        fail_at(patch, "_update", 2)
        with pytest.raises(StorageError):
            await kit.turns.go_on(ME, asked.conversation, asked.reply)
    assert state(kit) == before
    await kit.turns.go_on(ME, asked.conversation, asked.reply)
    assert (await kit.watch(asked.reply))["status"] == "finished"


async def test_a_lost_text_file_is_found_out_before_anything_is_stored(kit: ChatKit, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("some words")
    notes = kit.attach(tmp_path / "notes.txt", kind="text")
    asked = await kit.ask("echo one", files=[notes])
    assert 'Document "notes.txt"' in kit.backend.calls[-1].messages[0].text
    before = state(kit)
    kit.store.media.delete(notes.digest)
    with pytest.raises(StorageError, match="not kept any more"):
        await kit.send("echo two", asked.conversation, asked.reply)
    with pytest.raises(StorageError, match="not kept any more"):
        await kit.turns.answer_again(ME, asked.conversation, kit.path(asked.conversation)[0].id)
    assert state(kit) == before
    assert kit.replies.of(ME.owner) == []


async def test_files_of_a_deleted_conversation_are_not_held(kit: ChatKit) -> None:
    picture = kit.attach(PICTURE)
    asked = await kit.ask("one", files=[picture])
    assert kit.store.media.is_of(ME.owner, picture.digest)
    await kit.api.delete(ME, asked.conversation)
    assert not kit.store.media.is_of(ME.owner, picture.digest)
    assert kit.store.media.collect_garbage(0.0) == 1
