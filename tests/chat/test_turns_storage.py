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
    return found


@pytest.mark.parametrize(
    ("doing", "name", "number"),
    [
        ("begin", "_insert_node", 2),
        ("send", "_insert_node", 1),
        ("send", "_insert_node", 2),
        ("send", "_update", 1),
        ("go on", "_update", 2),
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
