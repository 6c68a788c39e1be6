"""Everybody's conversations in one folder: a SQLite database, and the files of their messages by content.

    <folder>/conversations.sqlite
    <folder>/media/

Every call names an owner, and sees and changes only this owner's data: anything else is not found. Any number of
threads and processes may share a folder. What a call has written survives a crash of the process.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from qwen35mm.chat.store.bounds import Bounds, find_beyond
from qwen35mm.chat.store.database import Database
from qwen35mm.chat.store.media import MediaStore
from qwen35mm.chat.store.records import Conversation, Node, dump_object, load_object
from qwen35mm.chat.store.rows import (
    AFTER,
    ORDER,
    Place,
    check_in,
    conversation_of,
    conversation_row,
    insert_attachments,
    insert_node,
    insert_row,
    node_row,
    place_values,
    read_conversation,
    read_conversations,
    read_nodes,
    release_files,
    update_row,
)
from qwen35mm.chat.store.search import Snippet, find_phrases, index_texts, phrases_of, prepare, snippet_of
from qwen35mm.chat.store.tables import MIGRATIONS
from qwen35mm.chat.store.tree import Tree
from qwen35mm.errors import ConversationDataError, NotFoundError
from qwen35mm_preprocess.say import say

_PLACE_AND_TIME = ("id", "parent", "role", "created_s")
_SENT_AGAIN_S = 60.0


@dataclass(frozen=True)
class Found:
    """A conversation that a search found.

    node        the newest message that matches; None if only the title does
    snippet     the text around the match, as segments of text and whether each is a match
    """

    conversation: Conversation
    node: str | None
    snippet: Snippet


class ConversationStore:
    """The conversations under `folder`, which is created (mode 0700) at first use.

    Every method may raise StorageError: a full, failing or read-only disk, or a database that is damaged, foreign or
    of a newer version. Data stored before stays unchanged.

    media    the files of the messages, and who may see them

    Args:
        in_memory: whether `close` deletes everything but the files.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time, in_memory: bool = False) -> None:
        self._clock = clock
        path = None if in_memory else folder / "conversations.sqlite"
        self._database = Database(path, migrations=MIGRATIONS, prepare=prepare)
        self.media = MediaStore(folder / "media", self._database, clock)

    def close(self) -> None:
        """Closes the database; the next call opens it again."""
        self._database.close()

    # Conversations

    def find(self, owner: str, *, limit: int = 200, after: Place | None = None) -> list[Conversation]:
        """The owner's conversations: pinned first, then by last update.

        Args:
            after: only those after this place.
        """
        where = f"owner = :owner AND {AFTER} ORDER BY {ORDER} LIMIT :limit"
        with self._database.reading() as connection:
            return read_conversations(connection, where, {"owner": owner, "limit": limit, **place_values(after)})

    def search(self, owner: str, query: str, *, limit: int = 200, after: Place | None = None) -> list[Found]:
        """The owner's conversations with all words of a query in their title or in one message, in the order of
        `find`. The last word matches as a prefix. Empty for a query without words."""
        phrases = phrases_of(query)
        if not phrases:
            return []
        with self._database.reading() as connection:
            rows = find_phrases(connection, owner, phrases, limit, after)
            found = [(read_conversation(connection, owner, row[0]), *row[1:]) for row in rows]
        return [
            Found(conversation, node_id, snippet_of(text, phrases) if text else [])
            for conversation, node_id, text in found
        ]

    def index_texts(self) -> Iterator[None]:
        """Indexes new texts, some at each step. `search` finds them before, too, but more slowly."""
        return index_texts(self._database)

    def conversation(self, owner: str, conversation_id: str) -> Conversation:
        """A conversation without its messages. Raises NotFoundError."""
        with self._database.reading() as connection:
            return read_conversation(connection, owner, conversation_id)

    def read(self, owner: str, conversation_id: str) -> tuple[Conversation, Tree]:
        """A conversation and its messages in one consistent state. Raises NotFoundError.

        Media plans of other versions are read as None.
        """
        with self._database.reading() as connection:
            conversation = read_conversation(connection, owner, conversation_id)
            return conversation, Tree(read_nodes(connection, conversation_id))

    def conversation_of(self, owner: str, node_id: str) -> str | None:
        """The id of a message's conversation; None if this owner has no such message."""
        with self._database.reading() as connection, suppress(NotFoundError):
            return conversation_of(connection, owner, node_id)

    def by_time(self, owner: str) -> dict[float, list[str]]:
        """The ids of the owner's conversations, by the times when they began."""
        found: dict[float, list[str]] = {}
        with self._database.reading() as connection:
            for time_s, id_ in connection.execute("SELECT created_s, id FROM present WHERE owner = ?", (owner,)):
                found.setdefault(time_s, []).append(id_)
        return found

    def insert(
        self,
        owner: str,
        conversations: Iterable[tuple[Conversation, Tree]],
        extended: Iterable[tuple[Conversation, Sequence[Node]]] = (),
    ) -> None:
        """Adds whole conversations, all or none, and releases holds on their files.

        Args:
            extended: conversations that are there already, with another head and time, and messages that are new or
                changed.

        Raises:
            NotFoundError: a message's file is not in `media`, or an extended conversation doesn't exist.
            ConversationDataError: an id is taken, or a value is invalid.
        """
        prepared = [(*each, [node_row(node) for node in each[1].nodes.values()]) for each in conversations]
        additions = [(*each, [node_row(node) for node in each[1]]) for each in extended]
        with self._database.writing() as connection:
            for conversation, tree, rows in prepared:
                for node_id in (conversation.head, conversation.first):
                    if node_id is not None and node_id not in tree.nodes:
                        raise ConversationDataError(say("The chat is damaged: a message that it names is missing."))
                insert_row(connection, "conversations", {"owner": owner, **conversation_row(vars(conversation))})
                for node, row in zip(tree.nodes.values(), rows, strict=True):
                    self._insert_node(connection, owner, conversation.id, node, row)
            for conversation, nodes, rows in additions:
                read_conversation(connection, owner, conversation.id)
                added = {node.id for node in nodes}
                for node, row in zip(nodes, rows, strict=True):
                    if node.parent is not None and node.parent not in added:
                        check_in(connection, owner, conversation.id, node.parent)
                    if connection.execute("SELECT 1 FROM nodes WHERE id = ?", (node.id,)).fetchone():
                        self._rewrite(connection, owner, node, row)
                    else:
                        self._insert_node(connection, owner, conversation.id, node, row)
                changes = {"head": conversation.head, "updated_s": conversation.updated_s}
                update_row(connection, "conversations", conversation.id, changes)

    def _insert_node(
        self, connection: Connection, owner: str, conversation_id: str, node: Node, row: Mapping[str, Any]
    ) -> None:
        insert_node(connection, conversation_id, node, row)
        for attachment in node.attachments:
            if attachment.digest not in self.media:
                raise NotFoundError(say("A message's file is no longer stored. Add it again."))
        release_files(connection, owner, node.attachments)

    def change(self, owner: str, conversation_id: str, **values: Any) -> None:
        """Changes fields of a `Conversation`.

        Raises:
            NotFoundError: no such conversation, or `head` or `first` is not in it.
            ConversationDataError: the settings are no JSON object.
        """
        with self._database.writing() as connection:
            read_conversation(connection, owner, conversation_id)
            for node_id in (values.get("head"), values.get("first")):
                if node_id is not None:
                    check_in(connection, owner, conversation_id, node_id)
            update_row(connection, "conversations", conversation_id, conversation_row(values))

    def give_title(self, owner: str, conversation_id: str, title: str | None) -> bool:
        """Sets the model's title; None keeps the old one for good. False if a person gave one, or it is deleted."""
        with self._database.writing() as connection:
            found = connection.execute(
                "UPDATE conversations SET titled = 1, title = COALESCE(?, title) "
                "WHERE owner = ? AND id = ? AND NOT titled AND deleted_s IS NULL",
                (title, owner, conversation_id),
            )
            return found.rowcount == 1

    def delete(self, owner: str, conversation_id: str) -> None:
        """Deletes a conversation. It is hidden at once; `restore` works until `purge`.

        Raises:
            NotFoundError: no such conversation.
        """
        with self._database.writing() as connection:
            read_conversation(connection, owner, conversation_id)
            update_row(connection, "conversations", conversation_id, {"deleted_s": self._clock()})

    def restore(self, owner: str, conversation_id: str) -> None:
        """Undoes `delete`. Raises NotFoundError if it is too late."""
        with self._database.writing() as connection:
            found = connection.execute(
                "UPDATE conversations SET deleted_s = NULL WHERE owner = ? AND id = ?", (owner, conversation_id)
            )
            if found.rowcount == 0:
                raise NotFoundError(say("This chat no longer exists."))

    def purge(self, min_age_s: float = 0.0) -> int:
        """Removes conversations deleted at least `min_age_s` ago, with their files; returns how many.

        A file that somebody is just sending again stays for `media.collect_garbage`.
        """
        with self._database.writing() as connection:
            values = (self._clock() - min_age_s,)
            digests = connection.execute(
                "SELECT DISTINCT digest FROM attachments JOIN nodes AS n ON n.id = node "
                "JOIN conversations AS c ON c.id = n.conversation WHERE c.deleted_s <= ?",
                values,
            ).fetchall()
            num_deleted = connection.execute("DELETE FROM conversations WHERE deleted_s <= ?", values).rowcount
        self.media.discard([digest for (digest,) in digests], min_age_s=_SENT_AGAIN_S)
        return num_deleted

    def trim(self, bounds: Bounds) -> int:
        """Removes conversations over the bounds, least recently updated first, and all deleted ones; returns how
        many."""
        num_bytes = self.media.num_bytes()
        with self._database.writing() as connection:
            now_s = self._clock()
            ids = find_beyond(connection, bounds, now_s, num_bytes)
            connection.executemany("UPDATE conversations SET deleted_s = ? WHERE id = ?", [(now_s, id_) for id_ in ids])
        return self.purge()

    def delete_owner(self, owner: str) -> None:
        """Deletes all data of an owner; `media.collect_garbage` removes files that nobody else has."""
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
        """Adds messages, all or none, shows the last one, and releases holds on their files.

        Args:
            settings: the conversation's new settings; None leaves them.
            first: the oldest message in later prompts; None leaves it.

        Raises:
            NotFoundError: no such conversation, or a message's parent is not in it.
            ConversationDataError: a message has an invalid value, or its id is taken.
        """
        changes: dict[str, Any] = {"updated_s": self._clock(), "head": nodes[-1].id}
        if settings is not None:
            changes["settings"] = settings
        if first is not None:
            changes["first"] = first
        rows = [node_row(node) for node in nodes]  # outside the transaction, for which others wait
        with self._database.writing() as connection:
            read_conversation(connection, owner, conversation_id)
            for node, row in zip(nodes, rows, strict=True):
                if node.parent is not None:
                    check_in(connection, owner, conversation_id, node.parent)
                insert_node(connection, conversation_id, node, row)
                release_files(connection, owner, node.attachments)
            update_row(connection, "conversations", conversation_id, conversation_row(changes))

    def update(self, owner: str, node: Node) -> None:
        """Writes a changed message; its id, parent, role and time stay.

        Raises:
            NotFoundError: no such message.
            ConversationDataError: a value is invalid.
        """
        row = node_row(node)  # outside the transaction, for which others wait
        with self._database.writing() as connection:
            conversation_id = conversation_of(connection, owner, node.id)
            changes: dict[str, Any] = {"updated_s": self._clock()}
            (status,) = connection.execute("SELECT status FROM nodes WHERE id = ?", (node.id,)).fetchone()
            if status == "running" != node.status:
                changes["unseen"] = True
            self._rewrite(connection, owner, node, row)
            update_row(connection, "conversations", conversation_id, changes)

    def _rewrite(self, connection: Connection, owner: str, node: Node, row: Mapping[str, Any]) -> None:
        changed = {name: value for name, value in row.items() if name not in _PLACE_AND_TIME}
        update_row(connection, "nodes", node.id, changed)
        connection.execute("DELETE FROM attachments WHERE node = ?", (node.id,))
        insert_attachments(connection, node)
        release_files(connection, owner, node.attachments)

    def delete_node(self, owner: str, node_id: str) -> None:
        """Deletes a message with everything below it. Raises NotFoundError.

        If that includes the shown leaf, the newest leaf of the newest sibling is shown instead; without siblings the
        parent; without a parent nothing. A deleted `first` becomes None.
        """
        with self._database.writing() as connection:
            conversation_id = conversation_of(connection, owner, node_id)
            conversation = read_conversation(connection, owner, conversation_id)
            tree = Tree(read_nodes(connection, conversation_id))
            deleted = tree.subtree(node_id)
            connection.executemany("DELETE FROM nodes WHERE id = ?", [(identity,) for identity in deleted])
            changes: dict[str, Any] = {"updated_s": self._clock()}
            if conversation.head in deleted:
                siblings = [node.id for node in tree.siblings(node_id) if node.id != node_id]
                changes["head"] = tree.newest_leaf(siblings[-1]) if siblings else tree.nodes[node_id].parent
            if conversation.first in deleted:
                changes["first"] = None
            update_row(connection, "conversations", conversation_id, changes)

    # Presets and preferences: JSON objects that the store doesn't interpret

    def presets(self, owner: str) -> dict[str, dict[str, Any]]:
        """The owner's presets by name, sorted by name."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT name, value FROM presets WHERE owner = ? ORDER BY name", (owner,))
            return {name: load_object(value, "preset") for name, value in rows}

    def save_preset(self, owner: str, name: str, values: Mapping[str, Any]) -> None:
        """Saves a preset; replaces one of this name."""
        row = (owner, name, dump_object(values, "preset"))
        with self._database.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO presets (owner, name, value) VALUES (?, ?, ?)", row)

    def delete_preset(self, owner: str, name: str) -> None:
        """Deletes a preset. Raises NotFoundError if there is none of this name."""
        with self._database.writing() as connection:
            if connection.execute("DELETE FROM presets WHERE owner = ? AND name = ?", (owner, name)).rowcount == 0:
                raise NotFoundError(say("This preset no longer exists."))

    def preferences(self, owner: str) -> dict[str, Any]:
        """The owner's preferences; empty before the first `change_preferences`."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT value FROM preferences WHERE owner = ?", (owner,)).fetchone()
        return {} if row is None else load_object(row[0], "preferences")

    def change_preferences(self, owner: str, values: Mapping[str, Any]) -> None:
        """Changes the given preferences of the owner only, since another page may have changed others."""
        with self._database.writing() as connection:
            row = connection.execute("SELECT value FROM preferences WHERE owner = ?", (owner,)).fetchone()
            kept = {} if row is None else load_object(row[0], "preferences")
            changed = (owner, dump_object({**kept, **values}, "preferences"))
            connection.execute("INSERT OR REPLACE INTO preferences (owner, value) VALUES (?, ?)", changed)


def new_id() -> str:
    """A new id of a conversation or a message: 32 random hex digits."""
    return uuid.uuid4().hex
