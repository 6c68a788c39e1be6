"""The store: conversations, messages, search, presets; each owner alone."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.chat.store.records import Conversation, Crop
from qwen35mm.chat.store.rows import Place
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.chat.store.tables import MIGRATIONS
from qwen35mm.chat.store.tree import Tree
from qwen35mm.errors import ConversationDataError, NotFoundError, StorageError
from tests.chat.helpers import IMAGE_PLAN, ME, OTHER, VIDEO_PLAN, attach, chat, create, node, old_database, reply


@pytest.fixture
def reopened(store: ConversationStore, tmp_path: Path) -> Callable[[], ConversationStore]:
    """The store as the next start of the program finds it."""

    def reopen() -> ConversationStore:
        store.close()
        return ConversationStore(tmp_path / "data")

    return reopen


def test_everything_comes_back(store: ConversationStore, reopened: Callable[[], ConversationStore]) -> None:
    made = create(store, ME, title="Ünï 猫", settings={"temperature": 0.7, "deep": {"x": [1, None]}})
    picture = attach(store, b"picture", "../кот.PNG", plan=IMAGE_PLAN)
    crop = Crop("0" * 64, "whole.png", (0, 1, 20, 30), (30, 40), 1 / 3)
    picture = replace(picture, crop_of=crop)
    clip = attach(store, b"clip", "clip.mp4", "video", VIDEO_PLAN)
    question = node(text="What?\n\u0000 \U0001f408", attachments=(picture, clip, picture), notes=("smaller",))
    answer = reply(
        question.id,
        reasoning="hm",
        thinking_s=1 / 3,
        status="failed",
        error="Broken.",
        stats={"tokens": 12, "rate": 1 / 3},
        model="demo",
        edited=True,
        settings={"temperature": 0.5, "deep": [1]},
        created_s=question.created_s + 1 / 7,
    )
    store.add(ME, made.id, question)
    store.add(ME, made.id, answer)
    store.change(ME, made.id, first=answer.id)

    store = reopened()
    found, tree = store.read(ME, made.id)
    assert found == replace(made, head=answer.id, first=answer.id, updated_s=found.updated_s)
    assert list(tree.nodes.values()) == [question, answer]
    store.close()


@pytest.mark.parametrize("first", ["chat", "file"])
def test_folders_and_files_are_private(first: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    store = ConversationStore(data)
    assert not data.exists(), "nothing is made before the first use"
    if first == "file":
        store.media.add(io.BytesIO(b"y"), max_bytes=1)
    chat(store)
    attach(store, b"x", "x.png")
    for path in (data, *data.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.is_file() else 0o700), path.name


def test_the_last_message_is_shown_unless_another_is_chosen(store: ConversationStore) -> None:
    conversation, last = chat(store)
    question, answer = (first := node(last.id)), reply(first.id)
    store.add(ME, conversation.id, question, answer)
    assert store.read(ME, conversation.id)[0].head == answer.id
    store.change(ME, conversation.id, head=last.id)
    assert store.read(ME, conversation.id)[0].head == last.id
    store.change(ME, conversation.id, head=None)
    assert store.read(ME, conversation.id)[0].head is None


def test_update_writes_all_but_a_message_s_place_and_time(store: ConversationStore) -> None:
    conversation, last = chat(store)
    changes: dict[str, Any] = {
        "text": "new",
        "reasoning": "why",
        "thinking_s": 2.5,
        "status": "stopped",
        "error": "e",
        "notes": ("n",),
        "attachments": (attach(store, b"new", "new.txt", "text"),),
        "stats": {"a": 1},
        "model": "m",
    }
    for changed in (replace(last, **changes), last):
        store.update(ME, changed)
        assert store.read(ME, conversation.id)[1].nodes[last.id] == changed
    store.update(ME, replace(last, parent=None, created_s=1.0))
    assert store.read(ME, conversation.id)[1].nodes[last.id] == last


def test_a_wrong_value_changes_nothing(store: ConversationStore) -> None:
    conversation, last = chat(store)
    before = store.read(ME, conversation.id)
    attempts: list[Callable[[], object]] = [
        lambda: store.update(ME, replace(last, text=5)),
        lambda: store.update(ME, replace(last, text="kept?", status="done")),
        lambda: store.update(ME, replace(last, text="kept?", stats={"x": float("nan")})),
        lambda: store.update(ME, replace(last, text="half a pair: \ud83d")),
        lambda: store.update(ME, replace(last, text="kept?", attachments=("x",))),
        lambda: store.add(ME, conversation.id, node(last.id, id="x")),
        lambda: store.add(ME, conversation.id, node(last.id, id=last.id)),
        lambda: store.add(ME, conversation.id, node("0" * 32)),
        lambda: store.change(ME, conversation.id, head="0" * 32),
        lambda: store.change(ME, conversation.id, settings={"x": object()}),
    ]
    for attempt in attempts:
        with pytest.raises(StorageError):
            attempt()
        assert store.read(ME, conversation.id)[0] == before[0]
        assert store.read(ME, conversation.id)[1].nodes == before[1].nodes


def test_delete_node_moves_the_head(store: ConversationStore) -> None:
    conversation, last = chat(store)
    question = store.read(ME, conversation.id)[1].nodes[last.id].parent
    assert question is not None
    again = reply(question)
    below = node(again.id)
    third = reply(question)
    for message in (again, below, third):
        store.add(ME, conversation.id, message)
    store.change(ME, conversation.id, head=last.id)
    store.change(ME, conversation.id, first=last.id)

    def deleted(node_id: str) -> Conversation:
        store.delete_node(ME, node_id)
        return store.read(ME, conversation.id)[0]

    assert deleted(third.id).head == last.id, "another branch leaves the head"
    after = deleted(last.id)
    assert (after.head, after.first) == (below.id, None), "the newest leaf of the sibling"
    assert deleted(again.id).head == question, "then the parent"
    assert deleted(question).head is None
    assert dict(store.read(ME, conversation.id)[1].nodes) == {}


def test_delete_node_of_a_long_conversation(store: ConversationStore) -> None:
    """Longer than SQLite's limit of 1,000 cascades."""
    chain = [node()]
    for _ in range(1500):
        chain.append(node(chain[-1].id))
    conversation = Conversation(new_id(), "long", 1.0, 2.0, head=chain[-1].id)
    store.insert(ME, [(conversation, Tree(chain))])
    store.delete_node(ME, chain[1].id)
    assert store.read(ME, conversation.id)[0].head == chain[0].id
    assert list(store.read(ME, conversation.id)[1].nodes) == [chain[0].id]
    store.delete(ME, conversation.id)
    with pytest.raises(NotFoundError):
        store.read(ME, conversation.id)[1]


def test_a_list_goes_on_behind_any_place_of_it(store: ConversationStore) -> None:
    made = [chat(store, title=f"cat {index}")[0].id for index in range(7)]
    chat(store, OTHER, title="cat of another")
    for index in (2, 5):
        store.change(ME, made[index], pinned=True)
    expected = [made[index] for index in (5, 2, 6, 4, 3, 1, 0)]

    def pages(read: Callable[[Place | None], list[Conversation]]) -> list[str]:
        ids: list[str] = []
        place = None
        while page := read(place):
            ids += [each.id for each in page]
            place = Place(page[-1].id, page[-1].pinned, page[-1].updated_s)
        return ids

    assert pages(lambda place: store.find(ME, limit=2, after=place)) == expected
    for search in (partial(store.search, ME, query, limit=2) for query in ("cat", "answer")):
        assert pages(lambda place, search=search: [found.conversation for found in search(after=place)]) == expected
    # What stood there has moved, or is gone.
    place = Place(made[4], False, store.read(ME, made[4])[0].updated_s)
    store.add(ME, made[4], node())
    store.delete(ME, made[3])
    assert [each.id for each in store.find(ME, after=place)] == [made[1], made[0]]


def test_what_is_deleted_can_be_restored_until_it_is_purged(store: ConversationStore) -> None:
    kept, _ = chat(store, title="kept")
    gone, last = chat(store, title="gone")
    file = attach(store, b"mine", "mine.png")
    store.add(ME, gone.id, node(last.id, "a needle", attachments=(file,)))
    os.utime(store.media.path(file.digest), (0, 0))
    before = store.read(ME, gone.id)
    for _ in range(2):
        store.delete(ME, gone.id)
        assert [each.id for each in store.find(ME)] == [kept.id]
        assert store.search(ME, "needle") == store.search(ME, "gone") == []
        assert not store.media.is_of(ME, file.digest)
        assert store.media.kept(ME).num_conversations == 1
        attempts: list[Callable[[], object]] = [
            lambda: store.read(ME, gone.id),
            lambda: store.update(ME, last),
            lambda: store.change(ME, gone.id, pinned=True),
            lambda: store.restore(OTHER, gone.id),
        ]
        for attempt in attempts:
            with pytest.raises(NotFoundError):
                attempt()
        assert not store.give_title(ME, gone.id, "new")
        assert store.purge(min_age_s=60.0) == 0
        assert store.media.collect_garbage(min_age_s=0) == 0
        store.restore(ME, gone.id)
        after = store.read(ME, gone.id)
        assert (after[0], after[1].nodes) == (before[0], before[1].nodes)
        assert [found.conversation.id for found in store.search(ME, "needle")] == [gone.id]
    store.delete(ME, gone.id)
    assert store.purge() == 1
    assert file.digest not in store.media
    with pytest.raises(NotFoundError):
        store.restore(ME, gone.id)
    assert [each.id for each in store.find(ME)] == [kept.id]


def test_a_title_that_a_person_gave_stays(store: ConversationStore) -> None:
    theirs, models = (create(store, ME, title="old") for _ in range(2))
    store.change(ME, models.id, titled=False)
    assert not store.give_title(ME, theirs.id, "new")
    assert not store.give_title(OTHER, models.id, "new")
    assert store.give_title(ME, models.id, "new")
    assert not store.give_title(ME, models.id, "newer")
    assert [store.read(ME, each.id)[0].title for each in (theirs, models)] == ["old", "new"]
    store.change(ME, models.id, titled=False)
    assert store.give_title(ME, models.id, None)
    found = store.read(ME, models.id)[0]
    assert (found.title, found.titled) == ("new", True)


def test_the_end_of_a_reply_is_unseen(store: ConversationStore) -> None:
    conversation, last = chat(store)
    answer = reply(last.id, status="running")
    store.add(ME, conversation.id, answer)
    store.update(ME, replace(answer, text="more"))
    assert not store.read(ME, conversation.id)[0].unseen
    store.update(ME, replace(answer, status="finished"))
    assert store.read(ME, conversation.id)[0].unseen
    store.change(ME, conversation.id, unseen=False)
    store.update(ME, replace(answer, status="finished", text="edited"))
    assert not store.read(ME, conversation.id)[0].unseen


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
def test_a_database_of_an_earlier_version_opens(tmp_path: Path, version: int) -> None:
    identity = old_database(tmp_path, version)
    for _ in range(2):
        store = ConversationStore(tmp_path)
        conversation, tree = store.read(ME, identity)
        assert (conversation.title, conversation.pinned, conversation.titled) == ("Cats", False, True)
        assert [(each.text, each.edited) for each in tree.nodes.values()] == [
            ("question 0", False),
            ("answer 0", False),
        ]
        assert [each.id for each in store.find(ME)] == [identity]
        assert [found.conversation.id for found in store.search(ME, "answer")] == [identity]
        store.close()


def test_presets_and_preferences(store: ConversationStore, reopened: Callable[[], ConversationStore]) -> None:
    assert store.presets(ME) == {}
    assert store.preferences(ME) == {}
    store.save_preset(ME, "precise", {"temperature": 0.1})
    store.save_preset(ME, "précis", {"x": [1]})
    store.save_preset(ME, "precise", {"temperature": 0})
    store.change_preferences(ME, {"theme": "dark", "other": 1})
    store.change_preferences(ME, {"theme": "light"})
    store = reopened()
    assert store.presets(ME) == {"precise": {"temperature": 0}, "précis": {"x": [1]}}
    assert store.preferences(ME) == {"theme": "light", "other": 1}
    assert store.presets(OTHER) == store.preferences(OTHER) == {}
    with pytest.raises(NotFoundError):
        store.delete_preset(OTHER, "precise")
    store.delete_preset(ME, "precise")
    assert list(store.presets(ME)) == ["précis"]
    store.close()


def test_another_owner_finds_and_changes_nothing(store: ConversationStore) -> None:
    conversation, last = chat(store)
    other, other_last = chat(store, OTHER)
    file = attach(store, b"mine", "mine.png")
    store.add(ME, conversation.id, node(last.id, attachments=(file,)))
    before = store.read(ME, conversation.id)
    attempts: list[Callable[[], object]] = [
        lambda: store.read(OTHER, conversation.id),
        lambda: store.add(OTHER, conversation.id, node(last.id)),
        lambda: store.add(OTHER, other.id, node(last.id)),
        lambda: store.update(OTHER, replace(last, text="x")),
        lambda: store.delete_node(OTHER, last.id),
        lambda: store.change(OTHER, conversation.id, head=last.id),
        lambda: store.change(OTHER, other.id, head=last.id),
        lambda: store.change(OTHER, other.id, first=last.id),
        lambda: store.change(ME, conversation.id, first=other_last.id),
        lambda: store.change(OTHER, conversation.id, title="x"),
        lambda: store.change(OTHER, conversation.id, settings={}),
        lambda: store.delete(OTHER, conversation.id),
    ]
    for attempt in attempts:
        with pytest.raises(NotFoundError):
            attempt()
    assert not store.media.is_of(OTHER, file.digest)
    assert [c.id for c in store.find(OTHER)] == [other.id]
    store.delete_owner(OTHER)
    assert store.find(OTHER) == []
    after = store.read(ME, conversation.id)
    assert (after[0], after[1].nodes) == (before[0], before[1].nodes)


def test_delete_owner_deletes_everything(store: ConversationStore) -> None:
    chat(store)
    store.save_preset(ME, "p", {})
    store.change_preferences(ME, {"x": 1})
    file = attach(store, b"x", "x")
    store.media.hold(ME, file.digest)
    store.delete_owner(ME)
    assert (store.find(ME), store.presets(ME), store.preferences(ME)) == ([], {}, {})
    assert not store.media.is_of(ME, file.digest)
    assert store.media.collect_garbage(min_age_s=0) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE nodes SET stats = '{'",
        "UPDATE nodes SET notes = '[]'",
        "UPDATE nodes SET parent = id",
        "UPDATE conversations SET settings = 'null'",
    ],
)
def test_a_damaged_row_is_a_typed_error(store: ConversationStore, statement: str) -> None:
    conversation, _ = chat(store)
    with store._database.writing() as connection:
        connection.execute(statement)
    with pytest.raises(ConversationDataError):
        store.read(ME, conversation.id)
