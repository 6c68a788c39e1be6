"""Messages, plans and files for the tests of conversations."""

from __future__ import annotations

import hashlib
import io
import itertools
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from qwen35mm.chat.store.records import Attachment, Conversation, Node
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.chat.store.tables import MIGRATIONS
from qwen35mm.chat.store.tree import Tree
from qwen35mm_preprocess import GridTHW, MediaPlan

ME = "ann"
OTHER = "bob"

_clock = itertools.count(1_700_000_000)

IMAGE_PLAN = MediaPlan(
    kind="image",
    source_size=(480, 640),
    size=(64, 96),
    grid_thw=GridTHW(1, 4, 6),
    num_tokens=6,
    num_prompt_tokens=8,
    cache_bytes=98304,
    processing="0f" * 16,
    notes=("Made smaller: “6 tokens”.",),
    digest="ab" * 32,
    unit_digests=("cd" * 32,),
)
VIDEO_PLAN = MediaPlan(
    kind="video",
    source_size=(480, 640),
    size=(64, 64),
    grid_thw=GridTHW(2, 4, 4),
    num_tokens=8,
    num_prompt_tokens=40,
    cache_bytes=1 << 40,
    processing="0f" * 16,
    source_frames=7,
    duration_s=0.1 + 0.2,
    frame_indices=(0, 2, 3, 6),
    frame_times_s=(0.0, 1 / 3, 0.5, 1e-17),
    timestamps_s=(1 / 6, 0.25),
    similar_difference=4.0,
)


def create(
    store: ConversationStore, owner: str, *, title: str = "", settings: dict[str, Any] | None = None
) -> Conversation:
    """A new conversation without messages."""
    conversation = Conversation(new_id(), title, now_s := time.time(), now_s, settings=settings or {})
    store.insert(owner, [(conversation, Tree([]))])
    return conversation


def node(parent: str | None = None, text: str = "hello", **values: Any) -> Node:
    """A message of the user, later than every one before."""
    return Node(**{"id": new_id(), "parent": parent, "role": "user", "created_s": next(_clock), "text": text} | values)


def reply(parent: str, text: str = "hi", **values: Any) -> Node:
    return node(parent, text, role="assistant", **values)


def attach(store: ConversationStore, content: bytes, name: str, kind: Any = "image", plan: Any = None) -> Attachment:
    """A file that the store keeps, as an attachment."""
    digest, num_bytes = store.media.add(io.BytesIO(content), max_bytes=1 << 30)
    return Attachment(digest, kind, name, num_bytes, plan)


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def old_database(folder: Path, version: int) -> str:
    """A database as it was written in an earlier format, with a conversation of question and answer; its id."""
    folder.mkdir(exist_ok=True)
    identity, first, last = new_id(), new_id(), new_id()
    with closing(sqlite3.connect(folder / "conversations.sqlite", isolation_level=None)) as connection:
        for statement in itertools.chain(*MIGRATIONS[:version]):
            connection.execute(statement)
        names = "id, owner, title, created_s, updated_s, head, settings"
        row = (identity, ME, "Cats", 1.0, 2.0, last, "{}")
        connection.execute(f"INSERT INTO conversations ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        names = "conversation, id, parent, role, text, created_s, reasoning, status, notes"
        for row in ((first, None, "user", "question 0"), (last, first, "assistant", "answer 0")):
            values = (identity, *row, 1.0, "", "finished", "{}")
            connection.execute(f"INSERT INTO nodes ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        connection.execute(f"PRAGMA user_version={version}")
    return identity


def chat(store: ConversationStore, owner: str = ME, title: str = "Cats", turns: int = 1) -> tuple[Conversation, Node]:
    """A conversation of question and reply; it as it is now, and its last message."""
    conversation = create(store, owner, title=title)
    last = None
    for turn in range(turns):
        question = node(last.id if last else None, f"question {turn}")
        last = reply(question.id, f"answer {turn}")
        store.add(owner, conversation.id, question)
        store.add(owner, conversation.id, last)
    assert last is not None
    return store.read(owner, conversation.id)[0], last


def shape(tree: Tree) -> dict[tuple[int, ...], Any]:
    """A tree without its ids: every message's values by its way from the root."""
    found = {}
    open_paths = [((index,), root) for index, root in enumerate(tree.children(None))]
    while open_paths:
        path, message = open_paths.pop()
        found[path] = {**vars(message), "id": None, "parent": None, "first": way(tree, message.first)}
        open_paths += [((*path, index), child) for index, child in enumerate(tree.children(message.id))]
    return found


def way(tree: Tree, node_id: str | None) -> tuple[int, ...] | None:
    """A message's place in its tree, whatever its id."""
    if node_id is None:
        return None
    return tuple(tree.siblings(message.id).index(message) for message in tree.path(node_id))


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@contextmanager
def full_disk(store: ConversationStore) -> Iterator[None]:
    """SQLite itself finds no page more for the database, however often it is opened."""
    database = store._database
    real = database._open

    def open_full() -> sqlite3.Connection:
        connection = real()
        connection.execute("PRAGMA max_page_count=1")  # less than there are is as many as there are
        return connection

    with database._lock:
        database.close()
        with closing(real()) as connection:
            connection.execute("VACUUM")  # what was deleted leaves free pages
        database._open = open_full
    try:
        yield
    finally:
        database._open = real
        database.close()


def limit_pages(store: ConversationStore, num_free: int = 0) -> None:
    """Leaves so many pages of the disk to the database."""
    with store._database.reading() as connection:
        num_pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={num_pages + num_free}")
