"""Everybody's conversations in one folder: a SQLite database, and the files of their messages by content.

    <folder>/conversations.sqlite
    <folder>/media/

Every call names an owner, and sees and changes only what is the owner's: anything else is not found. Any number of
threads and processes may use one folder. What a call wrote is kept when it returns, whatever happens to the process.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from qwen35mm.chat.database import Database
from qwen35mm.chat.media import MediaStore
from qwen35mm.chat.records import (
    Attachment,
    Conversation,
    Node,
    checked_node,
    dump_clip,
    dump_object,
    dump_plan,
    load_clip,
    load_object,
    load_plan,
)
from qwen35mm.chat.search import Snippet, find_phrases, index_texts, phrases_of, prepare, snippet_of
from qwen35mm.chat.tables import MIGRATIONS
from qwen35mm.chat.tree import Tree
from qwen35mm.errors import ConversationDataError, NotFoundError

# Columns are called as the fields are.
_CONVERSATION = ", ".join(field.name for field in fields(Conversation))
_NODE = ", ".join(field.name for field in fields(Node) if field.name != "attachments")
_ATTACHMENT = ", ".join(field.name for field in fields(Attachment))
_PLACE_AND_TIME = ("id", "parent", "role", "created_s")


@dataclass(frozen=True)
class Found:
    """A conversation that a search found.

    node        the newest message with what was looked for; None where only the title has it
    snippet     the part of its text around that, in pieces, each with whether it was looked for
    """

    conversation: Conversation
    node: str | None
    snippet: Snippet


class ConversationStore:
    """The conversations under `folder`, which is made (mode 0700) when it is first used.

    Every method may raise StorageError: a full, failing or read-only disk, or a database that is damaged, foreign or
    of a newer version. What was kept before stays as it was.

    media    the files of the messages, and who may see them
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._database = Database(folder / "conversations.sqlite", migrations=MIGRATIONS, prepare=prepare)
        self.media = MediaStore(folder / "media", self._database, clock)

    def close(self) -> None:
        """Gives the database back; the next call opens it again."""
        self._database.close()

    # Conversations

    def find(self, owner: str, *, limit: int = 200) -> list[Conversation]:
        """The owner's conversations, the last updated one first."""
        with self._database.reading() as connection:
            return _read_conversations(
                connection, "owner = ? ORDER BY updated_s DESC, sequence DESC LIMIT ?", (owner, limit)
            )

    def search(self, owner: str, query: str, *, limit: int = 200) -> list[Found]:
        """The owner's conversations that have all words of a query in their title or in the text of one message, the
        last updated one first; of the query's last word, the beginning. None where it has no words."""
        phrases = phrases_of(query)
        if not phrases:
            return []
        with self._database.reading() as connection:
            rows = find_phrases(connection, owner, phrases, limit)
            found = [(_read_conversation(connection, owner, row[0]), *row[1:]) for row in rows]
        return [
            Found(conversation, node_id, snippet_of(text, phrases) if text else [])
            for conversation, node_id, text in found
        ]

    def index_texts(self) -> Iterator[None]:
        """Has `search` find new texts without reading them all, some at each step; it finds them before, too, only
        slower."""
        return index_texts(self._database)

    def conversation(self, owner: str, conversation_id: str) -> Conversation:
        """A conversation without its messages. Raises NotFoundError."""
        with self._database.reading() as connection:
            return _read_conversation(connection, owner, conversation_id)

    def read(self, owner: str, conversation_id: str) -> tuple[Conversation, Tree]:
        """A conversation and its messages as of one moment. Raises NotFoundError.

        A file's media plan that another version wrote is read as none.
        """
        with self._database.reading() as connection:
            conversation = _read_conversation(connection, owner, conversation_id)
            return conversation, Tree(_read_nodes(connection, conversation_id))

    def insert(self, owner: str, conversations: Iterable[tuple[Conversation, Tree]]) -> None:
        """Adds whole conversations, all of them or none; the files that they have are then no longer held.

        Raises:
            NotFoundError: a message's file is not in `media`.
            ConversationDataError: an id is taken, or a value can't be kept.
        """
        prepared = [(*each, [_node_row(node) for node in each[1].nodes.values()]) for each in conversations]
        with self._database.writing() as connection:
            for conversation, tree, rows in prepared:
                for node_id in (conversation.head, conversation.first):
                    if node_id is not None and node_id not in tree.nodes:
                        raise ConversationDataError("The conversation is damaged: a message that it names is missing.")
                _insert(connection, "conversations", {"owner": owner, **_conversation_row(vars(conversation))})
                for node, row in zip(tree.nodes.values(), rows, strict=True):
                    _insert_node(connection, conversation.id, node, row)
                    for attachment in node.attachments:
                        if attachment.digest not in self.media:
                            raise NotFoundError("A message's file is not kept any more. Add it again.")
                    _release(connection, owner, node.attachments)

    def change(self, owner: str, conversation_id: str, **values: Any) -> None:
        """Changes a conversation's title, settings, head or first; see `Conversation`.

        Raises:
            NotFoundError: no such conversation, or the head or the first is not in it.
            ConversationDataError: settings that are no JSON object.
        """
        with self._database.writing() as connection:
            _read_conversation(connection, owner, conversation_id)
            for node_id in (values.get("head"), values.get("first")):
                if node_id is not None:
                    _check_in(connection, owner, conversation_id, node_id)
            _update(connection, "conversations", conversation_id, _conversation_row(values))

    def delete(self, owner: str, conversation_id: str) -> None:
        """Deletes a conversation; files that nothing else has go with `media.collect_garbage`. Raises NotFoundError."""
        with self._database.writing() as connection:
            _read_conversation(connection, owner, conversation_id)
            connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

    def delete_owner(self, owner: str) -> None:
        """Deletes everything of an owner; files that nobody else has go with `media.collect_garbage`."""
        with self._database.writing() as connection:
            for table in ("conversations", "held", "presets", "preferences"):
                connection.execute(f"DELETE FROM {table} WHERE owner = ?", (owner,))

    # Messages

    def add(
        self,
        owner: str,
        conversation_id: str,
        *nodes: Node,
        settings: Mapping[str, Any] | None = None,
        first: str | None = None,
    ) -> None:
        """Adds messages, all or none, and shows the last one; the files that they have are then no longer held.

        Args:
            settings: the conversation's from now on; None leaves them.
            first: the oldest message that prompts hold from now on; None leaves it.

        Raises:
            NotFoundError: no such conversation, or a message's parent is not in it.
            ConversationDataError: a message has a value that it can't have, or its id is taken.
        """
        changes: dict[str, Any] = {"updated_s": self._clock(), "head": nodes[-1].id}
        if settings is not None:
            changes["settings"] = settings
        if first is not None:
            changes["first"] = first
        rows = [_node_row(node) for node in nodes]  # before others have to wait
        with self._database.writing() as connection:
            _read_conversation(connection, owner, conversation_id)
            for node, row in zip(nodes, rows, strict=True):
                if node.parent is not None:
                    _check_in(connection, owner, conversation_id, node.parent)
                _insert_node(connection, conversation_id, node, row)
                _release(connection, owner, node.attachments)
            _update(connection, "conversations", conversation_id, _conversation_row(changes))

    def update(self, owner: str, node: Node) -> None:
        """Writes what can change of a message: all but its place and its time.

        Raises:
            NotFoundError: no such message.
            ConversationDataError: a value that a field can't have.
        """
        row = {name: value for name, value in _node_row(node).items() if name not in _PLACE_AND_TIME}
        with self._database.writing() as connection:
            conversation_id = _conversation_of(connection, owner, node.id)
            _update(connection, "nodes", node.id, row)
            connection.execute("DELETE FROM attachments WHERE node = ?", (node.id,))
            _insert_attachments(connection, node)
            _release(connection, owner, node.attachments)
            _update(connection, "conversations", conversation_id, {"updated_s": self._clock()})

    def delete_node(self, owner: str, node_id: str) -> None:
        """Deletes a message with everything below it. Raises NotFoundError.

        Where the shown leaf was among it, the newest leaf of the newest sibling is shown instead; without siblings
        the parent; without a parent nothing. A `first` that was among it becomes None.
        """
        with self._database.writing() as connection:
            conversation_id = _conversation_of(connection, owner, node_id)
            conversation = _read_conversation(connection, owner, conversation_id)
            tree = Tree(_read_nodes(connection, conversation_id))
            deleted = tree.subtree(node_id)
            connection.executemany("DELETE FROM nodes WHERE id = ?", [(identity,) for identity in deleted])
            changes: dict[str, Any] = {"updated_s": self._clock()}
            if conversation.head in deleted:
                siblings = [node.id for node in tree.siblings(node_id) if node.id != node_id]
                changes["head"] = tree.newest_leaf(siblings[-1]) if siblings else tree.nodes[node_id].parent
            if conversation.first in deleted:
                changes["first"] = None
            _update(connection, "conversations", conversation_id, changes)

    # A person's presets and preferences: JSON objects that mean nothing here

    def presets(self, owner: str) -> dict[str, dict[str, Any]]:
        """The owner's presets by name, in the order of the names."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT name, value FROM presets WHERE owner = ? ORDER BY name", (owner,))
            return {name: load_object(value, "preset") for name, value in rows}

    def save_preset(self, owner: str, name: str, values: Mapping[str, Any]) -> None:
        """Keeps a preset; one of this name is replaced."""
        row = (owner, name, dump_object(values, "preset"))
        with self._database.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO presets (owner, name, value) VALUES (?, ?, ?)", row)

    def delete_preset(self, owner: str, name: str) -> None:
        """Raises NotFoundError where there is none of this name."""
        with self._database.writing() as connection:
            if connection.execute("DELETE FROM presets WHERE owner = ? AND name = ?", (owner, name)).rowcount == 0:
                raise NotFoundError("This preset is not there any more.")

    def preferences(self, owner: str) -> dict[str, Any]:
        """The owner's preferences; empty before the first `change_preferences`."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT value FROM preferences WHERE owner = ?", (owner,)).fetchone()
        return {} if row is None else load_object(row[0], "preferences")

    def change_preferences(self, owner: str, values: Mapping[str, Any]) -> None:
        """Changes those of the owner's preferences that are named; another page may have changed others."""
        with self._database.writing() as connection:
            row = connection.execute("SELECT value FROM preferences WHERE owner = ?", (owner,)).fetchone()
            kept = {} if row is None else load_object(row[0], "preferences")
            changed = (owner, dump_object({**kept, **values}, "preferences"))
            connection.execute("INSERT OR REPLACE INTO preferences (owner, value) VALUES (?, ?)", changed)


def new_id() -> str:
    """A new id of a conversation or a message: 32 random hex digits."""
    return uuid.uuid4().hex


# Rows, inside a caller's transaction


def _read_conversations(connection: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> list[Conversation]:
    """The conversations that a clause selects; `where` holds no outside text."""
    names = _CONVERSATION.split(", ")
    found = []
    for row in connection.execute(f"SELECT {_CONVERSATION} FROM conversations WHERE {where}", values):
        fields = dict(zip(names, row, strict=True))
        fields["settings"] = load_object(fields["settings"], "conversation's settings")
        found.append(Conversation(**fields))
    return found


def _read_conversation(connection: sqlite3.Connection, owner: str, conversation_id: str) -> Conversation:
    """Raises NotFoundError, also for another owner's."""
    found = _read_conversations(connection, "owner = ? AND id = ?", (owner, conversation_id))
    if not found:
        raise NotFoundError("This conversation is not there any more.")
    return found[0]


def _conversation_of(connection: sqlite3.Connection, owner: str, node_id: str) -> str:
    """The id of a message's conversation. Raises NotFoundError, also for another owner's."""
    row = connection.execute(
        "SELECT c.id FROM nodes AS n JOIN conversations AS c ON c.id = n.conversation WHERE n.id = ? AND c.owner = ?",
        (node_id, owner),
    ).fetchone()
    if row is None:
        raise NotFoundError("This message is not there any more.")
    return row[0]


def _check_in(connection: sqlite3.Connection, owner: str, conversation_id: str, node_id: str) -> None:
    if _conversation_of(connection, owner, node_id) != conversation_id:
        raise NotFoundError("This message is not in the conversation.")


def _read_nodes(connection: sqlite3.Connection, conversation_id: str) -> list[Node]:
    """All messages of a conversation, in the order in which they came."""
    attachments: dict[str, list[Attachment]] = {}
    rows = connection.execute(
        f"SELECT node, {_ATTACHMENT} FROM attachments WHERE node IN (SELECT id FROM nodes WHERE conversation = ?) "
        "ORDER BY node, position",
        (conversation_id,),
    )
    for node_id, digest, kind, name, num_bytes, plan, clip in rows:
        file = Attachment(digest, kind, name, num_bytes, load_plan(plan), load_clip(clip))
        attachments.setdefault(node_id, []).append(file)
    nodes = []
    names = _NODE.split(", ")
    rows = connection.execute(f"SELECT {_NODE} FROM nodes WHERE conversation = ? ORDER BY sequence", (conversation_id,))
    for row in rows:
        values = dict(zip(names, row, strict=True))
        values["notes"] = tuple(load_object(values["notes"], "message's notes").get("notes", ()))
        values["stats"] = None if values["stats"] is None else load_object(values["stats"], "message's numbers")
        nodes.append(Node(**values, attachments=tuple(attachments.get(values["id"], ()))))
    return nodes


def _insert_node(connection: sqlite3.Connection, conversation_id: str, node: Node, row: Mapping[str, Any]) -> None:
    """A new message with its `_node_row`; its parent may still follow in the same transaction.

    Raises ConversationDataError.
    """
    _insert(connection, "nodes", {"conversation": conversation_id, **row})
    _insert_attachments(connection, node)


def _insert_attachments(connection: sqlite3.Connection, node: Node) -> None:
    for position, attachment in enumerate(node.attachments):
        values = {**vars(attachment), "plan": dump_plan(attachment.plan), "clip": dump_clip(attachment.clip)}
        _insert(connection, "attachments", {"node": node.id, "position": position, **values})


def _conversation_row(values: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(values)
    if "settings" in row:
        row["settings"] = dump_object(row["settings"], "conversation's settings")
    return row


def _node_row(node: Node) -> dict[str, Any]:
    """Raises ConversationDataError for a value that a field can't have."""
    row = {**vars(checked_node(node)), "notes": dump_object({"notes": node.notes}, "message's notes")}
    row["stats"] = None if node.stats is None else dump_object(node.stats, "message's numbers")
    del row["attachments"]
    return row


def _insert(connection: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> None:
    """Raises ConversationDataError where there is a row of this id."""
    places = ", ".join("?" * len(row))
    try:
        connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", (*row.values(),))
    except sqlite3.IntegrityError:
        raise ConversationDataError("A conversation or a message with this id is there already.") from None


def _update(connection: sqlite3.Connection, table: str, identity: str, row: Mapping[str, Any]) -> None:
    assignments = ", ".join(f"{name} = ?" for name in row)
    connection.execute(f"UPDATE {table} SET {assignments} WHERE id = ?", (*row.values(), identity))


def _release(connection: sqlite3.Connection, owner: str, attachments: Iterable[Attachment]) -> None:
    rows = [(owner, attachment.digest) for attachment in attachments]
    connection.executemany("DELETE FROM held WHERE owner = ? AND digest = ?", rows)
