"""Search: words in any order, in any script, with the index and without it."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35mm.chat.store import search
from qwen35mm.chat.store.store import ConversationStore
from tests.chat.helpers import ME, OTHER, chat, create, node, old_database, reply

CHATS = (
    ("Cats", "привет, Σίσυφος; the big blue, blue star"),
    ("Straße", "cafe\u0301 axb; a star that was never blue"),
    ("percent", "100% sure; a_b c\\d"),
    ("猫", "我喜欢猫。It is 青い星 from 東京"),
)


def indexed(store: ConversationStore) -> None:
    list(store.index_texts())


def without_fts5(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SQLite says where it lacks the module."""

    class Lacking(sqlite3.Connection):
        def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
            if re.search("USING fts5|(FROM|INTO) words", sql):
                raise sqlite3.OperationalError("no such module: fts5")
            return super().execute(sql, *values)  # pyright: ignore[reportArgumentType]

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **how: connect(*args, **how, factory=Lacking))


def titles(store: ConversationStore, query: str, owner: str = ME) -> list[str]:
    return [each.conversation.title for each in store.search(owner, query)]


def num_indexed(store: ConversationStore) -> int:
    with store._database.reading() as connection:
        return connection.execute("SELECT count(*) FROM words WHERE rowid NOT IN unindexed").fetchone()[0]


@pytest.mark.parametrize("how", ["indexed", "not yet", "without FTS5"])
def test_all_words_are_found_in_any_order_and_script(
    store: ConversationStore, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "without FTS5":
        without_fts5(monkeypatch)
    for title, text in CHATS:
        store.add(ME, create(store, ME, title=title).id, node(text=text))
    if how == "indexed":
        indexed(store)
        assert num_indexed(store) == len(CHATS)
    for query, found in [
        ("STAR blue", ["Straße", "Cats"]),
        ("blue st", ["Straße", "Cats"]),
        ("bl star", []),
        ("tar", []),
        ("cATs", ["Cats"]),
        ("STRASSE", ["Straße"]),
        ("ПРИВЕТ", ["Cats"]),
        ("ΣΊΣΥΦΟΣ", ["Cats"]),
        ("CAFÉ", ["Straße"]),
        ("cafe", ["Straße"]),
        ("100%", ["percent"]),
        ("1%s", []),
        ("a_b", ["percent"]),
        ("c\\d", ["percent"]),
        ("猫", ["猫"]),
        ("喜欢", ["猫"]),
        ("欢喜", []),
        ("東京 青", ["猫"]),
        ("欢 it", ["猫"]),
        ("'; DROP TABLE nodes; --", []),
        ('" OR a NEAR(*', []),
        ("nothing", []),
        ("*", []),
        (" ", []),
    ]:
        assert titles(store, query) == found, query
        assert titles(store, query, OTHER) == []


def test_what_was_looked_for_is_marked_where_most_of_it_is(store: ConversationStore) -> None:
    last = chat(store)[1]
    text = f"A star.\n{'much else ' * 40}the blüe  STAR, starry blue {'and more ' * 40}"
    store.update(ME, replace(last, text=text, reasoning="a hidden moon"))
    (found,) = store.search(ME, "blue star")
    assert found.node == last.id
    assert [piece for piece, is_hit in found.snippet if is_hit] == ["blüe", "STAR", "starry", "blue"]
    whole = "".join(piece for piece, _ in found.snippet)
    assert "the blüe STAR, starry blue and more" in whole
    assert whole.startswith("…")
    assert whole.endswith("…")
    assert len(whole) < 130
    (found,) = store.search(ME, "cat")
    assert (found.node, found.snippet) == (None, []), "only in the title"
    assert store.search(ME, "moon") == [], "thinking isn't found"


def test_the_index_follows_what_is_written_and_deleted(store: ConversationStore) -> None:
    conversation, last = chat(store)
    chat(store, OTHER)
    indexed(store)
    assert num_indexed(store) == 4
    store.update(ME, replace(last, text="a moon"))
    assert (titles(store, "moon"), titles(store, "answer"), num_indexed(store)) == (["Cats"], [], 3)
    indexed(store)
    assert (titles(store, "moon"), titles(store, "answer"), num_indexed(store)) == (["Cats"], [], 4)
    store.delete_node(ME, last.id)
    assert (titles(store, "moon"), num_indexed(store)) == ([], 3)
    store.add(ME, conversation.id, reply(last.parent or "", "a sun"))
    assert (titles(store, "moon"), titles(store, "sun")) == ([], ["Cats"])
    store.delete(ME, conversation.id)
    store.purge()
    store.delete_owner(OTHER)
    with store._database.reading() as connection:
        assert connection.execute("SELECT count(*) FROM words").fetchone()[0] == 0


def test_a_database_without_an_index_gets_one(tmp_path: Path) -> None:
    """One of the first format is opened at once, is searched, and then indexed in slices."""
    identity = old_database(tmp_path, version=1)
    store = ConversationStore(tmp_path)
    assert titles(store, "answer") == ["Cats"]
    assert num_indexed(store) == 0
    last = store.read(ME, identity)[0].head
    big = [node(last, f"a text {'x' * 400_000}") for _ in range(4)]
    store.add(ME, identity, *big)
    assert len(list(store.index_texts())) > 1
    assert num_indexed(store) == 6
    assert titles(store, "text") == ["Cats"]
    store.close()


def test_an_index_of_another_python_is_left_alone(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without FTS5 reads, writes and searches a database with an index; the next one with it sees all that."""
    last = chat(store)[1]
    indexed(store)
    store.close()
    with monkeypatch.context() as patch:
        without_fts5(patch)
        store.update(ME, replace(last, text="a moon"))
        assert (titles(store, "moon"), titles(store, "question"), titles(store, "answer")) == (["Cats"], ["Cats"], [])
        assert list(store.index_texts()) == []
        store.close()
    assert (titles(store, "moon"), titles(store, "question"), titles(store, "answer")) == (["Cats"], ["Cats"], [])


def test_a_reply_that_grows_while_it_is_indexed_is_found_as_it_is(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = chat(store)[1]
    real: Callable[[str], list[str]] = search._words

    def grows(text: str) -> list[str]:
        if text == last.text:
            store.update(ME, replace(last, text="answer 0 and a moon"))
        return real(text)

    monkeypatch.setattr(search, "_words", grows)
    indexed(store)
    monkeypatch.undo()
    assert (titles(store, "moon"), num_indexed(store)) == (["Cats"], 1)
