"""Everybody's conversations in one folder: a SQLite database, and the files of their messages by content.

    <folder>/conversations.sqlite
    <folder>/media/

Every call names an owner, and sees and changes only what is the owner's: anything else is not found. Any number of
threads and processes may use one folder. What a call wrote is kept when it returns, whatever happens to the process.
"""

from __future__ import annotations

import sqlite3
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qwen35mm.chat.database import Database
from qwen35mm.chat.media import MediaStore
from qwen35mm.chat.records import (
    Attachment,
    Conversation,
    Node,
    checked_node,
    dump_object,
    dump_plan,
    load_object,
    load_plan,
)
from qwen35mm.chat.tables import MIGRATIONS
from qwen35mm.chat.tree import Tree
from qwen35mm.errors import ConversationDataError, NotFoundError

_CONVERSATION = "id, title, created_s, updated_s, head, settings, first"
_NODE = "id, parent, role, created_s, text, reasoning, thinking_s, status, error, notes, stats, model"
_UPDATED = "text, reasoning, thinking_s, status, error, notes, stats, model"


class ConversationStore:
    """The conversations under `folder`, which is made (mode 0700) when it is first used.

    Every method may raise StorageError: a full, failing or read-only disk, or a database that is damaged, foreign or
    of a newer version. What was kept before stays as it was.

    media    the files of the messages, and who may see them
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._database = Database(folder / "conversations.sqlite", migrations=MIGRATIONS)
        self.media = MediaStore(folder / "media", self._database, clock)
        self._database.add_function("contains_folded", 2, _contains_folded)

    def close(self) -> None:
        """Gives the database back; the next call opens it again."""
        self._database.close()

    # Conversations

    def find(self, owner: str, *, query: str = "", limit: int = 200, offset: int = 0) -> list[Conversation]:
        """The owner's conversations, the last updated one first.

        Args:
            query: what the title or the text of a message must contain, in lower or upper case.
        """
        folded = _folded(query.strip())
        with self._database.reading() as connection:
            return _read_conversations(
                connection,
                "owner = ? AND (? = '' OR contains_folded(title, ?) OR EXISTS (SELECT 1 FROM nodes "
                "WHERE conversation = conversations.id AND contains_folded(text, ?))) "
                "ORDER BY updated_s DESC, sequence DESC LIMIT ? OFFSET ?",
                (owner, folded, folded, folded, limit, offset),
            )

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
        with self._database.writing() as connection:
            for conversation, tree in conversations:
                for node_id in (conversation.head, conversation.first):
                    if node_id is not None and node_id not in tree.nodes:
                        raise ConversationDataError("The conversation is damaged: a message that it names is missing.")
                _insert_conversation(connection, owner, conversation)
                for node in tree.nodes.values():
                    _insert_node(connection, conversation.id, node)
                    for attachment in node.attachments:
                        if attachment.digest not in self.media:
                            raise NotFoundError("A message's file is not kept any more. Add it again.")
                    _release(connection, owner, node.attachments)

    def rename(self, owner: str, conversation_id: str, title: str) -> None:
        """Raises NotFoundError."""
        self._set(owner, conversation_id, title=title)

    def set_settings(self, owner: str, conversation_id: str, settings: Mapping[str, Any]) -> None:
        """Replaces a conversation's settings. Raises NotFoundError."""
        self._set(owner, conversation_id, settings=dump_object(settings, "conversation's settings"))

    def set_head(self, owner: str, conversation_id: str, node_id: str | None) -> None:
        """Chooses the leaf that is shown. Raises NotFoundError."""
        self._set(owner, conversation_id, head=node_id)

    def set_first(self, owner: str, conversation_id: str, node_id: str | None) -> None:
        """Chooses the oldest message that prompts still hold, None for all. Raises NotFoundError."""
        self._set(owner, conversation_id, first=node_id)

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
            changes["settings"] = dump_object(settings, "conversation's settings")
        if first is not None:
            changes["first"] = first
        with self._database.writing() as connection:
            _read_conversation(connection, owner, conversation_id)
            for node in nodes:
                if node.parent is not None:
                    _check_in(connection, owner, conversation_id, node.parent)
                _insert_node(connection, conversation_id, node)
                _release(connection, owner, node.attachments)
            _update(connection, conversation_id, **changes)

    def update(self, owner: str, node: Node) -> None:
        """Writes what can change of a message: all but its place and its time.

        Raises:
            NotFoundError: no such message.
            ConversationDataError: a value that a field can't have.
        """
        columns = _columns(node, _UPDATED)
        assignments = ", ".join(f"{name} = ?" for name in columns)
        with self._database.writing() as connection:
            conversation_id = _conversation_of(connection, owner, node.id)
            connection.execute(f"UPDATE nodes SET {assignments} WHERE id = ?", (*columns.values(), node.id))
            connection.execute("DELETE FROM attachments WHERE node = ?", (node.id,))
            _insert_attachments(connection, node)
            _release(connection, owner, node.attachments)
            _update(connection, conversation_id, updated_s=self._clock())

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
            _update(connection, conversation_id, **changes)

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
        """The owner's preferences; empty before the first `set_preferences`."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT value FROM preferences WHERE owner = ?", (owner,)).fetchone()
        return {} if row is None else load_object(row[0], "preferences")

    def set_preferences(self, owner: str, values: Mapping[str, Any]) -> None:
        """Replaces all of the owner's preferences."""
        row = (owner, dump_object(values, "preferences"))
        with self._database.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO preferences (owner, value) VALUES (?, ?)", row)

    def _set(self, owner: str, conversation_id: str, **columns: Any) -> None:
        with self._database.writing() as connection:
            _read_conversation(connection, owner, conversation_id)
            for node_id in (columns.get("head"), columns.get("first")):
                if node_id is not None:
                    _check_in(connection, owner, conversation_id, node_id)
            _update(connection, conversation_id, **columns)


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
        "SELECT a.node, a.digest, a.kind, a.name, a.num_bytes, a.plan FROM attachments AS a "
        "JOIN nodes AS n ON n.id = a.node WHERE n.conversation = ? ORDER BY a.node, a.position",
        (conversation_id,),
    )
    for node_id, digest, kind, name, num_bytes, plan in rows:
        attachments.setdefault(node_id, []).append(Attachment(digest, kind, name, num_bytes, load_plan(plan)))
    nodes = []
    names = _NODE.split(", ")
    rows = connection.execute(f"SELECT {_NODE} FROM nodes WHERE conversation = ? ORDER BY sequence", (conversation_id,))
    for row in rows:
        fields = dict(zip(names, row, strict=True))
        fields["notes"] = tuple(load_object(fields["notes"], "message's notes").get("notes", ()))
        fields["stats"] = None if fields["stats"] is None else load_object(fields["stats"], "message's numbers")
        nodes.append(Node(**fields, attachments=tuple(attachments.get(fields["id"], ()))))
    return nodes


def _insert_conversation(connection: sqlite3.Connection, owner: str, conversation: Conversation) -> None:
    columns = {**vars(conversation), "settings": dump_object(conversation.settings, "conversation's settings")}
    connection.execute(
        f"INSERT INTO conversations (owner, {', '.join(columns)}) VALUES (?{', ?' * len(columns)})",
        (owner, *columns.values()),
    )


def _insert_node(connection: sqlite3.Connection, conversation_id: str, node: Node) -> None:
    """A new message; its parent may still follow in the same transaction.

    Raises:
        ConversationDataError: a field has a value that it can't have, or a message has this id already.
    """
    columns = _columns(node, _NODE)
    try:
        connection.execute(
            f"INSERT INTO nodes (conversation, {_NODE}) VALUES (?{', ?' * len(columns)})",
            (conversation_id, *columns.values()),
        )
    except sqlite3.IntegrityError:
        raise ConversationDataError("A message with this id is there already.") from None
    _insert_attachments(connection, node)


def _columns(node: Node, names: str) -> dict[str, Any]:
    """A message's checked values for columns of these names."""
    columns = {name: value for name, value in vars(checked_node(node)).items() if name in names.split(", ")}
    columns["notes"] = dump_object({"notes": node.notes}, "message's notes")
    columns["stats"] = None if node.stats is None else dump_object(node.stats, "message's numbers")
    return {name: columns[name] for name in names.split(", ")}


def _insert_attachments(connection: sqlite3.Connection, node: Node) -> None:
    for position, attachment in enumerate(node.attachments):
        connection.execute(
            "INSERT INTO attachments (node, position, digest, kind, name, num_bytes, plan) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                node.id,
                position,
                attachment.digest,
                attachment.kind,
                attachment.name,
                attachment.num_bytes,
                dump_plan(attachment.plan),
            ),
        )


def _release(connection: sqlite3.Connection, owner: str, attachments: Iterable[Attachment]) -> None:
    rows = [(owner, attachment.digest) for attachment in attachments]
    connection.executemany("DELETE FROM held WHERE owner = ? AND digest = ?", rows)


def _update(connection: sqlite3.Connection, conversation_id: str, **columns: Any) -> None:
    assignments = ", ".join(f"{name} = ?" for name in columns)
    connection.execute(f"UPDATE conversations SET {assignments} WHERE id = ?", (*columns.values(), conversation_id))


def _folded(text: str) -> str:
    """Texts that a reader takes for the same in any script, whatever their case and their composition."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFC", text.casefold())


def _contains_folded(text: str, folded_query: str) -> bool:
    return folded_query in _folded(text)
