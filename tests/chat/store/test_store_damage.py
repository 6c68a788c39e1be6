"""Databases that can't be used: said in words, and never touched."""

from __future__ import annotations

import os
import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.errors import StorageError
from tests.chat.helpers import ME, chat, create, files_in, limit_pages, node

NAME = "conversations.sqlite"


def refused(store: ConversationStore, words: str) -> None:
    for _ in range(2):
        with pytest.raises(StorageError, match=words) as caught:
            create(store, ME, title="new")
        for secret in ("sqlite3", "Traceback", str(Path.cwd()), "errno"):
            assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no database" * 500, "damaged"),
        (b"SQLite format 3\x00" + bytes(5000), "damaged"),
        (bytes(4096), "damaged"),
        ("CREATE TABLE nodes (id); PRAGMA user_version=99", "newer version.*99.*update the program"),
        ("CREATE TABLE history (url)", "another program's database"),
    ],
    ids=["text", "header", "zeros", "newer version", "another program's"],
)
def test_a_file_that_can_t_be_used_stays(tmp_path: Path, content: bytes | str, words: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / NAME).write_bytes(content)
    else:
        with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as connection:
            connection.executescript(content)
    content = (tmp_path / NAME).read_bytes()
    refused(ConversationStore(tmp_path), words)
    assert (tmp_path / NAME).read_bytes() == content
    assert files_in(tmp_path) == [NAME]


@pytest.mark.parametrize("seed", range(4))
def test_overwritten_pages_are_typed_errors(store: ConversationStore, tmp_path: Path, seed: int) -> None:
    """Every call works or says that the database is damaged; the file is never made anew."""
    for _ in range(3):
        chat(store, turns=20)
    store.close()
    path = tmp_path / "data" / NAME
    content = bytearray(path.read_bytes())
    chosen = random.Random(seed)
    for _ in range(6):
        begin = chosen.randrange(100, len(content) - 512)
        content[begin : begin + 512] = chosen.randbytes(512)
    path.write_bytes(content)
    num_errors = 0
    for call in (
        lambda: [store.read(ME, c.id)[1] for c in store.find(ME)],
        lambda: store.search(ME, "answer 19"),
        lambda: chat(store),
        lambda: store.delete_owner(ME),
    ):
        try:
            call()
        except StorageError:
            num_errors += 1
    assert num_errors > 0
    store.close()
    assert path.stat().st_size >= len(content)


def test_a_full_database_keeps_what_was_there(store: ConversationStore) -> None:
    conversation, last = chat(store)
    limit_pages(store, num_free=2)
    with pytest.raises(StorageError, match="disk is full"):
        store.update(ME, replace(last, text="x" * 1_000_000))
    assert store.read(ME, conversation.id)[1].nodes[last.id].text == last.text
    store.update(ME, replace(last, text="y" * 1_000_000))
    assert store.read(ME, conversation.id)[1].nodes[last.id].text == "y" * 1_000_000


def test_a_read_only_database_keeps_what_was_there(store: ConversationStore) -> None:
    conversation, last = chat(store)
    with store._database.reading() as connection:
        connection.execute("PRAGMA query_only=ON")
    with pytest.raises(StorageError, match="can't be written to"):
        store.add(ME, conversation.id, node(last.id))
    assert len(store.read(ME, conversation.id)[1].nodes) == 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_folder_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    refused(ConversationStore(tmp_path / "data"), "can't be made")
    refused(ConversationStore(tmp_path), "can't be opened")


def test_a_folder_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("mine")
    refused(ConversationStore(tmp_path / "data"), "can't be made")
    refused(ConversationStore(tmp_path / "data" / "deeper"), "can't be made")
    assert (tmp_path / "data").read_text() == "mine"


def test_a_busy_database_is_said(store: ConversationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.chat.store.database._BUSY_TIMEOUT_S", 0.05)
    conversation, _ = chat(store)
    other = sqlite3.connect(tmp_path / "data" / NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    refused(store, "in use by another program")
    assert store.read(ME, conversation.id)[0] == conversation, "reading goes on"
    other.execute("ROLLBACK")
    other.close()
    create(store, ME)
